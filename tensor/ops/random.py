"""Random numbers by counter: element i of draw k under seed s is a pure function of (s, k, i).

The generator is Philox 2x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) on the global
element index, so the same numbers come out at any sharding and on every device. Each draw takes the next stream number
of its thread.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from manygrad.tensor import environment as env
from manygrad.tensor.dtype import DType, dtypes, to_dtype
from manygrad.tensor.engine import default_device
from manygrad.tensor.lock import locked
from manygrad.tensor.ops.broadcast import everywhere
from manygrad.tensor.ops.creation import _shape
from manygrad.tensor.source import mark
from manygrad.tensor.storage import store
from manygrad.tensor.stored import LOST
from manygrad.tensor.uop import Ops, UOp

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


_DIGITS = {"float16": 11, "bfloat16": 8, "float8_e4m3fn": 4, "float8_e5m2": 3}


class _Generator:
    """The seed, how often it was set, how many threads have drawn numbers since, and how often a counter has come to
    others or all were forgotten: a replay moves those alone that were there when it was captured."""

    seed = int(env.SEED)
    seeded = 0
    places = 0
    threads = itertools.count()


class _Thread(threading.local):
    """The draw counter of a thread: a tensor, so that a replayed JIT step draws fresh numbers; and so is what the seed
    makes of its keys, so that a replay follows `manual_seed`. Each place that draws has a copy, so that none waits for
    another, and every draw moves all of them on: what is drawn does not depend on where, nor twice the same. Each
    thread draws from a sequence of its own; that of the first one (`number` 0) follows from the seed alone."""

    seeded = -1
    salt = 0
    begin = 0  # where a first counter begins

    def __init__(self) -> None:
        self.counters: dict[Any, Tensor] = {}
        self.salts: dict[Any, Tensor] = {}

    def up_to_date(self) -> _Thread:
        if self.seeded != _Generator.seeded:
            self.seeded, self.begin = _Generator.seeded, 0
            number = 0 if threading.current_thread() is threading.main_thread() else next(_Generator.threads) + 1
            low, high = _Generator.seed & 0xFFFFFFFF, _Generator.seed >> 32
            self.salt = (low * 0xC2B2AE35 + high * 0x85EBCA77 + number * 0x9E3779B1 + 0x27D4EB2F) & 0xFFFFFFFF
            self.forget_lost()
            for tensors, value in ((self.counters, 0), (self.salts, self.salt)):
                for place, t in tensors.items():
                    t.assign(_word(value, place))  # (from memory: no seed is compiled)
        return self

    def forget_lost(self) -> None:
        """Forgets states that were made in a trace that failed."""
        for place in [p for p, c in self.counters.items() if c.uop in LOST or self.salts[p].uop in LOST]:
            del self.counters[place], self.salts[place]

    def at(self, device: Any) -> tuple[Tensor, Tensor]:
        """The counter and the salt there."""
        if isinstance(device, str) and device.startswith("DISK"):  # (they would be written into the file)
            raise ValueError(
                f"random numbers cannot be drawn on {device}; draw them on the CPU and copy: .to({device!r})"
            )
        if device not in self.counters:
            _Generator.places += bool(self.counters)
            for tensors, value in ((self.counters, self.begin), (self.salts, self.salt)):
                tensors[device] = _copied(next(iter(tensors.values())), device) if tensors else _word(value, device)
        return self.counters[device], self.salts[device]


def _word(value: int, device: Any) -> Tensor:
    from manygrad.tensor.tensor import Tensor

    t = Tensor([value], dtype=dtypes.uint32, device=device if isinstance(device, str) else None)
    return (t if isinstance(device, str) else t.to(device)).contiguous().realize()


def _copied(first: Tensor, device: Any) -> Tensor:
    t = (first.to(default_device()) if isinstance(first.device, tuple) else first).to(device).contiguous()
    store(t)
    return t


_thread = _Thread()


def thread_of_draws() -> dict[str, Any]:
    """The state of this thread's draws, for `drawing_as`."""
    return vars(_thread)


@contextmanager
def drawing_as(state: dict[str, Any]) -> Iterator[None]:
    """What is drawn inside is drawn as by the thread whose state that is."""
    mine = vars(_thread)
    if mine is state:
        yield
        return
    before = dict(mine)
    mine.clear()
    mine.update(state)
    try:
        yield
    finally:
        state.update(mine)
        mine.clear()
        mine.update(before)


def forget_draws() -> None:
    """As in a process of which no thread has drawn numbers yet."""
    _Generator.seed, _Generator.threads = int(env.SEED), itertools.count()
    _Generator.places += bool(_thread.counters)
    vars(_thread).clear()
    _thread.__init__()


def places_of_draws() -> int:
    """Another number whenever captures would move other counters than there are."""
    return _Generator.places


def has_drawn() -> bool:
    """Whether this thread has drawn numbers."""
    return _thread.seeded != _Thread.seeded


