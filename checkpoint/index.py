"""`index.json`: which tensors a checkpoint has, and where each part of them lies.

    {"checksum": "<blake2b of what follows>", "index": {"format": "manygrad checkpoint 1", "step": 10, "state": {...},
     "files": {"part-00000.safetensors": {"nbytes": 1234, "header": 104, "crc32": 1}},
     "tensors": {"w": {"dtype": "F32", "shape": [4, 2], "parts": [
         {"start": [0, 0], "shape": [2, 2], "file": "part-00000.safetensors", "offset": 104, "crc32": [2]}]}}}}

Where each worker has a state of its own (DiLoCo), "states" has that of each rank beside "state", and a tensor that is
{..., "by_rank": true} has a row for each. Rank r of a run on another number of workers takes those of rank r modulo it.

Each part has a CRC-32 for every CHUNK bytes, so that who needs some rows reads and checks these chunks alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from math import prod
from typing import Any
from zlib import crc32

from manygrad.checkpoint.disk_errors import errors_of
from manygrad.checkpoint.layout import Bounds
from manygrad.checkpoint.store import store_of
from manygrad.errors import CheckpointError
from manygrad.nn.state.safetensors import CODES

NAME, FORMAT = "index.json", "manygrad checkpoint 1"
CHUNK = 1 << 20
_BESIDE = re.compile(r"\.\./parts-[^/]+/part-\d+\.safetensors")  # in remote storage (`remote_writer.py`)
_HEAD, _MIDDLE, _TAIL = b'{"checksum": "', b'", "index": ', b"}\n"


def checksums(data: memoryview) -> list[int]:
    return [crc32(data[at : at + CHUNK]) for at in range(0, len(data), CHUNK)]


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).hexdigest().encode()


def encode(index: dict[str, Any]) -> bytes:
    body = json.dumps(index).encode()
    return _HEAD + _digest(body) + _MIDDLE + body + _TAIL


def read_index(folder: str) -> dict[str, Any]:
    """The index of a checkpoint, of which all files have their sizes. CheckpointError if it is damaged."""
    path, store = os.path.join(folder, NAME), store_of(folder)
    with errors_of("reading", path):
        raw = bytes(store.read(path))
    at = len(_HEAD) + 32
    body = raw[at + len(_MIDDLE) : len(raw) - len(_TAIL)]
    if raw != _HEAD + _digest(body) + _MIDDLE + body + _TAIL:
        raise CheckpointError(f"{path} is damaged: its checksum is not that of its {len(raw)} bytes; use another one")
    index: dict[str, Any] = json.loads(body)
    if index.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has the format {index.get('format')!r}, not {FORMAT!r}; load it where it was made"
        )
    for name, about in index["files"].items():
        if os.path.basename(name) != name and not _BESIDE.fullmatch(name):
            raise CheckpointError(f"{path} names the file {name!r}, which is not in its folder; use another one")
        file = path_of(folder, name)
        with errors_of("reading", file):
            size, header = store.size(file), store.read(file, 0, about["header"])
        if size != about["nbytes"]:
            raise CheckpointError(f"{file} has {size} bytes, {about['nbytes']} were written; use another checkpoint")
        if crc32(header) != about["crc32"]:
            raise CheckpointError(f"{file} is damaged: the checksum of its header is wrong; use another checkpoint")
    return index


def path_of(folder: str, file: str) -> str:
    """Where a file of the checkpoint in `folder` lies; its name may begin with `../parts-`."""
    if file.startswith("../"):
        return os.path.join(os.path.dirname(folder), file.removeprefix("../"))
    return os.path.join(folder, file)


def box_of(part: dict[str, Any]) -> Bounds:
    return tuple((a, a + n) for a, n in zip(part["start"], part["shape"]))


def nbytes_of(part: dict[str, Any], code: str) -> int:
    return prod(part["shape"]) * CODES[code].itemsize


def merged(pieces: list[dict[str, Any]], step: int, state: Any) -> dict[str, Any]:
    """The index of what all ranks have written. CheckpointError where parts of a tensor lack, or ranks differ."""
    files: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    states = [piece["state_of_rank"] for piece in pieces if "state_of_rank" in piece]
    for piece in pieces:
        files |= piece["files"]
        for name, t in piece["tensors"].items():
            mine = tensors.setdefault(name, {**t, "parts": []})
            if (mine["dtype"], mine["shape"]) != (t["dtype"], t["shape"]):
                raise CheckpointError(
                    f"tensor {name!r} is {mine['dtype']} {mine['shape']} on one rank and {t['dtype']} {t['shape']} on "
                    "another; every rank must save the same state"
                )
            boxes = [box_of(p) for p in mine["parts"]]
            mine["parts"] += [p for p in t["parts"] if box_of(p) not in boxes]
    for name, t in tensors.items():
        if sum(prod(p["shape"]) for p in t["parts"]) != prod(t["shape"]):
            raise CheckpointError(
                f"the ranks have not written each element of tensor {name!r} of shape {t['shape']} once, but "
                f"{[p['shape'] for p in t['parts']]}; every rank must save the same state"
            )
    index = {"format": FORMAT, "step": step, "state": state, "files": files, "tensors": tensors}
    return index | ({"states": states} if states else {})
