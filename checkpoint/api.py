"""`save` and `load`."""

from __future__ import annotations

import operator
import os
from dataclasses import replace
from typing import Any

from manygrad.checkpoint.index import NAME
from manygrad.checkpoint.memory import Loaded, SnapshotMemory, is_shared, snapshot
from manygrad.checkpoint.reader import CheckpointReader, is_checkpoint, newest_first
from manygrad.checkpoint.remote_writer import RemoteAttempt
from manygrad.checkpoint.store import is_remote, location
from manygrad.checkpoint.tree import MISSING, check_keys, flatten, put, unflatten
from manygrad.checkpoint.writer import Attempt, Snapshot
from manygrad.errors import CheckpointError
from manygrad.nn.state.safetensors import BY_NP, NAMES
from manygrad.runtime.current import current
from manygrad.tensor.environment import COLLECTIVE_TIMEOUT_S
from manygrad.tensor.tensor import Tensor

Folder = str | os.PathLike[str]


def save(folder: Folder, state: Any, step: int, *, keep: int | None = None, timeout_s: float | None = None) -> str:
    """Writes the checkpoint `folder/step-<step>`, and returns its path; every rank must call it.

    `state`: nested dicts, lists and tuples of tensors, arrays, numbers, text and None, and of objects with
    `state_dict()` (modules, optimisers, schedules, loaders). Each rank writes what it holds, of copies a share; each
    element is written once. It is a checkpoint once all of it is on disk, and not before. `keep`: then only so many of
    the newest ones stay. CheckpointError: it was not saved; also where other ranks have written nothing for `timeout_s`
    (COLLECTIVE_TIMEOUT_S). What another thread changes meanwhile may be saved as it was before or after. Cost: what
    this rank writes goes to the file system from where it lies, chunk by chunk.
    """
    return attempt(folder, keep, timeout_s).write(taken(state, step))


def attempt(folder: Folder, keep: int | None, timeout_s: float | None) -> Attempt:
    """The next save of this process."""
    if keep is not None and keep < 1:
        raise ValueError(f"keep says how many checkpoints stay, at least 1, not {keep}")
    world = current().world
    limit_s = float(COLLECTIVE_TIMEOUT_S.value) if timeout_s is None else timeout_s
    job = f"{world.job}-{world.epoch}" + (f"-{os.getpid()}" if world.size == 1 else "")
    communication = current().communication
    communication.saves += 1
    where = location(folder)
    kind = RemoteAttempt if is_remote(where) else Attempt
    attempt = kind(where, world.rank, world.size, job, communication.saves, keep, limit_s)
    return attempt if (hooks := communication.hooks) is None else replace(attempt, has_failed=hooks.has_failed)


def whole_step(step: Any) -> int:
    """The step as a number of Python's (NumPy's are whole numbers, too)."""
    if isinstance(step, bool) or not hasattr(step, "__index__") or operator.index(step) < 0:
        raise ValueError(f"the step of a checkpoint is a whole number from 0 on, not {step!r}")
    return operator.index(step)


def taken(state: Any, step: int, memory: SnapshotMemory | None = None) -> Snapshot:
    """The state in host memory, of what this rank is to write; a copy in `memory`, if the state may change."""
    step = whole_step(step)
    tree, tensors, copies, differs = flatten(state)
    differs = differs and current().world.size > 1
    own = {name for name, t in tensors.items() if differs and not is_shared(t)}
    codes = {}
    for name, t in tensors.items():
        code = NAMES.get(t.dtype) if isinstance(t, Tensor) else BY_NP.get(t.dtype)
        if code is None:
            kind = t.dtype.name if isinstance(t, Tensor) else t.dtype
            raise TypeError(f"save: {name} is {kind}, which checkpoints do not have; cast it first")
        codes[name] = code
    parts = snapshot(tensors, copies, own, memory)
    saved = {n: (codes[n], tuple(t.shape), *parts[n]) for n, t in tensors.items()}
    size = current().world.size
    saved |= {n: (codes[n], (size, *tensors[n].shape), *parts[n]) for n in own}
    return Snapshot(current().world.rank, step, tree, saved, frozenset(own), differs, is_copy=memory is not None)


def load(folder: Folder, state: Any) -> Any:
    """Loads into `state`, which is a part of what was saved: into its tensors and objects in place, other values are
    replaced in its dicts and lists. Returns it.

    `folder` is a checkpoint, or the folder of several, then the newest is taken. The number of workers and devices, and
    how tensors are cut, may be others than when it was saved; each worker reads what it will hold. KeyError and
    ValueError: it is the state of something else; CheckpointError: there is none, or it is damaged.
    """
    folder = location(folder)
    if not is_checkpoint(folder):
        if not (found := newest_first(folder)):
            raise CheckpointError(
                f"{folder} has no {NAME}, so it is no checkpoint, nor are there any in it; look for its path"
            )
        folder = found[0].path
    return put(state, placed(read(CheckpointReader(folder), state)))


def read(reader: CheckpointReader, state: Any) -> Any:
    """What is to be loaded into `state`, in host memory, with a `Loaded` for each tensor."""
    check_keys(reader.state, state)

    def tensor(name: str, here: Any, array: bool) -> Any:
        shape, dtype = reader.about(name)
        if array:
            return reader.read(name, tuple((0, d) for d in shape))
        return Loaded(here, shape, dtype, lambda box: reader.read(name, box))

    return unflatten(reader.state, state if state is not None else MISSING, tensor)


def placed(x: Any) -> Any:
    """With tensors on their devices."""
    if isinstance(x, dict):
        return {k: placed(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)([placed(v) for v in x])
    return x.place() if isinstance(x, Loaded) else x
