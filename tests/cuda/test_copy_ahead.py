"""Asynchronous copies into shared memory (`copy_ahead`): the same bits as without them, of which products they are
chosen, what each spec refuses, and that the emulator notices errors in their use."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from manygrad import Context, Tensor
from manygrad.runtime.codegen.loops import ring
from manygrad.runtime.codegen.loops.index import add, const
from manygrad.runtime.codegen.loops.spec import verify
from manygrad.runtime.codegen.loops.tree import (
    AwaitCopies,
    Barrier,
    BlockLoop,
    CommitCopies,
    For,
    If,
    Node,
    Nodes,
    Share,
    StartCopies,
    Tree,
    every,
)
from manygrad.runtime.codegen.opts import CopyAhead, Opts, canonical, legal, named, neighbours, sums
from manygrad.runtime.codegen.pipeline import prepare, signature
from manygrad.runtime.codegen.render.llvm.nvptx import NVPTXTarget, render, render_checked
from manygrad.runtime.codegen.target import Machine
from manygrad.runtime.devices.cuda.ptx import ptx_of
from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp
from tests.cuda.emulator import launch, parsed
from tests.cuda.install import emulated
from tests.cuda.memory import DeviceMemory, Fault, Traffic
from tests.cuda.test_emulator import result
from tests.cuda.test_warp_matrix import LAYOUTS, MACHINE, factor, made_ptx
from tests.runtime.codegen.kernels import add as plus
from tests.runtime.codegen.kernels import gemm, load, loop, mul, red, reduce, run, sink, store

GPU = replace(MACHINE, copies_ahead=True, shared_bytes=64 << 10)
RNG = np.random.default_rng(0)
# rows, columns, terms: whole tiles; rows, columns and terms that end within a tile, and within 16 bytes (one factor
# goes through registers, or both)
SIZES = [(128, 128, 160), (72, 40, 136), (130, 66, 104), (256, 64, 96), (48, 72, 330)]
HALF, SINGLE = dtypes.bfloat16, dtypes.float32


def chosen(ast: UOp, machine: Machine = GPU) -> Opts:
    return prepare(ast, machine).opts


def without_ring(ast: UOp) -> Opts:
    return chosen(ast, replace(GPU, copies_ahead=False))


def arrays_of(sizes: tuple[int, int, int], dtype: DType) -> list[np.ndarray]:
    m, n, k = sizes
    return [np.zeros(m * n, dtype.np), *(RNG.standard_normal(x).astype(dtype.np) for x in (m * k, k * n))]


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [*((s, t) for s in SIZES for t in (HALF, SINGLE)), *((SIZES[0], t) for t in (dtypes.float16, dtypes.float64))],
    ids=str,
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_ring_gives_the_same_bits(sizes: tuple[int, int, int], layout: str, dtype: DType) -> None:
    """Of any length, in groups that have a tile each and several one after the other; the spec holds."""
    ast, arrays = gemm(*sizes, layout, dtype), arrays_of(sizes, dtype)
    plain = without_ring(ast)
    want = result(ast, arrays, plain, machine=GPU)
    sig, tried = signature(prepare(ast, GPU, plain).ast), 0
    for blocks in (2, 3, 4):
        opts = (*plain, named("copy_ahead", 2, blocks))
        if legal(sig, opts) is None:
            tried += 1
            verify(prepare(ast, GPU, opts).tree())
            assert result(ast, arrays, opts, machine=GPU, per=blocks - 1).tobytes() == want.tobytes(), opts
    whole = all(n % 64 == 0 for n in sizes[:2])
    assert tried >= (2 if whole or (dtype.is_half and sizes[1] % 8 == 0 and sizes[2] % 8 == 0) else 0), plain


@pytest.mark.parametrize(
    ("rows", "columns", "lanes", "below", "beside"),
    [(16, 16, 4, 8, 4), (16, 8, 8, 8, 8), (4, 16, 2, 16, 4), (8, 4, 4, 8, 16)],
)
@pytest.mark.parametrize(("dtype", "precision"), [(HALF, "highest"), (SINGLE, "high")], ids=str)
@pytest.mark.parametrize("layout", ["TN", "NT"])
def test_tiles_of_any_size(
    layout: str, dtype: DType, precision: str, rows: int, columns: int, lanes: int, below: int, beside: int
) -> None:
    """Those that a search may find, cut unevenly."""
    sizes = (rows * below + 8, columns * beside * 2 - 8, 104)
    ast, arrays, machine = gemm(*sizes, layout, dtype), arrays_of(sizes, dtype), replace(GPU, shared_bytes=1 << 20)
    opts = (
        named("tile", 0, rows), named("vectorize", 1, lanes), named("tile", 1, columns),
        named("unroll", 2, 64 // dtype.itemsize), named("parallel", 2), named("bind", 0, below),
        named("bind", 1, beside), named("warp_matrix", 2),
    )  # fmt: skip
    with Context(FLOAT32_MATMUL_PRECISION=precision):
        want = result(ast, arrays, opts, machine=machine)
        got = result(ast, arrays, (*opts, named("copy_ahead", 2, 3)), machine=machine, per=2)
    assert got.tobytes() == want.tobytes()


def cp_async(text: str) -> list[str]:
    return re.findall(r"cp\.async\.c[ag]\.shared\.global .*, (\d+)(?:, %r\d+)?;", text)


@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_product_is_copied_sixteen_bytes_at_a_time(layout: str, dtype: DType) -> None:
    """What of float32 lies along the reduction is turned on the way: 4 bytes. One barrier a block and one at the end,
    and nothing of the copies goes through registers."""
    ast = gemm(4096, 4096, 4096, layout, dtype)
    machine = replace(GPU, cores=132, shared_bytes=48 << 10)
    (own,) = [o for o in chosen(ast, machine) if isinstance(o, CopyAhead)]
    assert own.blocks == 3
    text = ptx_of(render(prepare(ast, machine).program(), NVPTXTarget()), 80)
    turned = {0: layout[0] == "N", 1: layout[1] == "T"} if dtype is SINGLE else {}
    assert {*cp_async(text)} == {"16"} - ({"16"} if turned and all(turned.values()) else set()) | (
        {"4"} if any(turned.values()) else set()
    )
    assert len(re.findall(r"barrier\.sync", text)) == 2 and "ld.global" not in text and "st.shared" not in text
    assert len(re.findall(r"cp\.async\.wait_group", text)) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "precision"), [(HALF, "highest"), (SINGLE, "high"), (SINGLE, "highest")], ids=str)
def test_what_is_shared_lies_in_other_banks(dtype: DType, precision: str, layout: str) -> None:
    """What threads read at once takes one turn, however it was copied."""
    sizes = (512, 256, 64)
    ast, arrays = gemm(*sizes, layout, dtype), arrays_of(sizes, dtype)
    with Context(FLOAT32_MATMUL_PRECISION=precision):
        for opts in (None, without_ring(ast)):
            traffic = Traffic()
            result(ast, arrays, opts, machine=GPU, traffic=traffic)
            assert traffic.turns == traffic.reads > 0


def test_what_is_not_an_argument_goes_through_registers() -> None:
    """A factor that is computed, or lies element by element; without the other one there is no ring."""
    m, n, k = 128, 128, 128
    i, j, r = loop(m, 0), loop(n, 1), red(k, 2)
    own, other = load(1, plus(mul(i, k), r), HALF), load(2, plus(mul(j, k), r), HALF)
    twice = load(2, plus(mul(j, k), r), SINGLE).cast(HALF)

    def product(a: UOp, b: UOp) -> UOp:
        value = reduce(a.cast(SINGLE).alu(Ops.MUL, b.cast(SINGLE)), r).cast(HALF)
        return sink(store(0, plus(mul(i, n), j), value, i, j))

    for b, held in ((other, HALF), (twice, SINGLE)):
        ast = product(own, b)
        arrays = [*arrays_of((m, n, k), HALF)[:2], RNG.standard_normal(n * k).astype(held.np)]
        assert any(isinstance(o, CopyAhead) for o in chosen(ast))
        tree = prepare(ast, GPU).tree()
        assert any(isinstance(x, Share) for x in every(tree.nodes)) == (held is SINGLE)
        want = result(ast, arrays, without_ring(ast), machine=GPU)
        assert result(ast, arrays, None, machine=GPU, per=2).tobytes() == want.tobytes()
    assert not any(
        isinstance(o, CopyAhead) for o in chosen(product(load(1, plus(mul(i, k), r), SINGLE).cast(HALF), twice))
    )


@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_buffers_that_begin_anywhere_and_checked_ones_have_the_same_bits(dtype: DType) -> None:
    """By loads and stores in place of asynchronous copies, as their addresses are no multiples, or to be looked at."""
    sizes = (128, 64, 96)
    ast, arrays = gemm(*sizes, "NN", dtype), arrays_of(sizes, dtype)
    assert cp_async(ptx_of(render(prepare(ast, GPU).program(), NVPTXTarget()), 80))
    assert not cp_async(ptx_of(render_checked(prepare(ast, GPU).program(), NVPTXTarget()), 80))
    got = result(ast, arrays, None, machine=GPU, target=NVPTXTarget(aligned=False))
    assert got.tobytes() == result(ast, arrays, without_ring(ast), machine=GPU).tobytes()


def test_where_it_is_not_chosen() -> None:
    product = gemm(256, 256, 256, "NN", SINGLE)
    for ast, machine in (
        (product, replace(GPU, copies_ahead=False)),
        (gemm(256, 256, 16, "NN", SINGLE), GPU),  # one block
        (gemm(256, 256, 258, "TN", HALF), replace(GPU, shared_bytes=16 << 10)),  # no room for two
        (gemm(4, 256, 256, "NT", SINGLE), GPU),  # nothing is shared
    ):
        assert not any(isinstance(o, CopyAhead) for o in chosen(ast, machine))
    with pytest.raises(ValueError, match="this machine has none"):
        prepare(product, replace(GPU, copies_ahead=False), chosen(product))


ILLEGAL = {
    "nothing shared": (gemm(64, 64, 64), (named("parallel", 2), named("copy_ahead", 2, 2)), "shares nothing"),
    "a long ring": (gemm(64, 64, 64), (named("copy_ahead", 2, 9),), "2 to 4 blocks"),
    "twice": (gemm(64, 64, 64), (named("copy_ahead", 2, 2), named("copy_ahead", 2, 3)), "another copy_ahead"),
    "along a loop": (gemm(64, 64, 64), (named("copy_ahead", 1, 2),), "does not apply to a loop range"),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_what_is_not_legal(name: str) -> None:
    ast, opts, message = ILLEGAL[name]
    assert message in str(legal(signature(ast), opts))


def test_the_search_finds_it_and_sums_stay_the_same() -> None:
    ast = prepare(gemm(256, 256, 256), GPU).ast
    sig, plain = signature(ast), without_ring(gemm(256, 256, 256))
    found = neighbours(sig, plain, 4, group_items=1024)
    for blocks in (2, 3, 4):
        opts = (*plain, named("copy_ahead", 2, blocks))
        assert canonical(sig, opts) in found and sums(sig, opts) == sums(sig, plain)


# *** the spec of trees ***


def changed(nodes: Nodes, change: Callable[[Node], Nodes]) -> Nodes:
    """Every node through `change`, inner ones first."""
    found = list[Node]()
    for node in nodes:
        for part in ("body", "otherwise"):
            if held := getattr(node, part, ()):
                node = replace(node, **{part: changed(held, change)})  # type: ignore[type-var]
        found += change(node)
    return tuple(found)


def but(kind: type[Node], make: Callable[[Any], Nodes]) -> Callable[[Tree], Nodes]:
    return lambda tree: changed(tree.nodes, lambda n: make(n) if isinstance(n, kind) else (n,))


def last_barrier_left_out(tree: Tree) -> Nodes:
    """That after the loop over blocks: the next tile's copies may overtake the reads of this one."""

    def change(n: Node) -> Nodes:
        body = getattr(n, "body", ())
        return (replace(n, body=body[:-1]),) if body and isinstance(body[-1], Barrier) else (n,)  # type: ignore[type-var]

    return changed(tree.nodes, change)


