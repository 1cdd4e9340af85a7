"""Headers: round trip, and nothing invalid passes."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manygrad.collectives.transport import wire
from manygrad.errors import CollectiveAborted, CollectiveTimeout, PeerLost, PlanMismatch, TransportError, WireError

u64, u32 = st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)


@st.composite
def headers(draw: st.DrawFn) -> wire.Header:
    dtype = draw(st.sampled_from(sorted(wire.DTYPE_NAMES)))
    total = draw(st.integers(0, 1 << 40)) * wire.ITEMSIZES[dtype]
    length = draw(st.integers(0, total))
    offset = draw(st.integers(0, total - length))
    kind, source = draw(st.sampled_from(sorted(wire.KINDS))), draw(st.integers(0, wire.MAX_RANK - 1))
    return wire.Header(
        kind, draw(u64), draw(u32), source, draw(u64), draw(u64), draw(u32), dtype, draw(u64), total, offset, length
    )


@given(headers())
def test_round_trip(h: wire.Header) -> None:
    assert wire.unpack(wire.pack(h)) == h


@given(st.binary(max_size=2 * wire.SIZE))
def test_random_bytes_are_refused_or_in_bounds(data: bytes) -> None:
    with pytest.raises(WireError):
        wire.unpack(data)


@given(headers(), st.integers(0, wire.SIZE - 1), st.integers(1, 255))
def test_a_corrupted_header_is_refused_or_in_bounds(h: wire.Header, at: int, flip: int) -> None:
    data = bytearray(wire.pack(h))
    data[at] ^= flip
    try:
        got = wire.unpack(bytes(data))
    except WireError:
        return
    assert got.offset + got.length <= got.total <= wire.MAX_TOTAL and got.kind in wire.KINDS
    assert got.total % wire.ITEMSIZES[got.dtype] == 0


def test_out_of_range_fields_are_refused() -> None:
    good = wire.Header(wire.DATA, 1, 1, 1, 1, 1, 1, 0, 1, 8, 0, 8)
    for change in ({"plan": 1 << 64}, {"chunk": -1}, {"epoch": 1 << 32}):
        with pytest.raises(WireError, match="out of range"):
            wire.pack(good._replace(**change))
    for change, problem in (
        ({"kind": 9}, "kind"), ({"dtype": 99}, "dtype"), ({"length": 9}, "outside"), ({"offset": 2**64 - 1}, "outside"),
        ({"total": 1 << 60}, "limit"), ({"source": 1 << 30}, "source"),
        ({"dtype": 4, "total": 7, "length": 7}, "whole number"),
    ):  # fmt: skip
        with pytest.raises(WireError, match=problem):
            wire.unpack(wire.pack(good._replace(**change)))
    assert wire.unpack(wire.pack(good._replace(offset=1 << 50)), shared=True).offset == 1 << 50


def test_errors_survive_pickling_and_say_what_to_do() -> None:
    for e in (
        CollectiveTimeout(
            rank=1, peer=2, plan=3, sequence=4, waited_for="8 bytes", timeout_s=60.0, where="train.py:12"
        ),
        CollectiveAborted(rank=1, reason="rank 3 failed"),
        PlanMismatch(rank=1, difference="a and b"),
        PeerLost(rank=1, peer=2, waited_for="8 bytes", evidence="its process ended"),
        TransportError(rank=1, peer=2, problem="p", remedy="r"),
    ):
        back = pickle.loads(pickle.dumps(e))
        assert type(back) is type(e) and str(back) == str(e) and back.rank == 1
    text = str(
        CollectiveTimeout(rank=1, peer=2, plan=3, sequence=4, waited_for="8 bytes", timeout_s=60.0, where="train.py:12")
    )
    assert all(
        part in text for part in ("rank 1", "rank 2", "60 s", "train.py:12", "COLLECTIVE_TIMEOUT_S", "sequence 4")
    )
