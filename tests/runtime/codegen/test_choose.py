"""Which decision gives which Opt, for a few kernels on one machine: golden/choices.txt.

After a wanted change:  python -m tests.runtime.codegen.test_choose   and review the difference.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from manygrad.runtime.codegen import cost
from manygrad.runtime.codegen.analysis.describe import signature
from manygrad.runtime.codegen.choose import DECISIONS, Facts
from manygrad.runtime.codegen.kernel.legalize import as_written, legalize
from manygrad.runtime.codegen.opts import legal
from manygrad.runtime.codegen.pipeline import choice_of, explain, prepare, rewrite
from manygrad.runtime.codegen.target import Dot, Machine
from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.environment import Context
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp
from tests.runtime.codegen.kernels import (
    add,
    bytes_product,
    elementwise,
    f32,
    gemm,
    gemm_in_blocks,
    load,
    logsumexp,
    loop,
    mul,
    packed_product,
    red,
    reduce,
    sink,
    store,
    two_products,
)

GOLDEN = Path(__file__).parent / "golden" / "choices.txt"
MACHINE = Machine(
    vector_bytes=64,
    registers=32,
    cache_bytes=1 << 20,
    scales=True,
    cores=2,
    dots=(Dot(dtypes.uint8, dtypes.int8, 64),),
    burst_bytes=4 << 10,
)
PARTS = replace(MACHINE, dots=(Dot(f32, f32, 64, rows=16),))
GPU = Machine(16, 32, cores=132, group_items=1024, shared_bytes=48 << 10, copies_ahead=True, warp_items=32)
AMX = replace(MACHINE, dots=(*MACHINE.dots, Dot(dtypes.bfloat16, dtypes.bfloat16, 64, rows=16)))


def scatter() -> UOp:
    """out[index[i], j] += x[i, j]"""
    i, j = loop(100, 0), loop(512, 1)
    row = load(2, i, dtypes.int32).cast(dtypes.index)
    return sink(store(0, add(mul(row, 512), j), load(1, add(mul(i, 512), j)), i, j, arg="add"))


def softmax() -> UOp:
    i, j, r, s = loop(4096, 0), loop(1024, 1), red(1024, 2), red(1024, 3)
    x = lambda c: load(1, add(mul(i, 1024), c))  # noqa: E731
    top = reduce(x(r), r, op=Ops.MAX)
    e = lambda c: x(c).alu(Ops.SUB, top).alu(Ops.EXP)  # noqa: E731
    return sink(store(0, add(mul(i, 1024), j), e(j).alu(Ops.FDIV, reduce(e(s), s)), i, j))


def rows_of_halves() -> UOp:
    """out = d / sum(d) over each row, d = (x - 1) (x - 1): three operations, however many casts they become, are not
    worth keeping."""
    i, j, r = loop(64, 0), loop(512, 1), red(512, 2)

    def d(c: UOp) -> UOp:
        below = load(1, add(mul(i, 512), c), dtypes.bfloat16).alu(Ops.SUB, UOp.const(dtypes.bfloat16, 1.0))
        return below.alu(Ops.MUL, below)

    return sink(store(0, add(mul(i, 512), j), d(j).alu(Ops.FDIV, reduce(d(r), r)), i, j))


def sum_down_rows() -> UOp:
    j, r = loop(4096, 0), red(4096, 1)
    return sink(store(0, j, reduce(load(1, add(mul(r, 4096), j)), r), j))


def transpose() -> UOp:
    i, j = loop(1024, 0), loop(1025, 1)
    return sink(store(0, add(mul(i, 1025), j), load(1, add(mul(j, 1024), i)), i, j))


def max_of_each_three() -> UOp:
    i, k, r = loop(320, 0), loop(3, 1), red(3, 2)
    top = reduce(load(1, add(mul(i, 3), r)), r, op=Ops.MAX)
    return sink(store(0, add(mul(i, 3), k), load(1, add(mul(i, 3), k)).alu(Ops.SUB, top), i, k))


def columns_with_weights() -> UOp:
    """out[i, n] = sum over k of w[n, k] * x[i, k, n]: no operand is read again for rows."""
    i, n, k = loop(64, 0), loop(256, 1), red(32, 2)
    w, x = load(1, add(mul(n, 32), k)), load(2, add(mul(i, 32 * 256), mul(k, 256), n))
    return sink(store(0, add(mul(i, 256), n), reduce(w.alu(Ops.MUL, x), k), i, n))


def row_by_matrix_in_blocks() -> UOp:
    """out[n, b] = sum over k of x[b, k] * w[n, b, k]: a product with a weight whose columns are cut over devices."""
    n, b, k = loop(576, 0), loop(4, 1), red(192, 2)
    x, w = load(1, add(mul(b, 192), k)), load(2, add(mul(n, 768), mul(b, 192), k))
    return sink(store(0, add(mul(n, 4), b), reduce(x.alu(Ops.MUL, w), k), n, b))


def row_by_blocks(blocks: int) -> UOp:
    """out[n] = sum over blocks b, halves h, bytes i of x[b, h, i] * s[n, b] * (w[n, b, i] >> 4 h & 15)."""
    n, b, h, i = loop(64, 0), red(blocks, 1), red(2, 2), red(16, 3)
    block = add(mul(n, blocks), b)
    byte = load(2, add(mul(block, 16), i), dtypes.uint8)
    by = mul(h, 4).cast(dtypes.uint8)
    q = byte.alu(Ops.SHR, by).alu(Ops.AND, UOp.const(dtypes.uint8, 15)).cast(f32)
    x = load(1, add(mul(b, 32), mul(h, 16), i))
    return sink(store(0, n, reduce(x.alu(Ops.MUL, q.alu(Ops.MUL, load(3, block))), b, h, i), n))


def convolution() -> UOp:
    """out[b, o, x] = sum over c, k of a[b, c, x + k - 1] * w[o, c, k], where x + k - 1 lies inside."""
    b, o, x, c, k = loop(8, 0), loop(64, 1), loop(8, 2), red(64, 3), red(3, 4)
    at = add(x, k, -1)
    inside = UOp.const(dtypes.index, -1).alu(Ops.CMPLT, at).alu(Ops.AND, at.alu(Ops.CMPLT, UOp.const(dtypes.index, 8)))
    a, w = load(1, add(mul(b, 512), mul(c, 8), at), valid=inside), load(2, add(mul(o, 192), mul(c, 3), k))
    return sink(store(0, add(mul(b, 512), mul(o, 8), x), reduce(a.alu(Ops.MUL, w), c, k), b, o, x))


KERNELS: dict[str, Callable[[], UOp]] = {
    "elementwise, 64 MiB": lambda: elementwise(lambda a, b: a.alu(Ops.MUL, b), [f32, f32], 1 << 24),
    "transpose": transpose,
    "max of each three": max_of_each_three,
    "sum down the rows, 64 MiB": sum_down_rows,
    "softmax, rows of 4 KiB": softmax,
    "logsumexp": lambda: logsumexp(64, 1000),
    "logsumexp of bfloat16": lambda: logsumexp(64, 1000, d=dtypes.bfloat16),
    "rows of bfloat16": rows_of_halves,
    "product": lambda: gemm(512, 512, 512),
    "product, b transposed": lambda: gemm(512, 512, 512, "NT"),
    "product, a transposed": lambda: gemm(1024, 1024, 1024, "TN"),
    "product, a transposed, rows in blocks": lambda: gemm_in_blocks(1024, 256, 256),
    "product of few columns": lambda: gemm(512, 64, 64),
    "product of few rows": lambda: gemm(4, 1024, 1024),
    "product of few rows, b transposed": lambda: gemm(4, 1024, 1024, "NT"),
    "product of a vector of rows, b transposed": lambda: gemm(16, 1024, 1024, "NT"),
    "two products of few rows": lambda: two_products(4, 1024, 1024),
    "two products of a vector of rows": lambda: two_products(16, 1024, 1024),
    "row by matrix": lambda: gemm(1, 256, 256, "NT"),
    "row by matrix, in blocks": row_by_matrix_in_blocks,
    "row by quantised matrix": lambda: row_by_blocks(18),
    "row by quantised matrix, few blocks": lambda: row_by_blocks(6),
    "rows of bytes by a packed matrix": lambda: packed_product(64, 16, 18),
    "product of bfloat16": lambda: gemm(256, 256, 256, dtype=dtypes.bfloat16),
    "product of bfloat16 in matrices": lambda: gemm(256, 256, 256, "NT", dtypes.bfloat16),
    "product of float32 in parts": lambda: gemm(512, 512, 512),
    "product of bytes": lambda: bytes_product(256, 256, 256),
    "convolution": convolution,
    "columns with weights": columns_with_weights,
    "scatter": scatter,
    "GPU: elementwise": lambda: elementwise(lambda a, b: a.alu(Ops.MUL, b), [f32, f32], 1 << 24),
    "GPU: transpose": transpose,
    "GPU: sum down the rows": sum_down_rows,
    "GPU: softmax": softmax,
    "GPU: logsumexp": lambda: logsumexp(64, 1000),
    "GPU: max of each three": max_of_each_three,
    "GPU: product, 4096": lambda: gemm(4096, 4096, 4096),
    "GPU: product, 512": lambda: gemm(512, 512, 512),
    "GPU: product, b transposed": lambda: gemm(512, 512, 512, "NT"),
    "GPU: product of odd sizes": lambda: gemm(100, 130, 75),
    "GPU: product of few rows": lambda: gemm(4, 1024, 1024),
    "GPU: row by matrix": lambda: gemm(1, 256, 256, "NT"),
    "GPU: convolution": convolution,
    "GPU: scatter": scatter,
}


def machine_for(name: str) -> Machine:
    if name.startswith("GPU"):
        return GPU
    return AMX if "matrices" in name else PARTS if "in parts" in name else MACHINE


def text() -> str:
    return "\n\n".join(f"{name}\n{explain(make(), machine_for(name))}" for name, make in KERNELS.items()) + "\n"


def test_the_choices_are_as_reviewed() -> None:
    assert text() == GOLDEN.read_text(), "if it was wanted: python -m tests.runtime.codegen.test_choose"


def test_every_decision_is_shown() -> None:
    """Each of DECISIONS decides about one of the kernels, and none is made that is not listed; in that order."""
    shown = {line.split()[0] for line in GOLDEN.read_text().splitlines() if line}
    assert [d.__name__ for d in DECISIONS if d.__name__ not in shown] == []
    order = [d.__name__ for d in DECISIONS]
    for kind, make in KERNELS.items():
        kernel = rewrite(make(), machine_for(kind))
        made = [name for name, _ in choice_of(kernel, machine_for(kind)).steps]
        assert made == sorted(made, key=order.index)


@pytest.mark.parametrize("name", KERNELS)
def test_what_is_chosen_is_what_is_checked_and_lowered(name: str) -> None:
    machine = machine_for(name)
    kernel = rewrite(KERNELS[name](), machine)
    choice = choice_of(kernel, machine)
    assert legal(signature(choice.facts.ast), choice.opts) is None
    prepared = prepare(KERNELS[name](), machine)
    assert (prepared.ast, prepared.opts) == (choice.facts.ast, choice.opts)


@pytest.mark.parametrize("layout", ["NN", "NT", "TN"])
@pytest.mark.parametrize("types", [(dtypes.int8, dtypes.int8), (dtypes.uint8, dtypes.int8)])
@pytest.mark.parametrize("machine", [MACHINE, Machine(16, 32, dots=(Dot(dtypes.int8, dtypes.int8, 16),))])
def test_products_of_masked_bytes_take_what_is_chosen(
    layout: str, types: tuple[DType, DType], machine: Machine
) -> None:
    """Rows in groups that a condition leaves out in part are not packed (they were, once)."""
    prepared = prepare(bytes_product(64, 300, 200, layout, types, padded=True), machine)
    assert legal(signature(prepared.ast), prepared.opts) is None


def test_debug_4_prints_the_decisions(capsys: pytest.CaptureFixture[str]) -> None:
    with Context(DEBUG=4):
        name = prepare(KERNELS["product"](), MACHINE).name
    assert capsys.readouterr().out == f"{name}, by runtime/codegen/choose:\n{explain(KERNELS['product'](), MACHINE)}\n"


def test_without_opts_a_kernel_runs_as_written() -> None:
    with Context(NOOPT=1):
        assert explain(KERNELS["product"](), MACHINE) == "as written (NOOPT=1)"


@pytest.mark.parametrize("d", [f32, dtypes.bfloat16, dtypes.float64])
def test_costs_count_operations_as_written(d: object) -> None:
    """An exponential is one operation, whatever it became; a sum of halves joins what was written."""
    i, r = loop(8, 0), red(100, 1)
    x = load(1, add(mul(i, 100), r), d)  # type: ignore[arg-type]
    ast = sink(store(0, i, reduce(x.alu(Ops.MUL, x).alu(Ops.EXP), r).alu(Ops.SIN), i))
    legalized = legalize(ast, scales=True)
    now, before = as_written(legalized.ast, legalized.written), signature(ast).nodes
    assert [(u.op, u.dtype, u.arg) for u in now] == [(u.op, u.dtype, u.arg) for u in before]
    facts = Facts(legalized.ast, MACHINE, legalized.written)
    assert facts.lanes == Facts(ast, MACHINE).lanes
    assert facts.term(facts.sig.reduces[0]).op is Ops.EXP


def test_every_number_has_a_unit_and_a_benchmark() -> None:
    """Above each constant of the cost model: `# unit: what it means [benchmark; commit]`."""
    text = Path(cost.__file__).read_text()
    constants = re.findall(r"((?:^#.*\n)+)^([A-Z_]+) = ", text, re.MULTILINE)
    assert [name for _, name in constants] == re.findall(r"^([A-Z_]+) = ", text, re.MULTILINE)
    for comment, name in constants:
        words = " ".join(comment.replace("#", "").split())
        assert re.fullmatch(r"(\w+|\(.*\)): .*\[(no benchmark|\w+\.py[^]]*)\]", words), f"{name}: {words}"
    for script in set(re.findall(r"\[(\w+\.py)", text)):
        assert (Path(__file__).parents[3] / "benchmarks" / script).exists(), script


if __name__ == "__main__":
    GOLDEN.write_text(text())