def moved_place(n: BlockLoop) -> Nodes:
    assert n.place is not None
    starts = any(isinstance(x, StartCopies) for x in n.body)
    return (replace(n, place=add(n.place, const(1))),) if not starts else (n,)


def one_block_less_ahead(n: If) -> Nodes:
    """Copies of the block that comes next take the place of the one that is read."""
    return tuple(replace(b, begin=add(b.begin, const(32)), place=b.place) for b in n.body if isinstance(b, BlockLoop))


def copies_first(n: For) -> Nodes:
    """The copies of the loop are started before its barrier."""
    if not any(isinstance(x, AwaitCopies) for x in n.body):
        return (n,)
    order = sorted(n.body, key=lambda x: not isinstance(x, If))
    return (replace(n, body=tuple(order)),)


WRONG_TREES: dict[str, tuple[Callable[[Tree], Nodes], str]] = {
    "waits for a set too few": (
        but(AwaitCopies, lambda n: (replace(n, pending=n.pending + 1),)),
        "waited for before it is read",
    ),
    "no wait": (but(AwaitCopies, lambda n: ()), "waited for before it is read"),
    "no barrier": (but(Barrier, lambda n: ()), "a barrier lies between"),
    "no barrier after the last block": (last_barrier_left_out, "nobody reads where a block is written"),
    "no sets": (but(CommitCopies, lambda n: ()), "waited for before it is read"),
    "a read of another place": (but(BlockLoop, moved_place), "what is read is the block around"),
    "a copy of another block": (but(If, one_block_less_ahead), "what is read is the block around"),
    "copies before the barrier": (but(For, copies_first), "nobody reads where a block is written"),
}


