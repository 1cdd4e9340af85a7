"""Beside a step that tells nobody anything, a ring of plain TCP sockets: each rank sends bytes to the next one and
receives as many, from when the first gradient may be there on. Of steps with one update, about the least that there
can be on this link and these processors."""

from __future__ import annotations

import socket
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from sides.data import batch
from sides.network import connected
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
        out = connected(following, port)
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

    pool = ThreadPoolExecutor(2)

    def step(x: np.ndarray, y: np.ndarray) -> float:
        moving = [pool.submit(send), pool.submit(receive)]
        loss = run(x, y)
        for m in moving:
            m.result()
        return loss

    return step