@locked
def _next_key(device: Any) -> Tensor:
    state = _thread.up_to_date()
    if len(state.counters) > 1:
        state.forget_lost()
    counter, salt = state.at(device)
    stream = (counter + 1).contiguous()  # stored: a later draw moves the counter on
    for c in state.counters.values():
        c.assign(stream if c is counter else c + 1)
    return stream * 0x85EBCA6B ^ salt


@locked
def get_rng_state() -> Tensor:
    """The random generator's state, uint8 (16,): the seed, and how many draws this thread has made. It is the same on
    every rank, and does not depend on how many there are."""
    from manygrad.tensor.tensor import Tensor

    state = _thread.up_to_date()
    state.forget_lost()
    count = int(next(iter(state.counters.values())).numpy()[0]) if state.counters else state.begin
    words = np.array([_Generator.seed, count], "<u8")
    return Tensor(words.view(np.uint8))


@locked
def set_rng_state(new_state: Tensor) -> None:
    """Goes on drawing where `get_rng_state` was called, also in the replays of a TinyJit. It sets the seed, as
    `Tensor.manual_seed` does, so that other threads begin anew. ValueError on what is no such state."""
    words = new_state.numpy()
    if words.shape != (16,) or words.dtype != np.uint8 or words.view("<u8")[1] >> 32:
        raise ValueError(
            f"set_rng_state takes what get_rng_state gave, 16 bytes, not {new_state.dtype.name} {new_state.shape}; "
            "states of PyTorch's generator mean nothing here"
        )
    seed, count = (int(w) for w in words.view("<u8"))
    RandomMixin.manual_seed(seed)
    state = _thread.up_to_date()
    state.begin = count
    for place, t in state.counters.items():
        t.assign(_word(count, place))
    if state.counters:
        first, *rest = state.counters.values()
        first.realize(*rest)


