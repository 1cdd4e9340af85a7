"""Beside a step that tells nobody anything, a ring of plain TCP sockets: each rank sends bytes to the next one and
receives as many, from when the first gradient may be there on. Of steps with one update, about the least that there
can be on this link and these processors."""

from __future__ import annotations

import socket
import statistics
import threading
import time

import numpy as np

from sides.data import batch
from sides.steps import Run

PIECE_NBYTES = 512 << 10
FORWARD = 1 / 3  # of a step: the backward pass computes twice as much
TIMEOUT_S = 60.0


def beside(run: Run, model: str, nbytes: int, own: str, following: str, port: int) -> Run:
    """`run`, with the sending and receiving. Raises `OSError`."""
    times = []
    for i in range(6):
        start = time.perf_counter()
        run(*batch(model, i))
        times.append(time.perf_counter() - start)
    forward_s = FORWARD * statistics.median(times[3:])  # (the first ones compile)
    with socket.create_server((own, port)) as server:
        server.settimeout(TIMEOUT_S)
        out = _connected(following, port)
        into, _ = server.accept()
    for s in (out, into):
        s.settimeout(TIMEOUT_S)
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    data, place = bytes(PIECE_NBYTES), bytearray(PIECE_NBYTES)

    def send() -> None:
        time.sleep(forward_s)
        for begin in range(0, nbytes, PIECE_NBYTES):
            out.sendall(memoryview(data)[: nbytes - begin])

    def receive() -> None:
        left = nbytes
        while left:
            got = into.recv_into(place, min(left, PIECE_NBYTES))
            if not got:
                raise ConnectionError("the rank before this one has gone")
            left -= got

    def step(x: np.ndarray, y: np.ndarray) -> float:
        threads = [threading.Thread(target=send), threading.Thread(target=receive)]
        for t in threads:
            t.start()
        loss = run(x, y)
        for t in threads:
            t.join()
        return loss

    return step


def _connected(host: str, port: int) -> socket.socket:
    end = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return socket.create_connection((host, port))
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
