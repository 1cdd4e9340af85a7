"""Every worker hears the largest of what all say, however many they are."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from manygrad.collectives.transport.largest import largest
from manygrad.collectives.transport.wire import MessageKey
from tests.multi.cluster import Mail


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 13])
def test_all_hear_the_largest(size: int) -> None:
    said = np.random.default_rng(size).integers(-(1 << 62), 1 << 62, (4, size, 3))
    boxes: Any = defaultdict(SimpleQueue)
    sent: Any = defaultdict(int)

    class Spoken(Mail):
        def send(self, peer: int, key: MessageKey, addr: int, nbytes: int) -> Any:  # type: ignore[override]
            sent[self.rank] += 1
            return super().send(peer, key, addr, nbytes, "raw", None, False)

        def receive(self, peer: int, key: MessageKey, nbytes: int) -> Any:  # type: ignore[override]
            return super().receive(peer, key, nbytes, "raw")

    def speak(rank: int) -> list[tuple[int, ...]]:
        endpoint: Any = Spoken(rank, boxes)
        endpoint.size = size
        return [largest(endpoint, MessageKey(7, n, 0), [int(x) for x in said[n, rank]]) for n in range(len(said))]

    with ThreadPoolExecutor(size) as pool:
        heard = list(pool.map(speak, range(size)))
    want = [tuple(int(x) for x in row) for row in said.max(1)]
    assert heard == [want] * size
    assert set(sent.values()) <= {len(said) * (size - 1).bit_length()}
