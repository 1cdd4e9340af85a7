"""The graph after each pass, as text, for small programs: golden/NAME.txt.

After a wanted change:  python -m tests.schedule.test_golden   and review the difference.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from manygrad import Context, Tensor, Variable, world
from manygrad.schedule import normalize
from manygrad.schedule.lower import lower_sink_to_linear
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.passes import observers
from manygrad.tensor.uop.show import show
from tests.schedule.programs import sink_of

FOLDER = Path(__file__).parent / "golden"
TWO = ("CPU:0", "CPU:1")


def stored(*shape: int, dtype: str = "float32") -> Tensor:
    return Tensor(np.ones(shape, dtype)).realize()


def sharded(*shape: int, axis: int | None = 0) -> Tensor:
    return stored(*shape).shard(TWO, axis).contiguous().realize()


def matmul_bias_relu() -> list[Tensor]:
    return [(stored(4, 8) @ stored(8, 3) + stored(3)).relu()]


def softmax() -> list[Tensor]:
    return [stored(4, 8).softmax()]


def gradient_of_linear() -> list[Tensor]:
    w = stored(8, 3).requires_grad_()
    (stored(4, 8) @ w).square().sum().backward()
    assert w.grad is not None
    return [w.grad]


def large_sum_in_two() -> list[Tensor]:
    return [stored(1 << 16).sum()]


def embedding_is_a_gather() -> list[Tensor]:
    return [stored(10, 4)[stored(2, 3, dtype="int64")] * 2]


def scatter_add() -> list[Tensor]:
    return [stored(5, 3).scatter_add(0, stored(2, 3, dtype="int64"), stored(2, 3))]


def cat_of_computed() -> list[Tensor]:
    return [(stored(2, 3) + 1).cat(stored(4, 3), dim=0)]


def relu_of_cat() -> list[Tensor]:
    return [stored(2, 3).cat(stored(4, 3)).relu()]


def range_mask_collapses() -> list[Tensor]:
    return [(Tensor.arange(8) < 5).where(3.0, 0.0).sum() + stored(1)]


def padded_slices() -> list[Tensor]:
    x = stored(6, 6)
    return [x.pad((1, 1)).flip(0)[1:4, ::2] + x[:3, :4]]


def assign_reversed() -> list[Tensor]:
    x = stored(6)
    return [x.assign(x.flip(0))]


def write_after_read() -> list[Tensor]:
    x = stored(6)
    old = x * 2
    x[1:3] = stored(2)
    return [old, x]


def swap_without_copies() -> list[Tensor]:
    a, b = Tensor([1.0, 2.0]).realize(), Tensor([3.0, 4.0]).realize()
    old = a * 1
    a.assign(b * 1)
    b.assign(old)
    return [a, b]


def symbolic_slice() -> list[Tensor]:
    return [(stored(10, 4)[: Variable("n", 1, 10).bind(3)] + 1).sum(0)]


def chain_of_attention() -> list[Tensor]:
    return [stored(1, 256, 4).scaled_dot_product_attention(stored(1, 256, 4), stored(1, 256, 4), is_causal=True)]


def sharded_loss_and_gradient() -> list[Tensor]:
    x, w = sharded(4, 3), sharded(3, 2, axis=None).requires_grad_()
    loss = (x @ w).relu().sum()
    loss.backward()
    assert w.grad is not None
    return [loss, w.grad]


def mean_over_devices_in_bfloat16() -> list[Tensor]:
    return [(sharded(2, 4).sum(0) * 0.5).cast("bfloat16")]


def reshard_by_all_to_all() -> list[Tensor]:
    return [sharded(4, 6).T.contiguous() + sharded(6, 4)]


def gather_to_one_device() -> list[Tensor]:
    return [sharded(3, 2).to("CPU:0") + 1]


PROGRAMS: list[Callable[[], list[Tensor]]] = [
    matmul_bias_relu, softmax, gradient_of_linear, large_sum_in_two, embedding_is_a_gather, scatter_add,
    cat_of_computed, relu_of_cat, range_mask_collapses, padded_slices, assign_reversed, write_after_read,
    swap_without_copies, symbolic_slice, sharded_loss_and_gradient, reshard_by_all_to_all, gather_to_one_device,
    chain_of_attention, mean_over_devices_in_bfloat16,
]  # fmt: skip


def _argument(u: UOp) -> str:
    text = show(u).splitlines()[-1].split(" = ", 1)[1]
    return re.sub(r"%\d+", lambda _: f"of ({_argument(u.src[0])})", text) if u.src else text


def text_of(program: Callable[[], list[Tensor]]) -> str:
    parts: list[tuple[str, str]] = []

    def observe(stage: str, name: str, graph: UOp) -> None:
        if graph.op is not Ops.LINEAR:  # (shown call by call below)
            parts.append((f"after {name}", show(graph)))

    tensors = program()
    graph = normalize(sink_of(tensors)).graph
    parts.append(("tensor graph", show(graph)))
    observers.append(observe)
    try:
        with Context(SPEC=1):
            linear = lower_sink_to_linear(graph, world)
    finally:
        observers.remove(observe)
    for i, call in enumerate(linear.src):
        what = call.src[0]
        args = ", ".join(map(_argument, call.src[1:]))
        parts.append(
            (
                f"call {i}: {'kernel' if what.op is Ops.SINK else what.op.name} of {args}",
                show(what) if what.op in (Ops.SINK, Ops.CHAIN) else "",
            )
        )
    plan = linear.arg
    parts.append(
        (
            "memory",
            "\n".join(
                [f"pool {p.device}: {p.nbytes} bytes" for p in plan.pools]
                + [f"#{b.uid}: {b.nbytes} bytes at {b.offset} of pool {b.pool}" for b in plan.buffers]
            ),
        )
    )
    out, last = [], ""
    for title, text in parts:
        out.append(f"=== {title} ===\n{'(unchanged)' if text == last and text else text}".rstrip())
        last = text if title.startswith(("after", "tensor")) else ""
    return "\n\n".join(out) + "\n"


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_golden(program: Callable[[], list[Tensor]]) -> None:
    path = FOLDER / f"{program.__name__}.txt"
    assert path.exists(), f"{path} is missing; write it with python -m tests.schedule.test_golden"
    assert text_of(program) == path.read_text(), (
        f"{path.name} differs; if that is wanted, write it again (see the top of {Path(__file__).name})"
    )


def test_the_text_does_not_depend_on_what_ran_before() -> None:
    assert text_of(scatter_add) == text_of(scatter_add)


def test_no_golden_file_is_left_over() -> None:
    assert {p.stem for p in FOLDER.glob("*.txt")} == {p.__name__ for p in PROGRAMS}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for stale in FOLDER.glob("*.txt"):
        stale.unlink()
    for p in PROGRAMS:
        (FOLDER / f"{p.__name__}.txt").write_text(text_of(p))
        print("wrote", FOLDER / f"{p.__name__}.txt")