@pytest.mark.parametrize("name", WRONG_TREES)
def test_the_spec_of_trees_refuses(name: str) -> None:
    change, rule = WRONG_TREES[name]
    ast = gemm(128, 64, 160, "NN", HALF)
    tree = prepare(ast, GPU).tree()
    verify(tree)
    wrong = replace(tree, nodes=change(tree))
    assert wrong.nodes != tree.nodes
    with pytest.raises(AssertionError, match=rule):
        ring.verify(wrong)


# *** the emulator ***


def replaced(pattern: str, text: str, count: int = 0) -> Callable[[str], str]:
    return lambda ptx: re.sub(pattern, text, ptx, count=count)


PLANTED: dict[str, tuple[Callable[[str], str], str]] = {
    "a wait for a set too few": (
        lambda ptx: re.sub(r"wait_group \t(\d+)", lambda m: f"wait_group \t{int(m.group(1)) + 1}", ptx),
        "on its way",
    ),
    "no wait": (replaced(r"\tcp\.async\.wait_group[^\n]*\n", ""), "on its way|nobody has waited"),
    "no sets": (replaced(r"\tcp\.async\.commit_group[^\n]*\n", ""), "on its way"),
    "no barrier": (replaced(r"\tbarrier[^\n]*\n", ""), "race"),
    "no barrier before a block is read": (
        lambda ptx: re.sub(r"(wait_group[^\n]*\n)\tbarrier[^\n]*\n", r"\1", ptx),
        "race",
    ),
    "no barrier after the last block": (
        lambda ptx: re.sub(r"(wait_group[^\n]*\n\tbarrier[^\n]*\n)|\tbarrier[^\n]*\n", lambda m: m.group(1) or "", ptx),
        "race",
    ),
    "a copy to another place": (replaced(r"(cp\.async\.cg\.shared\.global \[%r\w*)(?:\+\d+)?\]", r"\1+64]"), ""),
    "a copy of other elements": (
        replaced(r"(cp\.async\.cg\.shared\.global \[[^\]]*\], \[%rd\d+)(?:\+-?\d+)?\]", r"\1+32]", 1),
        "",
    ),
    "an address that is no multiple": (
        replaced(r"(cp\.async\.cg\.shared\.global \[[^\]]*\], \[%rd\d+)(?:\+-?\d+)?\]", r"\1+8]", 1),
        "no multiple of 16",
    ),
    "what is beyond is not zero": (replaced(r"(cp\.async[^\n]*16), %r\d+;", r"\1;"), ""),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_error_is_noticed(name: str) -> None:
    change, message = PLANTED[name]
    sizes = (128, 64, 136)
    ast, arrays = gemm(*sizes, "NT", HALF), arrays_of(sizes, HALF)
    want = run(ast, [a.copy() for a in arrays])[0].astype(np.float32)
    right = result(ast, arrays, None, machine=GPU, per=2).astype(np.float32)
    np.testing.assert_allclose(right, want, rtol=2.0**-6, atol=2.0**-6)
    try:
        got = result(ast, arrays, None, change, GPU, per=2).astype(np.float32)
    except Fault as fault:
        assert re.search(message, str(fault)), fault
        return
    assert not message and not np.allclose(got, want, rtol=2.0**-6, atol=2.0**-6)


COPY = """.visible .entry kernel(.param .u64 to, .param .u64 from) .reqntid 2, 1, 1 {
    .reg .b64 %rd<8>; .reg .b32 %r<8>;
    .shared .align 16 .b8 room[32];
    ld.param.b64 %rd1, [to]; ld.param.b64 %rd2, [from];
    mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 16; add.s64 %rd4, %rd2, %rd3;
    mov.b64 %rd5, room; add.s64 %rd6, %rd5, %rd3; add.s64 %rd7, %rd1, %rd3;
    BODY
    st.global.b32 [%rd7], %r2; ret; }"""
START = "cp.async.cg.shared.global [%rd6], [%rd4], 16;"
BODIES: dict[str, tuple[str, str | list[int]]] = {
    "waited for": (f"{START} cp.async.commit_group; cp.async.wait_group 0; ld.shared.b32 %r2, [%rd6];", [7, 7]),
    "all of it": (f"{START} cp.async.wait_all; ld.shared.b32 %r2, [%rd6];", [7, 7]),
    "read when the wait comes": (
        f"{START} cp.async.commit_group; st.global.b32 [%rd4], %r1; cp.async.wait_group 0; ld.shared.b32 %r2, [%rd6];",
        [0, 1],
    ),
    "zeros beyond what is read": (
        "mov.b32 %r3, 0; cp.async.cg.shared.global [%rd6], [%rd4], 16, %r3;"
        " cp.async.wait_all; ld.shared.b32 %r2, [%rd6];",
        [0, 0],
    ),
    "no set": (f"{START} cp.async.wait_group 0; ld.shared.b32 %r2, [%rd6];", "on its way"),
    "another set": (
        f"{START} cp.async.commit_group; cp.async.wait_group 1; ld.shared.b32 %r2, [%rd6];",
        "on its way",
    ),
    "written meanwhile": (f"{START} st.shared.b32 [%rd6], %r1; mov.b32 %r2, 0;", "on its way"),
    "the neighbour's, without a barrier": (
        f"{START} cp.async.wait_all; xor.b32 %r4, %r1, 1; mul.wide.u32 %rd3, %r4, 16; add.s64 %rd6, %rd5, %rd3;"
        " ld.shared.b32 %r2, [%rd6];",
        "race",
    ),
    "two threads to one place": ("cp.async.cg.shared.global [%rd5], [%rd4], 16; mov.b32 %r2, 0;", "same place"),
    "never waited for": (f"{START} cp.async.commit_group; mov.b32 %r2, 0;", "nobody has waited"),
    "4 bytes past the cache": ("cp.async.cg.shared.global [%rd6], [%rd4], 4; mov.b32 %r2, 0;", "copies of 4 bytes"),
    "outside": ("cp.async.cg.shared.global [%rd6], [%rd4+4096], 16; mov.b32 %r2, 0;", "in no block"),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_copy_happens_as_late_as_it_may(name: str) -> None:
    body, expected = BODIES[name]
    memory = DeviceMemory(1 << 16)
    places = [memory.alloc(32), memory.alloc(32)]
    memory.view(places[1], 32)[:] = np.full(8, 7, np.int32).view(np.uint8)
    words: Sequence[bytes] = [p.to_bytes(8, "little") for p in places]
    module = parsed(COPY.replace("BODY", body))
    if isinstance(expected, str):
        with pytest.raises(Fault, match=expected):
            launch(module, memory, (1, 1, 1), (2, 1, 1), words)
        return
    launch(module, memory, (1, 1, 1), (2, 1, 1), words)
    assert memory.view(places[0], 32).view(np.int32)[::4].tolist() == expected


@emulated
def test_products_of_tensors_are_copied_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are called, forward and backward."""
    found = made_ptx(monkeypatch)
    (a, x), (b, y) = factor(192, 96, False, HALF), factor(96, 160, True, HALF)
    np.testing.assert_allclose((a @ b).float().numpy(), x @ y, rtol=2.0**-7, atol=2.0**-7)
    c, d = (Tensor(RNG.standard_normal((256, 256)).astype(np.float32), device="CUDA:0").realize() for _ in range(2))
    c.requires_grad = d.requires_grad = True
    (c @ d).square().sum().backward()
    assert c.grad is not None and d.grad is not None
    left, right = c.numpy().astype(np.float64), d.numpy().astype(np.float64)
    np.testing.assert_allclose(c.grad.numpy(), 2 * left @ right @ right.T, rtol=1e-3, atol=0.1)
    np.testing.assert_allclose(d.grad.numpy(), 2 * left.T @ left @ right, rtol=1e-3, atol=0.1)
    assert not found or all("cp.async" in text for text in found if "mma.sync" in text or "fma.rn.f32" in text)
