"""Random kernels, at sizes around vectors, tiles and blocks, compute what NumPy computes, to the bit.

A program is a chain of movements, masks, windows, products, reductions and casts of whole numbers so small that every
sum of them is exact in any order. Each kernel of it is run by the code generator for several processors, under the Opts
chosen for it and under random ones, cut over threads anywhere, on memory that is poisoned around every buffer, and
with every index checked; it has to leave what the interpreter `PYTHON` leaves, and the results have to be NumPy's.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import strategies as st

from manygrad import Context, Tensor
from manygrad.nn import functional as F
from manygrad.runtime.codegen.analysis.describe import signature
from manygrad.runtime.codegen.opts import Opts, neighbours
from manygrad.runtime.codegen.pipeline import beyond, prepare
from manygrad.runtime.codegen.target import Dot, Machine
from manygrad.runtime.devices import Device, get_device
from manygrad.runtime.devices.compile.chain import Chained
from manygrad.runtime.devices.compile.compiled import Compiled
from manygrad.runtime.devices.cpu.backend import COMPILED
from manygrad.runtime.devices.cpu.kernel import CPUKernel
from manygrad.runtime.devices.cuda.driver import gpu_of
from manygrad.runtime.devices.host import Memory
from manygrad.runtime.devices.opencl.driver import driver
from manygrad.runtime.devices.target import AVX2_DOTS, host_target
from manygrad.runtime.executors.items import KernelItem
from manygrad.tensor.dtype import DType
from manygrad.tensor.uop import Ops, UOp
from tests.cuda.install import REAL
from tests.opencl import MISSING

EXAMPLES = 25
SIZES = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 40, 47, 48, 49, 51, 63, 64, 65, 97, 127, 128, 130)
AMOUNTS = (0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64)
MOST = 6000  # elements of a value
TYPES = ("float32", "float32", "float32", "float64", "bfloat16", "float16", "int32", "int64", "int8", "uint8", "bool")
EXACT = {"float64": 1 << 40, "float32": 1 << 24, "float16": 1 << 11, "bfloat16": 1 << 8}  # whole numbers up to which
OFTEN = ("pad", "total") * 4  # steps whose chains have the most masks that hold in a part of a loop only
POISON = 0xFF  # NaN in every type of floats, -1 or the greatest number in the others
ZONE_BYTES = 1 << 12  # of poison on both sides of a buffer
OPENCL_EVERY = 6  # kernels, one runs on OPENCL, too, where there is a driver (which compiles for long)
CUDA_EVERY = 4  # kernels, one runs on the emulated GPU, too
Program = dict[str, Any]
COUNTS: Counter[str] = Counter()  # what has been run, which the runner prints


@st.composite
def programs(draw: st.DrawFn) -> Program:
    number = st.integers(0, 999)
    steps = st.tuples(st.sampled_from([*sorted(STEPS), *OFTEN]), number, number, number)
    return {
        "shape": tuple(draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3))),
        "type": draw(st.sampled_from(TYPES)),
        "steps": draw(st.lists(steps, min_size=1, max_size=6)),
        "results": draw(st.integers(1, 2)),
        "seed": draw(st.integers(0, 10_000)),
    }


# *** values: a tensor beside the whole numbers that it holds ***


class Value:
    """`array` holds as int64 what `tensor` holds."""

    def __init__(self, tensor: Tensor, array: np.ndarray) -> None:
        self.tensor, d = tensor, tensor.dtype
        self.array = np.asarray(array).astype(np.int64)
        if d.is_int or d.is_bool:  # (they wrap)
            self.array = self.array.astype(bool if d.is_bool else d.np).astype(np.int64)
        assert tuple(tensor.shape) == self.array.shape, f"{tensor.shape} in place of {self.array.shape}"

    @property
    def dtype(self) -> DType:
        return self.tensor.dtype

    @property
    def largest(self) -> int:
        return int(np.abs(self.array).max()) if self.array.size else 0

    def up_to(self, limit: int) -> Value:
        """With what is further from 0 than `limit` brought there."""
        limit = max(1, limit)
        if self.dtype.is_bool or self.largest <= limit:
            return self
        least = 0 if self.dtype.is_unsigned else -limit
        return Value(self.tensor.clip(least, limit), self.array.clip(least, limit))

    def exact(self, terms: int, factor: int = 1) -> Value:
        """So small that the sum of so many times `factor` of it is exact in its type, or in float32 where not even ones
        are."""
        if not self.dtype.is_float:
            return self
        terms *= max(1, factor)
        wide = self if EXACT[self.dtype.name] >= terms else Value(self.tensor.float(), self.array)
        return wide.up_to(EXACT[wide.dtype.name] // terms)


def numbers(rng: np.random.Generator, dtype: str, *shape: int) -> Value:
    low, high = (0, 2) if dtype in ("uint8", "bool") else (-3, 4)
    array = rng.integers(low, high, shape)
    return Value(Tensor(array.astype(np.float32)).cast(dtype).realize(), array)


class Numbers:
    """The choices of one step."""

    def __init__(self, rng: np.random.Generator, *drawn: int) -> None:
        self.rng, self.drawn = rng, list(drawn)

    def of(self, choices: Sequence[Any]) -> Any:
        return choices[self.below(len(choices))]

    def below(self, n: int) -> int:
        x = self.drawn.pop(0)
        self.drawn.append(x // max(1, n) + 7 * x)
        return x % n


Step = Callable[[Value, Numbers], Value | None]
STEPS: dict[str, Step] = {}


def step(f: Step) -> Step:
    """One kind of step: None where the value cannot take it."""
    STEPS[f.__name__] = f
    return f


def axis_of(v: Value, n: Numbers) -> int:
    return n.below(v.array.ndim)


@step
def permute(v: Value, n: Numbers) -> Value:
    order = list(range(v.array.ndim))
    random.Random(n.below(1000)).shuffle(order)
    return Value(v.tensor.permute(*order), v.array.transpose(order))


@step
def pad(v: Value, n: Numbers) -> Value:
    before, after, k = n.of(AMOUNTS), n.of(AMOUNTS), 1 + n.below(v.array.ndim)
    number = n.of((0, 0, 1))
    widths = [(0, 0)] * (v.array.ndim - k) + [(after, before)] * (k - 1) + [(before, after)]
    torch_order = [x for pair in reversed(widths) for x in pair]
    return Value(F.pad(v.tensor, torch_order, value=number), np.pad(v.array, widths, constant_values=number))


@step
def part(v: Value, n: Numbers) -> Value | None:
    axis = axis_of(v, n)
    size = v.array.shape[axis]
    begin, end = sorted((n.below(size + 1), n.below(size + 1)))
    if begin == end:
        return None
    at = (*[slice(None)] * axis, slice(begin, end, n.of((1, 1, 2, 3))))
    return Value(v.tensor[at], v.array[at])


@step
def flip(v: Value, n: Numbers) -> Value:
    axis = axis_of(v, n)
    return Value(v.tensor.flip(axis), np.flip(v.array, axis))


@step
def expand(v: Value, n: Numbers) -> Value:
    axis, size = n.below(v.array.ndim + 1), n.of(SIZES[:12])
    array = np.expand_dims(v.array, axis)
    shape = (*array.shape[:axis], size, *array.shape[axis + 1 :])
    return Value(v.tensor.unsqueeze(axis).expand(*shape), np.broadcast_to(array, shape))


@step
def merge(v: Value, n: Numbers) -> Value | None:
    if v.array.ndim < 2:
        return None
    i, s = n.below(v.array.ndim - 1), v.array.shape
    shape = (*s[:i], s[i] * s[i + 1], *s[i + 2 :])
    return Value(v.tensor.reshape(shape), v.array.reshape(shape))


@step
def split(v: Value, n: Numbers) -> Value | None:
    axis = axis_of(v, n)
    s = v.array.shape
    factors = [d for d in range(2, s[axis]) if s[axis] % d == 0]
    if not factors:
        return None
    d = n.of(factors)
    shape = (*s[:axis], d, s[axis] // d, *s[axis + 1 :])
    return Value(v.tensor.reshape(shape), v.array.reshape(shape))


@step
def cat(v: Value, n: Numbers) -> Value:
    axis, count = axis_of(v, n), n.of((1, 2))
    other = flip(v, n)
    tensors, arrays = [v.tensor, other.tensor, v.tensor][: count + 1], [v.array, other.array, v.array][: count + 1]
    return Value(Tensor.cat(*tensors, dim=axis), np.concatenate(arrays, axis))


@step
def roll(v: Value, n: Numbers) -> Value:
    axis, shift = axis_of(v, n), n.of(AMOUNTS)
    return Value(v.tensor.roll(shift, axis), np.roll(v.array, shift, axis))


@step
def triangle(v: Value, n: Numbers) -> Value | None:
    if v.array.ndim < 2:
        return None
    k, upper = n.of(AMOUNTS) - 8, n.below(2)
    return Value(v.tensor.triu(k), np.triu(v.array, k)) if upper else Value(v.tensor.tril(k), np.tril(v.array, k))


@step
def windows(v: Value, n: Numbers) -> Value | None:
    axis = axis_of(v, n)
    size, step_ = min(v.array.shape[axis], n.of((1, 2, 3, 7, 8, 16))), n.of((1, 1, 2, 3, 16))
    view = np.lib.stride_tricks.sliding_window_view(v.array, size, axis)
    return Value(v.tensor.unfold(axis, size, step_), view[(*[slice(None)] * axis, slice(None, None, step_))])


@step
def gather(v: Value, n: Numbers) -> Value:
    axis, count = axis_of(v, n), n.of(SIZES[:14])
    places = n.rng.integers(0, v.array.shape[axis], count)
    kind = n.of(("int64", "int32", "int16", "uint8" if v.array.shape[axis] < 256 else "int32"))
    return Value(v.tensor.index_select(axis, Tensor(places).cast(kind).realize()), np.take(v.array, places, axis))


@step
def below(v: Value, n: Numbers) -> Value:
    """A mask by place."""
    axis, limit, number = axis_of(v, n), n.of(AMOUNTS), n.below(3)
    shape = [1] * v.array.ndim
    shape[axis] = v.array.shape[axis]
    place = np.arange(shape[axis]).reshape(shape)
    mask = Tensor.arange(shape[axis]).reshape(shape) < limit
    other = Tensor(np.array(number, np.float32)).cast(v.dtype)
    return Value(Tensor.where(mask, v.tensor, other), np.where(place < limit, v.array, number))


@step
def cast(v: Value, n: Numbers) -> Value:
    to = n.of(TYPES)
    v = v.up_to(EXACT.get(to, 100))
    if to in ("uint8", "bool") and v.dtype.is_float:  # (of negative floats: saturated by some, wrapped by others)
        v = Value(v.tensor.abs(), np.abs(v.array))
    return Value(v.tensor.cast(to), v.array != 0 if to == "bool" else v.array)


def other_of(v: Value, n: Numbers) -> Value:
    """A value that broadcasts against `v`, of its type."""
    shape = [s if n.below(3) else 1 for s in v.array.shape]
    return numbers(n.rng, v.dtype.name, *shape)


@step
def arithmetic(v: Value, n: Numbers) -> Value:
    v = v.exact(4)
    w = other_of(v, n)
    if v.dtype.is_bool:
        return Value(v.tensor & w.tensor, v.array & w.array)
    f = n.of(("add", "sub", "mul", "maximum", "minimum"))
    g = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "maximum": np.maximum, "minimum": np.minimum}[f]
    return Value(getattr(v.tensor, f)(w.tensor), g(v.array, w.array))


@step
def choose(v: Value, n: Numbers) -> Value:
    w = other_of(v, n)
    return Value(Tensor.where(v.tensor > w.tensor, w.tensor, v.tensor), np.where(v.array > w.array, w.array, v.array))


@step
def total(v: Value, n: Numbers) -> Value:
    axes = sorted({axis_of(v, n) for _ in range(1 + n.below(2))})
    keep = bool(n.below(2))
    count = int(np.prod([v.array.shape[a] for a in axes]))
    v = v.exact(count)
    return Value(v.tensor.sum(tuple(axes), keepdim=keep), v.array.sum(tuple(axes), keepdims=keep))


@step
def extreme(v: Value, n: Numbers) -> Value:
    axis, keep = axis_of(v, n), bool(n.below(2))
    if n.below(2):
        return Value(v.tensor.amax(axis, keepdim=keep), v.array.max(axis, keepdims=keep))
    return Value(v.tensor.amin(axis, keepdim=keep), v.array.min(axis, keepdims=keep))


@step
def first_largest(v: Value, n: Numbers) -> Value | None:
    axis = axis_of(v, n)
    return None if v.dtype.is_bool else Value(v.tensor.argmax(axis), v.array.argmax(axis))


@step
def minus_largest(v: Value, n: Numbers) -> Value | None:
    axis = axis_of(v, n)
    if v.dtype.is_bool:
        return None
    v = v.exact(2)
    return Value(v.tensor - v.tensor.amax(axis, keepdim=True), v.array - v.array.max(axis, keepdims=True))


@step
def running_total(v: Value, n: Numbers) -> Value | None:
    axis = axis_of(v, n)
    if v.dtype.is_bool:
        return None
    v = v.exact(v.array.shape[axis])
    return Value(v.tensor.cumsum(axis), v.array.cumsum(axis))


@step
def product(v: Value, n: Numbers) -> Value | None:
    k, width = v.array.shape[-1], n.of(SIZES[:14])
    if v.dtype.is_bool:
        return None
    v = v.exact(k, 3)
    w = numbers(n.rng, v.dtype.name, *((k, width) if n.below(2) else (width, k)))
    right, numbers_ = (w.tensor, w.array) if w.array.shape[0] == k and n.below(2) else (None, None)
    if right is None:
        if w.array.shape[1] != k:
            w = numbers(n.rng, v.dtype.name, width, k)
        right, numbers_ = w.tensor.T, w.array.T
    return Value(v.tensor @ right, v.array @ numbers_)


@step
def pooling(v: Value, n: Numbers) -> Value | None:
    if not v.dtype.is_float or v.array.ndim > 3:
        return None
    x = v.array.reshape((1, 1, *v.array.shape)[-3:])
    size, step_, dilation = n.of((2, 3, 5, 8)), n.of((1, 2, 3, 8)), n.of((1, 1, 2, 7))
    padding = min(n.of(AMOUNTS), size // 2)
    length = x.shape[2] + 2 * padding - dilation * (size - 1)
    if length < 1:
        return None
    wide = np.pad(x, ((0, 0), (0, 0), (padding, padding)), constant_values=-(10**6))
    want = np.max([wide[:, :, k * dilation : k * dilation + length : step_] for k in range(size)], 0)
    if (want == -(10**6)).any():  # (a window of nothing but padding: minus infinity)
        return None
    return Value(F.max_pool1d(v.tensor.reshape(x.shape), size, step_, padding, dilation), want)


@step
def convolution(v: Value, n: Numbers) -> Value | None:
    if not v.dtype.is_float or v.array.ndim > 2:
        return None
    x = v.array.reshape((1, 1, *v.array.shape)[-3:])
    taps, channels = n.of((1, 2, 3, 5)), n.of((1, 2, 5))
    dilation, padding, stride = n.of((1, 1, 2, 8, 17, 64)), n.of(AMOUNTS), n.of((1, 1, 2, 3))
    length = x.shape[2] + 2 * padding - dilation * (taps - 1)
    if length < 1:
        return None
    v = v.exact(taps * x.shape[1], 3)
    x = v.array.reshape(x.shape)
    w = numbers(n.rng, v.dtype.name, channels, x.shape[1], taps)
    got = F.conv1d(v.tensor.reshape(x.shape), w.tensor, stride=stride, padding=padding, dilation=dilation)
    wide = np.pad(x, ((0, 0), (0, 0), (padding, padding)))
    want = sum(
        np.einsum("bcl,oc->bol", wide[:, :, k * dilation : k * dilation + length : stride], w.array[:, :, k])
        for k in range(taps)
    )
    return Value(got, np.asarray(want))


@step
def transposed_convolution(v: Value, n: Numbers) -> Value | None:
    if not v.dtype.is_float or v.array.ndim > 2:
        return None
    x = v.array.reshape((1, 1, *v.array.shape)[-3:])
    taps, channels, dilation, stride = n.of((1, 2, 3)), n.of((1, 2, 5)), n.of((1, 2, 8, 17)), n.of((1, 2, 3))
    v = v.exact(taps * x.shape[1], 3)
    x = v.array.reshape(x.shape)
    w = numbers(n.rng, v.dtype.name, x.shape[1], channels, taps)
    got = F.conv_transpose1d(v.tensor.reshape(x.shape), w.tensor, stride=stride, dilation=dilation)
    want = np.zeros((x.shape[0], channels, (x.shape[2] - 1) * stride + dilation * (taps - 1) + 1), np.int64)
    for k in range(taps):
        want[:, :, k * dilation :][:, :, : (x.shape[2] - 1) * stride + 1 : stride] += np.einsum(
            "bcl,co->bol", x, w.array[:, :, k]
        )
    return Value(got, want)


# *** running a kernel in every way ***


def machines() -> list[Machine]:
    """What kernels are made for: this processor, and simpler ones whose code it runs."""
    host = host_target().machine
    narrow = replace(host, vector_bytes=32, registers=16, scales=False, dots=AVX2_DOTS)
    least = replace(host, vector_bytes=16, registers=16, scales=False, dots=tuple[Dot, ...]())
    return [host, *(m for m in (narrow, least) if m.vector_bytes < host.vector_bytes)]


def kernels_for(machine: Machine) -> Compiled[CPUKernel]:
    return replace(COMPILED, machine=lambda: machine)


class Guarded:
    """A buffer's bytes with poison around them."""

    def __init__(self, data: np.ndarray) -> None:
        raw = np.full(data.nbytes + 2 * ZONE_BYTES + 64, POISON, np.uint8)
        begin = ZONE_BYTES + -(raw.ctypes.data + ZONE_BYTES) % 64
        self.raw, self.begin, self.end = raw, begin, begin + data.nbytes
        raw[begin : self.end] = data.reshape(-1).view(np.uint8)
        self.memory = Memory(raw.ctypes.data + begin, data.nbytes, raw)

    @property
    def bytes(self) -> np.ndarray:
        return self.raw[self.begin : self.end]

    def verify(self) -> None:
        assert (self.raw[: self.begin] == POISON).all() and (self.raw[self.end :] == POISON).all(), (
            "a kernel wrote outside of its buffer"
        )


