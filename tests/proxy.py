"""A proxy that cuts connections, for the tests of what is made anew."""

from __future__ import annotations

import select
import socket
import struct
import threading

DATA_NBYTES = 4096  # more at once is no handshake


class Proxy(threading.Thread):
    """Stands before the listener at `tcp://host:port`; `cut()` resets every connection, as `tcpkill` does;
    `flip(bit)` turns a bit over of the next data that passes; `stop()` takes no more, either."""

    def __init__(self, target: str):
        super().__init__(daemon=True)
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self.target = host, int(port)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self.pairs: dict[socket.socket, socket.socket] = {}
        self.ended = self.cutting = False
        self.flipping = -1
        self.flipped = 0
        self.start()

    def run(self) -> None:
        while not self.ended:
            ready, _, _ = select.select([self.listener, *self.pairs], [], [], 0.005)
            if self.cutting:
                self.cutting = False
                for s in list(self.pairs):
                    self._close(s)
                continue
            for s in ready:
                if s is self.listener:
                    inner, _ = s.accept()
                    outer = socket.create_connection(self.target)
                    self.pairs |= {inner: outer, outer: inner}
                elif s in self.pairs:
                    try:
                        data = bytearray(s.recv(1 << 16))
                        if self.flipping >= 0 and len(data) > DATA_NBYTES:
                            data[self.flipping // 8 % len(data)] ^= 1 << self.flipping % 8
                            self.flipping, self.flipped = -1, self.flipped + 1
                        self.pairs[s].sendall(data)
                    except OSError:
                        data = bytearray()
                    if not data:
                        self._close(s)
        for s in list(self.pairs):
            self._close(s)
        self.listener.close()

    def _close(self, s: socket.socket) -> None:
        for x in (s, self.pairs.get(s)):
            if x is not None and self.pairs.pop(x, None) is not None:
                x.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                x.close()

    def cut(self) -> None:
        self.cutting = True

    def flip(self, bit: int) -> None:
        self.flipping = bit

    def stop(self) -> None:
        self.ended = True
        self.join()
