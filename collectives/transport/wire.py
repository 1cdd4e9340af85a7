"""The fixed header of every message, over shared memory and over sockets alike.

| field | bytes | meaning |
|---|---|---|
| magic, version | 4 + 2 | `MGRD`, 1 |
| kind | 2 | DATA, HELLO, ACK, GRANT, AGAIN |
| job, epoch | 8 + 4 | which run, which generation of its world; others are dropped |
| source | 4 | sending rank |
| plan, sequence, chunk | 8 + 8 + 4 | what the receiver must be waiting for: `MessageKey` |
| dtype | 1 (+3) | index into `dtypes.all`, or 255 for raw bytes |
| number | 8 | counts the messages of this directed pair |
| total | 8 | bytes of the whole message |
| offset, length | 8 + 8 | this frame's part of it (over shared memory: `offset` is the arena's) |

`unpack` checks every field that can be checked without context before anything else is done with the bytes.
Little-endian. Cost: about 1 µs.
"""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

from manygrad.errors import WireError
from manygrad.tensor.dtype import dtypes

MAGIC, VERSION = b"MGRD", 1
DATA, HELLO, ACK, GRANT, AGAIN = 1, 2, 3, 4, 5
KINDS = {DATA: "data", HELLO: "hello", ACK: "ack", GRANT: "grant", AGAIN: "again"}
MAX_TOTAL = 1 << 46  # bytes of one message; anything larger is a corrupted header
MAX_RANK = 1 << 20
LAYOUT = struct.Struct("<4sHHQIIQQIB3xQQQQ")
SIZE = LAYOUT.size
RAW = 255
DTYPE_CODES = {d.name: i for i, d in enumerate(dtypes.all)} | {"raw": RAW}
DTYPE_NAMES = {code: name for name, code in DTYPE_CODES.items()}
ITEMSIZES = {code: dtypes.all[code].itemsize if code != RAW else 1 for code in DTYPE_NAMES}


class MessageKey(NamedTuple):
    """Identity of a message: the 64-bit hash of its plan, the plan's running number, the message's number within it."""

    plan: int
    sequence: int
    chunk: int


class Header(NamedTuple):
    """See the table above."""

    kind: int
    job: int
    epoch: int
    source: int
    plan: int
    sequence: int
    chunk: int
    dtype: int
    number: int
    total: int
    offset: int
    length: int

    @property
    def key(self) -> MessageKey:
        return MessageKey(self.plan, self.sequence, self.chunk)


def job_hash(job: str) -> int:
    """The 64-bit number of a job's name."""
    return int.from_bytes(hashlib.blake2b(job.encode(), digest_size=8).digest(), "little")


def pack(h: Header) -> bytes:
    """The bytes of `h`. Raises `WireError` where a field does not fit."""
    try:
        return LAYOUT.pack(MAGIC, VERSION, *h)
    except struct.error as e:
        raise WireError(f"header field out of range ({e}): {h}") from None


def pack_frame(h: Header, offset: int, length: int) -> bytes:
    """The bytes of the header of a part of the message `h`."""
    return LAYOUT.pack(MAGIC, VERSION, *h[:-2], offset, length)


def unpack(data: bytes | memoryview, shared: bool = False) -> Header:
    """The header in the first `SIZE` bytes of `data`, checked; raises `WireError`.

    `shared`: `offset` is a place in an arena, so it is not related to `total` (the caller checks it against the arena).
    """
    if len(data) < SIZE:
        raise WireError(f"a header has {SIZE} bytes, got {len(data)}")
    magic, version, *rest = LAYOUT.unpack_from(data)
    if magic != MAGIC:
        raise WireError(f"not a manygrad message: magic {magic!r}, expected {MAGIC!r}")
    if version != VERSION:
        raise WireError(
            f"protocol version {version}, this worker speaks {VERSION}: all workers must run the same manygrad"
        )
    h = Header(*rest)
    if h.kind not in KINDS:
        raise WireError(f"unknown message kind {h.kind}; known: {KINDS}")
    if h.source >= MAX_RANK:
        raise WireError(f"source rank {h.source} is not below {MAX_RANK}")
    if h.dtype not in DTYPE_NAMES:
        raise WireError(f"unknown dtype code {h.dtype}; known: {DTYPE_NAMES}")
    if h.total > MAX_TOTAL:
        raise WireError(f"a message of {h.total} bytes is above the limit of {MAX_TOTAL}")
    if h.total % ITEMSIZES[h.dtype]:
        raise WireError(f"{h.total} bytes are no whole number of {DTYPE_NAMES[h.dtype]} elements")
    if h.length > h.total or (not shared and h.offset > h.total - h.length):
        raise WireError(f"bytes {h.offset}..{h.offset + h.length} are outside the message's {h.total}")
    return h