Run = Callable[[list[Guarded], tuple[int, ...]], None]


def random_opts(ast: UOp, machine: Machine, rng: random.Random) -> Opts:
    prepared = prepare(ast, machine)
    sig, opts = signature(prepared.ast), prepared.opts
    lanes, items = machine.vector_bytes // 4, machine.group_items
    for _ in range(rng.randint(1, 4)):
        near = neighbours(sig, opts, lanes, sums_may_change=True, group_items=items)
        near = [x for x in near if beyond(machine, prepared.ast, x) is None]
        opts = rng.choice(near) if near else opts
    return opts


def on_host(kernel: Any) -> Run:
    return lambda given, values: kernel([g.memory for g in given], values)


def on_device(device: Device, kernel: Any) -> Run:
    """On memory of the device's own, poison included."""

    def run(given: list[Guarded], values: tuple[int, ...]) -> None:
        handles = [device.alloc(g.raw.nbytes) for g in given]
        for h, g in zip(handles, given):
            device.copyin(h, memoryview(g.raw))
        kernel([device.view(h, g.begin, g.end - g.begin) for h, g in zip(handles, given)], values)
        for h, g in zip(handles, given):
            device.copyout(memoryview(g.raw), h)
            device.free(h, g.raw.nbytes)

    return run


def on_gpu(device: Device, kernel: Any) -> Run:
    """On blocks that end where the buffers do, which the emulator watches over; half of them begin at odd places."""

    def run(given: list[Guarded], values: tuple[int, ...]) -> None:
        odd = 0 if len(given) % 2 else given[0].bytes.nbytes // max(1, len(given)) % 4 * 8
        blocks = [device.allocator.alloc(g.bytes.nbytes + odd) for g in given]
        handles = [device.view(b, odd, g.bytes.nbytes) for b, g in zip(blocks, given)]
        for h, g in zip(handles, given):
            device.copyin(h, memoryview(g.bytes))
        kernel(handles, values)
        for h, g in zip(handles, given):
            device.copyout(memoryview(g.bytes), h)
        for b in blocks:
            device.allocator.free(b, b.nbytes)

    return run


