"""The sides of the all-reduce between hosts: network namespaces of this machine, one a worker, on one switch.

ours    `allreduce.py` under the launcher (`tests/launcher/on_hosts.py`), encrypted and with plain links
gloo    torch's, over TCP between the same namespaces
raw     what TCP itself needs for the same bytes: every process sends 2/p of the array to each peer and receives as
        much of it, both at once, on two connections a pair, into its place; nothing is summed
zmq     what ZeroMQ needs for the same bytes: as many pairs of its sockets, messages of 1 MiB, which stay where ZeroMQ
        has put them; ours, whose carrier it is, also brings them to their place and sums them
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BENCHMARK = os.path.join(ROOT, "benchmarks", "allreduce.py")
PORT = 29600  # every namespace has its own ports
CONNECTIONS = 2  # a pair of processes
BYTES_AT_ONCE = 1 << 20
LIMIT_S = 900


def connected(address: str, port: int) -> socket.socket:
    """To whoever listens there soon. Raises `OSError`."""
    end = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection((address, port))
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


class Raw:
    """`CONNECTIONS` connections to every peer, and what one all-reduce moves over them."""

    def __init__(self, rank: int, addresses: list[str]):
        self.size = len(addresses)
        found: dict[bytes, socket.socket] = {}  # by who has made it, and which of a pair it is
        with socket.create_server((addresses[rank], PORT + rank), backlog=64) as listener:
            listener.settimeout(LIMIT_S)
            for peer in range(rank):
                for c in range(CONNECTIONS):
                    s = found[bytes([peer, c])] = connected(addresses[peer], PORT + peer)
                    s.sendall(bytes([rank, c]))
            for _ in range((self.size - 1 - rank) * CONNECTIONS):  # (they come in any order)
                s = listener.accept()[0]
                s.settimeout(LIMIT_S)
                found[s.recv(2, socket.MSG_WAITALL)] = s
        self.sockets = [found[which] for which in sorted(found)]
        for s in self.sockets:
            s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def barrier(self) -> None:
        self.largest(0)

    def largest(self, value: int) -> int:
        """The largest of every process's values, told on the first connection of each pair."""
        values = [value]
        for s in self.sockets:
            s.settimeout(LIMIT_S)
        for s in self.sockets[::CONNECTIONS]:
            s.sendall(value.to_bytes(8, "little"))
        for s in self.sockets[::CONNECTIONS]:
            values.append(int.from_bytes(s.recv(8, socket.MSG_WAITALL), "little"))
        return max(values)

    def move(self, out: memoryview, into: memoryview) -> None:
        """Sends each peer its share of `out`, and receives as much from it into `into`."""
        share = max(1, 2 * len(out) // self.size // CONNECTIONS)
        poll = select.poll()
        by_fd = {s.fileno(): s for s in self.sockets}
        left_out, left_in = (dict.fromkeys(by_fd, share) for _ in range(2))
        start = {fd: i * share % max(1, len(out) - share + 1) for i, fd in enumerate(by_fd)}
        for fd, s in by_fd.items():
            s.setblocking(False)
            poll.register(fd, select.POLLIN | select.POLLOUT)
        while left_out or left_in:
            if not (ready := poll.poll(LIMIT_S * 1000)):
                raise TimeoutError(f"nothing has come for {LIMIT_S} s")
            for fd, event in ready:
                if event & select.POLLIN and fd in left_in:
                    at = start[fd] + share - left_in[fd]
                    left_in[fd] -= by_fd[fd].recv_into(into[at : at + min(left_in[fd], BYTES_AT_ONCE)])
                    if not left_in[fd]:
                        del left_in[fd]
                if event & select.POLLOUT and fd in left_out:
                    at = start[fd] + share - left_out[fd]
                    left_out[fd] -= by_fd[fd].send(out[at : at + min(left_out[fd], BYTES_AT_ONCE)])
                    if not left_out[fd]:
                        del left_out[fd]
                wanted = (select.POLLIN if fd in left_in else 0) | (select.POLLOUT if fd in left_out else 0)
                if wanted:
                    poll.modify(fd, wanted)
                else:
                    poll.unregister(fd)


class Zmq:
    """The same over pairs of ZeroMQ's sockets."""

    def __init__(self, rank: int, addresses: list[str]):
        import zmq

        self.size, self.context = len(addresses), zmq.Context()
        self.sockets: list[zmq.Socket[bytes]] = []
        for peer in range(self.size):
            for c in range(CONNECTIONS) if peer != rank else ():
                s = self.context.socket(zmq.PAIR)
                port = PORT + 100 + max(peer, rank) * CONNECTIONS + c
                if peer < rank:
                    s.connect(f"tcp://{addresses[peer]}:{port}")
                else:
                    s.bind(f"tcp://{addresses[rank]}:{port}")
                self.sockets.append(s)
        self.poller = zmq.Poller()
        for s in self.sockets:
            s.rcvtimeo = LIMIT_S * 1000
            self.poller.register(s, zmq.POLLIN)

    def barrier(self) -> None:
        self.largest(0)

    def largest(self, value: int) -> int:
        for s in self.sockets[::CONNECTIONS]:
            s.send(value.to_bytes(8, "little"))
        return max(value, *(int.from_bytes(s.recv(), "little") for s in self.sockets[::CONNECTIONS]))

    def move(self, out: memoryview, into: memoryview) -> None:
        share = max(1, 2 * len(out) // self.size // CONNECTIONS)
        for i, s in enumerate(self.sockets):
            start = i * share % max(1, len(out) - share + 1)
            for at in range(0, share, BYTES_AT_ONCE):
                s.send(out[start + at : start + min(at + BYTES_AT_ONCE, share)], copy=False)
        left = dict.fromkeys(self.sockets, share)
        while left:
            if not (ready := self.poller.poll(LIMIT_S * 1000)):
                raise TimeoutError(f"nothing has come for {LIMIT_S} s")
            for s, _ in ready:
                if s in left:  # (what comes after belongs to the barrier)
                    left[s] -= len(s.recv(copy=False).buffer)
                    if not left[s]:
                        del left[s]


def moved(
    kind: type[Raw] | type[Zmq],
    sizes: list[int],
    most: int,
    rank: int,
    addresses: list[str],
    timed: Callable[..., Any],
    repeats_for: Callable[..., Any],
) -> list[list[float]]:
    """Per size, the times of this rank."""
    links, out = kind(rank, addresses), []
    for nbytes in sizes:
        source, place = memoryview(bytearray(nbytes)), memoryview(bytearray(nbytes))
        first = timed(lambda: links.move(source, place), links.barrier, 3)  # noqa: B023
        repeats = repeats_for(links.largest(int(max(first) * 1e9)) * 1e-9, most)
        out.append(timed(lambda: links.move(source, place), links.barrier, repeats))  # noqa: B023
    return out


def run_in(prefixes: list[list[str]], side: str, what: list[Any]) -> list[Any]:
    """`allreduce.py --side SIDE` on every host; what each prints."""
    base = [sys.executable, BENCHMARK, "--side", side, json.dumps(what)]
    processes = [
        subprocess.Popen([*p, *base, str(r)], stdout=subprocess.PIPE, text=True) for r, p in enumerate(prefixes)
    ]
    try:
        return [json.loads(p.communicate(timeout=LIMIT_S)[0]) for p in processes]
    finally:
        for p in processes:
            p.kill()


def run_ours(names: list[str], addresses: list[str], sizes: list[int], most: int, options: list[str]) -> list[Any]:
    """The results of every rank, started by the launcher on the first host."""
    hosts = ";".join(f"{a},{n}" for a, n in zip([addresses[0], *addresses], [names[0], *names]))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-P", os.path.join(ROOT, "tests", "launcher", "on_hosts.py"), hosts, "--"]
        command += [BENCHMARK, "--nodes", str(len(names)), "--run-dir", os.path.join(folder, "run"), *options, "--"]
        command += ["--side", "ours", json.dumps([sizes, most, folder]), "0"]
        done = subprocess.run(
            ["ip", "netns", "exec", names[0], *command],
            env={**os.environ, "TRANSPORT": "zmq"},  # (the hosts share this machine's memory)
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        if done.returncode:
            raise SystemExit(f"the launcher ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return [json.load(open(os.path.join(folder, f"{r}.json"))) for r in range(len(names))]
