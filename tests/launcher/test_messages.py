"""Control messages: what is sent is what is parsed, and nothing malformed gets through."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manygrad.errors import LaunchError, ProtocolError
from manygrad.launcher.messages import MAX_TEXT, Exited, Failed, Planned, encode, parse


def test_round_trip() -> None:
    plan = encode("planned", n=3, hash="12", description="all-reduce", collectives=7, outline="")
    assert parse(plan, "worker", 5) == Planned(5, 3, "12", "all-reduce", 7)
    assert parse(encode("exited", code=-9), "agent", 0) == Exited(0, -9)
    text = "x" * (3 * MAX_TEXT)
    failed = parse(
        encode("failed", kind="E", message="m", traceback=text, where="", step=None, code=1, consequence=False),
        "worker",
        1,
    )
    assert isinstance(failed, Failed) and len(failed.traceback) <= MAX_TEXT and "left out" in failed.traceback


@pytest.mark.parametrize(
    "data, role",
    [
        (b"", "worker"),
        (b"[]", "worker"),
        (b"\x80\x04", "worker"),
        (b"{}", "worker"),
        (b"[" * 100000, "worker"),
        (b'{"type": "exited", "code": 0}', "worker"),  # only agents say so
        (b'{"type": "finished", "rank": 3}', "worker"),  # the rank comes from the key
        (b'{"type": "planned", "n": true, "hash": "1", "description": ""}', "worker"),
        (b'{"type": "planned", "n": 1, "hash": 1, "description": ""}', "worker"),
        (json.dumps({"type": "planned", "n": 1 << 70, "hash": "", "description": ""}).encode(), "worker"),
        (json.dumps({"type": "planned", "n": 1, "hash": "", "description": "x" * (MAX_TEXT + 1)}).encode(), "worker"),
    ],
)
def test_malformed(data: bytes, role: str) -> None:
    with pytest.raises(ProtocolError):
        parse(data, role, 0)


@given(st.binary(max_size=200))
def test_noise_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse(data, "worker", 0)


def test_launch_error_survives_pickling() -> None:
    import pickle

    e = pickle.loads(pickle.dumps(LaunchError("text", 137, 2, {"a": 1})))
    assert (str(e), e.report, e.exit_code, e.rank, e.details) == ("text", "text", 137, 2, {"a": 1})