def variants(ast: UOp, rng: random.Random) -> Iterator[tuple[str, Run]]:
    """The kernel as it is made for some machines, as chosen and under random Opts, with and without checks."""
    for machine in machines():
        for opts in (None, random_opts(ast, machine, rng)):
            checked = rng.randrange(3) == 0
            with Context(CACHE=0, CHECK_OOB=int(checked)):
                try:
                    kernel = kernels_for(machine).build_with(ast, opts)
                except Exception as error:
                    raise AssertionError(
                        f"vectors of {machine.vector_bytes} bytes, {opts}: {type(error).__name__}: {error}"
                    ) from error
            cut = ""
            if kernel.fixed is not None and kernel.fixed[0] >= 1:
                kernel.work = 1 << 30
                total, _ = kernel.pieces({})
                kernel.fixed = (total, rng.randint(1, total))
                cut = f", cut by {kernel.fixed[1]} of {total}"
            name = f"vectors of {machine.vector_bytes} bytes, {list(kernel.opts)}{', checked' if checked else ''}{cut}"
            yield name, on_host(kernel)
    if not MISSING and rng.randrange(OPENCL_EVERY) == 0:
        device = get_device("OPENCL")
        opts = random_opts(ast, driver().machine, rng) if rng.randrange(2) else None
        with Context(CACHE=0):
            kernel = device.compile_with(ast, opts)
        yield f"OPENCL, {list(kernel.opts)}", on_device(device, kernel)
    if not REAL and rng.randrange(CUDA_EVERY) == 0:
        device = get_device("CUDA")
        opts = random_opts(ast, gpu_of(0).machine, rng) if rng.randrange(2) else None
        with Context(CACHE=0):
            kernel = device.compile_with(ast, opts)
        COUNTS["on a GPU"] += 1
        yield f"CUDA, {list(kernel.opts)}", on_gpu(device, kernel)


