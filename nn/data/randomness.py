"""Random numbers in datasets: how a run draws the same ones again however many threads load.

A generator that several threads share gives its numbers to whoever comes first. So a sample has one of its own
(`rng`), which follows from the loader's seed, the epoch and the sample's row: the same on any number of threads and
workers. A dataset that draws from another one is loaded by one thread, batch after batch (`draws`).
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from manygrad.tensor.ops.random import has_drawn
from manygrad.tensor.tensor import Tensor

CALLED = ("__getitem__", "__getitems__", "__call__", "forward")  # of datasets and transforms
DEPTH, SHORT = 8, 100  # how far generators are looked for
_EMPTY = CellType()
GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)
_sample: ContextVar[tuple[int, ...] | None] = ContextVar("sample that is being loaded", default=None)


def rng() -> np.random.Generator:
    """In `__getitem__` and what it calls (transforms): a new generator for this sample in this epoch.

    `__getitems__` and collate_fn have that of their batch's first sample.
    """
    key = _sample.get()
    if key is None:
        raise RuntimeError(
            "nn.data.rng() is for a dataset's __getitem__ while a DataLoader reads it; make a generator of your own "
            "(np.random.default_rng(seed)) elsewhere"
        )
    return np.random.Generator(np.random.PCG64(key))


@contextmanager
def sample(seed: int, epoch: int, row: int) -> Iterator[None]:
    token = _sample.set((seed, epoch, row))
    try:
        yield
    finally:
        _sample.reset(token)


def draws(load: Callable[[], Any], *where: Any) -> tuple[Any, bool]:
    """(what `load` gives, whether it draws from a generator that threads share): that of `random` or of `np.random`, of
    this thread for `Tensor.rand`, or one that the objects `where` refer to."""
    found = [np.random.mtrand._rand, random._inst, *_generators(where, set(), 0)]
    before = [_state(g) for g in found]
    out = load()
    return out, has_drawn() or before != [_state(g) for g in found]


def _state(g: Any) -> bytes:
    if isinstance(g, random.Random):
        return pickle.dumps(g.getstate())
    return pickle.dumps(g.get_state(legacy=False) if isinstance(g, np.random.RandomState) else g.bit_generator.state)


def _generators(x: Any, seen: set[int], depth: int) -> Iterator[Any]:
    """Generators that `x` refers to: in attributes, short lists and dicts, and in what its functions refer to."""
    if isinstance(x, GENERATORS):
        yield x
    if id(x) in seen or depth > DEPTH or isinstance(x, (type, ModuleType, np.ndarray, Tensor, str, bytes, *GENERATORS)):
        return
    seen.add(id(x))
    below: list[Any] = []
    if isinstance(x, FunctionType):
        below = [c.cell_contents for c in x.__closure__ or () if c != _EMPTY]
        below += [x.__globals__[name] for name in x.__code__.co_names if name in x.__globals__]
        below += [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
    elif isinstance(x, MethodType):
        below = [x.__func__, x.__self__]
    elif isinstance(x, (list, tuple, dict)):
        below = list(x.values() if isinstance(x, dict) else x) if len(x) <= SHORT else []
    elif hasattr(x, "__dict__"):
        below = [*vars(x).values(), *(f for name in CALLED if (f := getattr(type(x), name, None)))]
    for y in below:
        yield from _generators(y, seen, depth + 1)