def philox(counter: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Two 32-bit words per 64-bit (counter low, counter high = 0) and 32-bit key."""
    counter, key = counter._pair(key, dtype=dtypes.uint32)

    def number(value: int, dtype: DType = dtypes.uint32) -> UOp:
        return everywhere(UOp.const(dtype, value), counter.shape)

    def alu(op: Ops, x: UOp, y: UOp) -> UOp:
        return UOp(op, x.dtype, (x, y))

    def cast(x: UOp, dtype: DType) -> UOp:
        return UOp(Ops.CAST, dtype, (x,))

    lo, hi = counter.uop, number(0)
    for i in range(10):
        product = alu(Ops.MUL, cast(lo, dtypes.uint64), number(0xD256D193, dtypes.uint64))
        top = cast(alu(Ops.SHR, product, number(32, dtypes.uint64)), dtypes.uint32)
        round_key = alu(Ops.ADD, key.uop, number((0x9E3779B9 * i) & 0xFFFFFFFF))
        lo, hi = alu(Ops.XOR, alu(Ops.XOR, top, round_key), hi), cast(product, dtypes.uint32)
    return counter._new(mark(lo)), counter._new(mark(hi))


class RandomMixin:
    @staticmethod
    @locked
    def manual_seed(seed: int = 0) -> None:
        """Start the generator again, with a seed of 64 bits (a negative one counts from 2**64); the same on every rank
        gives the same numbers everywhere. A TinyJit's replays in this thread follow it, too."""
        if not -(1 << 63) <= int(seed) < 1 << 64:
            raise ValueError(f"manual_seed: the seed has 64 bits, from -2**63 to 2**64 - 1, not {seed}")
        _Generator.seed = int(seed) & 0xFFFFFFFFFFFFFFFF
        _Generator.seeded += 1
        _Generator.threads = itertools.count()
        state = _thread.up_to_date()
        written = [*state.counters.values(), *state.salts.values()]
        if written:
            written[0].realize(*written[1:])

    @staticmethod
    def initial_seed() -> int:
        return _Generator.seed

    @staticmethod
    def _random_bits(count: int, device: Any) -> Tensor:
        """uint32 words of shape (count,)."""
        return RandomMixin._random_words(count, device)[0]

    @staticmethod
    def _random_words(count: int, device: Any) -> tuple[Tensor, Tensor]:
        """Twice uint32 words of shape (count,)."""
        from manygrad.tensor.tensor import Tensor, _canonical

        where = _canonical(device) if device is not None else default_device()
        key = _next_key(where)
        index = Tensor.arange(count, device=where if isinstance(where, str) else None).cast(dtypes.uint32)
        return philox(index, key)

    @staticmethod
    def rand(
        *shape: Any, dtype: DType | str | None = None, device: Any = None, requires_grad: bool | None = None
    ) -> Tensor:
        """Uniform on [0, 1)."""
        from manygrad.tensor.tensor import Tensor

        dims, kind = _shape(shape), to_dtype(dtype) if dtype is not None else dtypes.default_float
        if not kind.is_float:
            raise TypeError(f"rand draws floats, not {kind.name}; randint draws integers")
        bits = Tensor._random_bits(prod(dims), device)
        # as many as the type holds: the largest, 1 - 2^-digits, does not round to 1
        digits = _DIGITS.get(kind.name, 24)
        unit = (bits >> (32 - digits)).cast(dtypes.float32) * (1.0 / (1 << digits))
        t = unit.cast(kind).reshape(dims)
        t.requires_grad = requires_grad
        return t

    @staticmethod
    def uniform(
        *shape: Any,
        low: float = 0.0,
        high: float = 1.0,
        dtype: DType | str | None = None,
        device: Any = None,
        requires_grad: bool | None = None,
    ) -> Tensor:
        """Uniform on [low, high); of whole numbers in an integer type."""
        from manygrad.tensor.tensor import Tensor

        kind = to_dtype(dtype) if dtype is not None else dtypes.default_float
        if not low <= high:
            raise ValueError(f"uniform: the range [{low}, {high}) is empty; low must not be above high")
        if kind.is_int:
            if int(low) != low or int(high) != high:
                raise ValueError(f"uniform: {kind.name} has no bounds {low} and {high}; pass whole numbers")
            return Tensor.randint(*shape, low=int(low), high=int(high), dtype=kind, device=device)
        if not kind.is_float:
            raise TypeError(f"uniform draws floats or integers, not {kind.name}; use rand(...) < p")
        t = Tensor.rand(*shape, dtype=dtype, device=device) * (high - low) + low
        t.requires_grad = requires_grad
        return t

    @staticmethod
    def randn(
        *shape: Any, dtype: DType | str | None = None, device: Any = None, requires_grad: bool | None = None
    ) -> Tensor:
        """Standard normal (Box–Muller)."""
        from manygrad.tensor.tensor import Tensor

        if dtype is not None and not to_dtype(dtype).is_float:
            raise TypeError(f"randn draws floats, not {to_dtype(dtype).name}; randint draws integers")
        u, v = Tensor.rand(*shape, device=device), Tensor.rand(*shape, device=device)
        t = ((1 - u).log() * -2).sqrt() * (v * (2 * math.pi)).cos()
        t = t.cast(to_dtype(dtype) if dtype is not None else dtypes.default_float)
        t.requires_grad = requires_grad
        return t

    @staticmethod
    def randint(
        *shape: Any, low: int = 0, high: int = 10, dtype: DType | str | None = None, device: Any = None
    ) -> Tensor:
        """Integers in [low, high), int64 unless told."""
        from manygrad.tensor.tensor import Tensor

        if high <= low:
            raise ValueError(f"randint: the range [{low}, {high}) is empty")
        kind = to_dtype(dtype) if dtype is not None else dtypes.int64
        counted = dtypes.int64 if kind.is_float else kind
        if low < counted.min or high - 1 > counted.max:
            raise ValueError(
                f"randint: {kind.name} holds {counted.min} to {counted.max}, which does not cover [{low}, {high})"
            )
        dims, span = _shape(shape), high - low
        bits, more = (word.cast(dtypes.uint64) for word in Tensor._random_words(prod(dims), device))
        if span <= 1 << 32:
            t = (bits * span) >> 32
        else:  # as PyTorch does: so wide a range is drawn a little unevenly
            t = bits << 32 | more
            t = t % span if span < 1 << 64 else t
        wide = dtypes.uint64 if counted is dtypes.uint64 else dtypes.int64
        return (t.cast(wide) + low).cast(kind).reshape(dims)

    @staticmethod
    def randperm(n: int, device: Any = None) -> Tensor:
        """A random order of 0..n−1: the order that sorts n random words."""
        from manygrad.tensor.tensor import Tensor

        return Tensor._random_bits(n, device).argsort()

    @staticmethod
    def glorot_uniform(*shape: Any, device: Any = None, requires_grad: bool | None = None) -> Tensor:
        from manygrad.tensor.tensor import Tensor

        dims = _shape(shape)
        bound = math.sqrt(6 / (dims[0] + prod(dims[1:])))
        return Tensor.uniform(*dims, low=-bound, high=bound, device=device, requires_grad=requires_grad)

    @staticmethod
    def kaiming_uniform(*shape: Any, a: float = 0.0, device: Any = None, requires_grad: bool | None = None) -> Tensor:
        from manygrad.tensor.tensor import Tensor

        dims = _shape(shape)
        bound = math.sqrt(3.0) * math.sqrt(2.0 / (1 + a * a)) / math.sqrt(prod(dims[1:]))
        return Tensor.uniform(*dims, low=-bound, high=bound, device=device, requires_grad=requires_grad)

    def dropout(self: Tensor, p: float = 0.5) -> Tensor:
        """Zero each element with probability p and scale the rest by 1/(1−p), while `Tensor.training`."""
        from manygrad.tensor.ops.dropout import dropout

        return dropout(self, p, None)