class Watch:
    """Runs every kernel of a program in every way."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.kernels = rng, 0

    def run(self, item: KernelItem, vars: Mapping[str, int]) -> None:
        values, before = item.values(vars), [b.copyout() for b in item.buffers]
        asts = item.ast.src if item.ast.op is Ops.CHAIN else (item.ast,)
        oracle = [get_device("PYTHON").compile(a) for a in asts]
        wanted = [Guarded(x) for x in before]
        on_host(Chained(item.ast, oracle) if item.ast.op is Ops.CHAIN else oracle[0])(wanted, values)
        self.kernels += len(asts)
        COUNTS["kernels"] += len(asts)
        self.compare("as it is run", item, on_host(item.kernel), before, values, wanted)
        for name, run in variants(item.ast, self.rng) if item.ast.op is Ops.SINK else ():
            self.compare(name, item, run, before, values, wanted)
        for b, g in zip(item.buffers, wanted):
            b.copyin(g.bytes.view(b.dtype.np))

    def compare(
        self,
        name: str,
        item: KernelItem,
        run: Run,
        before: list[np.ndarray],
        values: tuple[int, ...],
        wanted: list[Guarded],
    ) -> None:
        given = [Guarded(x) for x in before]
        COUNTS["ways to run them"] += 1
        try:
            run(given, values)
            for g in given:
                g.verify()
            for slot in sorted({*range(len(given))} - temporaries(item)):
                d = item.buffers[slot].dtype.np
                with np.errstate(invalid="ignore"):  # (a NaN of a half type)
                    got, want = (comparable(g[slot].bytes.view(d)) for g in (given, wanted))
                np.testing.assert_array_equal(got, want)
        except Exception as error:
            raise AssertionError(f"{item.kernel.name} for {name}: {type(error).__name__}: {error}") from error


def comparable(x: np.ndarray) -> np.ndarray:
    """In a type of which NumPy compares NaN with NaN."""
    return x if x.dtype.kind in "biu" else x.astype(np.float64)


def temporaries(item: KernelItem) -> set[int]:
    return {t.argument for t in item.ast.arg.temps} if item.ast.op is Ops.CHAIN else set()


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    with patch.object(KernelItem, "_run", lambda item, vars: watch.run(item, vars)):
        yield


def check(p: Program) -> None:
    rng = np.random.default_rng(p["seed"])
    value = numbers(rng, p["type"], *p["shape"])
    found = []
    for name, *drawn in p["steps"]:
        if value.array.size == 0 or value.array.ndim == 0:
            break
        new = STEPS[name](value, Numbers(rng, *drawn))
        if new is not None and 0 < new.array.size <= MOST and new.array.ndim <= 5:
            found.append(value := new)
    results = found[-p["results"] :]
    with Context(DEVICE="CPU"), watched(Watch(random.Random(p["seed"]))):
        if results:
            Tensor.realize(*(v.tensor for v in results))
        for v in results:
            np.testing.assert_array_equal(v.tensor.numpy().astype(np.int64), v.array)
