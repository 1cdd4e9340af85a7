"""loops.md: three kernels, and how each Opt changes their loop trees."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from manygrad import Tensor
from manygrad.runtime.codegen.analysis.describe import signature
from manygrad.runtime.codegen.loops.build import build
from manygrad.runtime.codegen.loops.show import show
from manygrad.runtime.codegen.opts import Opt, legal, loop_nest, named
from manygrad.runtime.codegen.pipeline import prepare
from manygrad.runtime.codegen.target import WARP_DOTS, Machine
from manygrad.runtime.current import current
from manygrad.schedule import create_linear_with_vars
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.engine import engine
from manygrad.tensor.uop import Ops, UOp

MACHINE = Machine(64, 32, 1 << 20, True, 2, burst_bytes=4 << 10)  # two cores with AVX-512
OPENCL = Machine(64, 32, 1 << 20, cores=2)  # what pocl says of them

HEAD = """# Loop trees

<!-- made by docs/generate.py from docs/loops.py -->

Between the choice of [Opts](opts.md) and the instructions a kernel is a tree of loops (`runtime/codegen/loops/`):

- `tree.py` has its nodes, all immutable; `build.py` makes the tree of a kernel and its list of Opts; `spec.py` says
  what it must be (checked with `SPEC=1`); `show.py` prints it (`DEBUG=6`).
- `runtime/codegen/emit/` walks it and writes the instructions (`lowered.py`), which a renderer prints.

How to read one: `for i0 in begin..finish, parallel` is the loop that is cut over the threads, from a thread's first
index to its last. `r1 = 64 from i0 in vectors of 16` is a tile: 64 iterations of the loop `r1` that stand in registers,
four vectors of 16; what is below is written out for each of them. `k2` is a range of a sum. `pack` fills local memory,
`accumulate` adds a tile to a sum's registers.

On OPENCL each work item runs a part of the parallel loop, from its first index to its last, unless Opts bind loops to
the work items of a group: then that loop is the grid, an index for each group, and its work items may share memory and
wait for each other at barriers. A sum may also go across the work items of a subgroup (a warp): `for i in
member..512 by 32, subgroup` gives each its iterations, and `across 32 work items` says that their partial sums are
combined. Such lists are for GPUs: the search (`BEAM`) tries them there.

Three kernels follow, with the Opts that the heuristic gives them on two cores with AVX-512. The first tree is the
kernel as written; after that, what each Opt changes of it.
"""


def product() -> Tensor:
    x, w, b = (Tensor(np.ones(s, np.float32)).realize() for s in ((512, 512), (512, 512), (512,)))
    return (x @ w + b).relu()


def softmax() -> Tensor:
    return Tensor(np.ones((512, 1000), np.float32)).realize().softmax(1)


def gradient_of_convolution() -> Tensor:
    shapes = (4, 16, 28, 28), (32, 16, 3, 3), (4, 32, 28, 28)
    x, w, grad = (Tensor(np.ones(s, np.float32)).realize() for s in shapes)
    x.requires_grad = True
    x.conv2d(w, padding=1).backward(grad)
    assert x.grad is not None
    return x.grad


KERNELS: dict[str, tuple[str, Callable[[], Tensor]]] = {
    "A matrix product with bias and relu": ("(x @ w + b).relu(), x and w of (512, 512)", product),
    "A softmax": ("x.softmax(1), x of (512, 1000)", softmax),
    "A convolution's gradient": (
        "the gradient of x in x.conv2d(w, padding=1), x of (4, 16, 28, 28), w of (32, 16, 3, 3)",
        gradient_of_convolution,
    ),
}


def kernel(t: Tensor) -> UOp:
    """The last one of a tensor's schedule, which has a sum."""
    memory = engine().new_buffer(t.uop, "CPU")
    sink = UOp(Ops.SINK, dtypes.void, (UOp(Ops.STORE, dtypes.void, (memory, t.uop)),))
    linear = create_linear_with_vars(sink, current().world, current().schedules).linear
    calls = [c.src[0] for c in linear.src if c.src[0].op is Ops.SINK]
    return [c for c in calls if any(u.op is Ops.REDUCE for u in c.toposort())][-1]


def section(title: str, program: str, make: Callable[[], Tensor]) -> Iterator[str]:
    prepared = prepare(kernel(make()), MACHINE)
    sig, opts = signature(prepared.ast), prepared.opts
    steps = [n for n in range(len(opts) + 1) if n == 0 or legal(sig, opts[:n]) is None]
    trees = [show(build(sig, loop_nest(sig, opts[:n]))) for n in steps]
    yield f"\n## {title}\n\n`{program}`: `{' '.join(map(repr, opts))}`\n\n```\n{trees[0]}\n```\n"
    for first, last, before, after in zip(steps, steps[1:], trees, trees[1:]):
        changes = list(difflib.unified_diff(before.split("\n"), after.split("\n"), lineterm="", n=1))[2:]
        lines = [line for line in changes if not line.startswith("@@")]
        text = "\n".join(lines) or " (the same loops; other instructions in the tile)"
        yield f"\n{' '.join(f'`{o!r}`' for o in opts[first:last])}:\n\n```diff\n{text}\n```\n"
    other = prepare(kernel(make()), OPENCL)
    if other.opts == opts:
        yield "\nOn OPENCL, with pocl on these cores: the same.\n"
    else:
        tree = show(build(signature(other.ast), loop_nest(signature(other.ast), other.opts)))
        yield f"\nOn OPENCL, with pocl on these cores, `{' '.join(map(repr, other.opts))}`:\n\n```\n{tree}\n```\n"


BOUND = (
    *(named("tile", axis, 4) for axis in (0, 1)), named("parallel", 2), named("bind", 0, 16), named("bind", 1, 16),
    named("cache_shared", 2, 1, 16), named("cache_shared", 2, 2, 16),
)  # fmt: skip


WARPS = (
    named("tile", 0, 8), named("vectorize", 1, 4), named("tile", 1, 8), named("unroll", 2, 32), named("parallel", 2),
    named("bind", 0, 16), named("bind", 1, 8),
    named("warp_matrix", 2), named("copy_ahead", 2, 3),
)  # fmt: skip


def half_product() -> Tensor:
    a, b = (Tensor(np.ones((512, 512), np.float32)).cast(dtypes.bfloat16).realize() for _ in range(2))
    return a @ b.T


ACROSS = named("parallel", 1), named("bind", 0, 4), named("bind_reduce", 1, 32)


def sum_of_rows() -> Tensor:
    return Tensor(np.ones((512, 1000), np.float32)).realize().sum(1)


def groups(title: str, make: Callable[[], Tensor], opts: tuple[Opt, ...]) -> str:
    machine = replace(
        OPENCL, group_items=1024, shared_bytes=48 << 10, subgroup_items=32, dots=WARP_DOTS, copies_ahead=True
    )
    tree = show(prepare(kernel(make()), machine, opts).tree())
    return f"\n## {title}\n\n`{' '.join(map(repr, opts))}`\n\n```\n{tree}\n```\n"


def page() -> str:
    kernels = (s for title, (program, make) in KERNELS.items() for s in section(title, program, make))
    last = (
        groups("The product in groups, as for a GPU", product, BOUND),
        groups("A product of bfloat16 by the matrix instructions of warps", half_product, WARPS),
        groups("Sums of rows, across lanes", sum_of_rows, ACROSS),
    )
    return HEAD + "".join(kernels) + "".join(last)
