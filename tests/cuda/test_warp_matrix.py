"""Products by matrix instructions of warps (mma), on a GPU where there is one, else in the emulator: every layout and
type, sizes around tiles, what follows a product in the same kernel, the same bits however a batch is cut, and that
errors are noticed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from manygrad import Tensor, dtypes
from manygrad.nn import functional as F
from manygrad.runtime.codegen.cost import LEAST_DOT_TERMS
from manygrad.runtime.codegen.opts import legal, named, sums
from manygrad.runtime.codegen.pipeline import prepare, signature
from manygrad.runtime.codegen.render.llvm.nvptx import NVPTXTarget, render
from manygrad.runtime.codegen.target import WARP_DOTS, Machine
from manygrad.runtime.devices import get_device
from manygrad.runtime.devices.cuda import kernel as cuda_kernel
from manygrad.runtime.devices.cuda.ptx import ptx_of
from manygrad.tensor.dtype import DType
from manygrad.tensor.uop.uop import UOp
from tests.cuda.install import emulated
from tests.cuda.memory import Fault
from tests.cuda.test_emulator import result
from tests.runtime.codegen.kernels import gemm, run

RNG = np.random.default_rng(0)
MACHINE = Machine(16, 32, cores=4, group_items=1024, shared_bytes=48 << 10, warp_items=32, dots=WARP_DOTS)
# rows, columns, terms: whole tiles; one less and one more than tiles, vectors and blocks of the reduction; tiny
SIZES = [
    (64, 64, 64), (128, 128, 96), (256, 64, 32), (63, 65, 64), (65, 63, 33), (7, 9, 40), (33, 10, 31), (2, 130, 66),
    (130, 2, 72), (255, 2, 16), (16, 16, 48), (40, 24, 1000), (31, 32, 8),
]  # fmt: skip
LAYOUTS = ("NN", "NT", "TN", "TT")


def factor(rows: int, columns: int, turned: bool, dtype: DType, device: str = "CUDA:0") -> tuple[Tensor, np.ndarray]:
    """A factor that lies as it is or transposed, and its numbers."""
    numbers = RNG.standard_normal((columns, rows) if turned else (rows, columns)).astype(np.float32)
    held = Tensor(numbers).cast(dtype).realize()
    exact = held.float().numpy()
    there = held.to(device).realize()
    return (there.T, exact.T) if turned else (there, exact)


def made_ptx(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The PTX of what is compiled from now on."""
    found, make = list[str](), cuda_kernel.ptx_of
    monkeypatch.setattr(cuda_kernel, "ptx_of", lambda text, arch: found.append(make(text, arch)) or found[-1])
    return found


def opts_of_kernels(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    found: list[object] = []
    make = cuda_kernel.CUDAKernel.__init__
    monkeypatch.setattr(
        cuda_kernel.CUDAKernel, "__init__", lambda self, *a, **k: (make(self, *a, **k), found.append(self.opts))[0]
    )
    return found


@pytest.mark.parametrize("dtype", [dtypes.bfloat16, dtypes.float16])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_are_right(layout: str, sizes: tuple[int, int, int], dtype: DType) -> None:
    m, n, k = sizes
    (a, x), (b, y) = factor(m, k, layout[0] == "T", dtype), factor(k, n, layout[1] == "T", dtype)
    got = (a @ b).float().numpy()
    step = 2.0**-8 if dtype is dtypes.bfloat16 else 2.0**-11
    np.testing.assert_allclose(got, x @ y, rtol=step, atol=step)


EPILOGUES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "bias and gelu": lambda c, bias, other: F.gelu(c + bias),
    "bias, relu and residual": lambda c, bias, other: (c + bias).relu() + other,
    "a mask": lambda c, bias, other: (other > 0).where(c, bias),
    "a wider type": lambda c, bias, other: c.float() * 2,
    "transposed": lambda c, bias, other: (c + other).T.contiguous().T,
    "padded": lambda c, bias, other: c.pad(((1, 2), (3, 1)))[1:-2, 3:-1],
}


@pytest.mark.parametrize("name", EPILOGUES)
@pytest.mark.parametrize("sizes", [(64, 64, 64), (61, 46, 40)])
def test_what_follows_a_product_is_in_its_kernel(
    name: str, sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    m, n, k = sizes
    (a, x), (b, y) = factor(m, k, False, dtypes.bfloat16), factor(k, n, True, dtypes.bfloat16)
    (bias, u), (other, v) = factor(1, n, False, dtypes.bfloat16), factor(m, n, False, dtypes.bfloat16)
    found = made_ptx(monkeypatch)
    got = EPILOGUES[name](a @ b, bias, other).float().numpy()
    assert not found or any("mma.sync" in text for text in found)
    c = Tensor(x @ y)
    want = EPILOGUES[name](c.cast(dtypes.bfloat16), *(Tensor(z).cast(dtypes.bfloat16) for z in (u, v))).float().numpy()
    np.testing.assert_allclose(got, want, rtol=2.0**-6, atol=2.0**-5)


COMPUTED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a row's number": lambda rows, terms: (rows * terms).clip(-2, 2),
    "a term's number": lambda rows, terms: (terms > 0).where(rows, terms),
    "a chunk's": lambda rows, terms: rows.expand(-1, terms.shape[1]) + terms.flip(1),
}


@pytest.mark.parametrize("name", COMPUTED)
@pytest.mark.parametrize("sizes", [(5, 7, 33), (63, 65, 64), (128, 64, 96)])
@pytest.mark.parametrize("left", [True, False])
def test_factors_made_of_numbers_of_rows_and_of_terms(name: str, sizes: tuple[int, int, int], left: bool) -> None:
    """Whole numbers, so the sums are exact: each work item fetches parts of several rows."""
    m, n, k = sizes
    held = [Tensor(RNG.integers(-3, 4, s).astype(np.float32)).cast(dtypes.bfloat16) for s in ((m, 1), (1, k), (k, n))]
    found = []
    for device in ("CPU", "CUDA:0"):
        rows, terms, other = (t.to(device).realize() for t in held)
        x = COMPUTED[name](rows, terms)
        found.append((x @ other if left else other.T @ x.T).float().numpy())
    np.testing.assert_array_equal(found[1], found[0])


def test_a_batch_gives_the_same_bits_however_it_is_cut() -> None:
    (a, _), (b, _) = factor(130, 72, False, dtypes.bfloat16), factor(72, 40, True, dtypes.bfloat16)
    whole = (a @ b).float().numpy()
    for rows in (2, 13, 64, 65):
        parts = [(a[i : i + rows].contiguous() @ b).float().numpy() for i in range(0, 130, rows)]
        assert np.concatenate(parts).tobytes() == whole.tobytes()


def test_products_of_many_matrices_and_gradients() -> None:
    numbers = [RNG.standard_normal(s).astype(np.float32) for s in ((3, 24, 40), (3, 40, 16))]
    held = [Tensor(x).cast(dtypes.bfloat16).realize() for x in numbers]
    there = [t.to("CUDA:0").realize() for t in held]
    for t in (*held, *there):
        t.requires_grad_(True)
    for a, b in (held, there):
        (a @ b).float().square().mean().backward()
    np.testing.assert_allclose(
        (there[0] @ there[1]).float().numpy(), (held[0] @ held[1]).float().numpy(), rtol=2.0**-7, atol=2.0**-7
    )
    for mine, theirs in zip(there, held):
        assert mine.grad is not None and theirs.grad is not None
        np.testing.assert_allclose(mine.grad.float().numpy(), theirs.grad.float().numpy(), rtol=2.0**-5, atol=1e-3)


# *** kernels ***


def halves(ast: UOp, sizes: tuple[int, int, int]) -> list[np.ndarray]:
    m, n, k = sizes
    bf16 = dtypes.bfloat16.np
    return [np.zeros(m * n, bf16), *(RNG.standard_normal(x).astype(bf16) for x in (m * k, k * n))]


def product_kernel(sizes: tuple[int, int, int]) -> UOp:
    return gemm(*sizes, dtype=dtypes.bfloat16)


def test_a_product_is_chosen_to_be_the_warps() -> None:
    for sizes in (s for s in SIZES if s[2] >= LEAST_DOT_TERMS):
        chosen = prepare(product_kernel(sizes), MACHINE).opts
        assert any(o.kind == "warp_matrix" for o in chosen), (sizes, chosen)


WARPS = (
    named("tile", 0, 8), named("vectorize", 1, 4), named("tile", 1, 8), named("unroll", 2, 32), named("parallel", 2),
    named("bind", 0, 8), named("bind", 1, 8), named("warp_matrix", 2),
)  # fmt: skip


def changed(kind: str, *values: int) -> tuple[object, ...]:
    return (*(o for o in WARPS if o.kind != kind), named(kind, *values))


ILLEGAL = {
    "a tile that is no power": ((*WARPS[:2], named("tile", 0, 6), named("tile", 1, 8), *WARPS[3:]), "tile"),
    "no vectors": (tuple(o for o in WARPS if o.kind != "vectorize"), "vectorized loop"),
    "half of a block": (changed("unroll", 2, 16), "32 iterations"),
    "something else is shared": ((*WARPS, named("cache_shared", 2, 1, 32)), "nothing else"),
    "a loop that is not in the grid": ((*WARPS[:4], named("parallel", 1), *WARPS[5:]), "parallel"),
    "half of a warp": ((*WARPS[:5], named("bind", 0, 4), *WARPS[6:]), "8 by 4"),
    "a count of threads that is no power": ((*WARPS[:5], named("bind", 0, 24), *WARPS[6:]), "powers of two"),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_what_a_warp_cannot_multiply(name: str) -> None:
    opts, message = ILLEGAL[name]
    kernel = prepare(product_kernel((128, 64, 64)), MACHINE, WARPS).ast
    assert legal(signature(kernel), WARPS) is None
    assert message in str(legal(signature(kernel), opts))


def test_products_in_lanes_are_other_machines() -> None:
    """The kernel can take them; the printer has no instruction for them here, and the fuzzer of kernels met that."""
    with pytest.raises(ValueError, match="this machine's instructions share them out over a warp"):
        prepare(product_kernel((3, 17, 17)), MACHINE, (named("tensorize", 2, 2),))


def test_the_sums_of_a_warp_are_others() -> None:
    sig = signature(prepare(product_kernel((128, 64, 64)), MACHINE, WARPS).ast)
    assert sums(sig, WARPS) != sums(sig, WARPS[:-1])


def test_a_float32_product_has_no_matrix_instruction() -> None:
    assert "mma" not in ptx_of(render(prepare(gemm(64, 64, 64), MACHINE).program(), NVPTXTarget()), 90)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fragments_are_read_at_once(layout: str) -> None:
    """16 bytes at a time; nothing lies in local memory."""
    kernel = gemm(128, 64, 64, layout, dtypes.bfloat16)
    text = ptx_of(render(prepare(kernel, MACHINE, WARPS).program(), NVPTXTarget()), 90)
    dots, reads = len(re.findall(r"mma\.sync", text)), len(re.findall(r"ld\.shared\.v4\.b32", text))
    assert (dots, reads) == (32, 12) and "ld.shared.b16" not in text and ".local" not in text


PLANTED: dict[str, tuple[Callable[[str], str], str]] = {
    "a barrier is left out": (lambda x: re.sub(r"\tbarrier[^\n]*\n", "", x), "race"),
    "a warp is not there as a whole": (
        lambda x: re.sub(
            r"(\tmma)", r"\tmov.u32 %r1, %tid.x;\n\tsetp.eq.b32 %p1, %r1, 3;\n\t@%p1 ret;\n\1", x, count=1
        ),
        "do not reach together",
    ),
    "two registers of a factor change places": (
        lambda x: re.sub(r"(mma\.sync[^{]*\{[^}]*\},\s*\{)(%r\d+), (%r\d+)", r"\1\3, \2", x),
        "",
    ),
    "a product is left out": (lambda x: re.sub(r"(mma\.sync[^{]*\{[^}]*\},\s*\{)(%r\d+)", r"\g<1>0", x, count=1), ""),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_error_is_noticed(name: str) -> None:
    change, message = PLANTED[name]
    sizes = (128, 64, 96)
    ast, machine = product_kernel(sizes), MACHINE
    arrays = halves(ast, sizes)
    want = run(ast, [a.copy() for a in arrays])[0].astype(np.float32)
    right = result(ast, arrays, WARPS, machine=machine).astype(np.float32)
    np.testing.assert_allclose(right, want, rtol=2.0**-6, atol=2.0**-6)
    try:
        got = result(ast, arrays, WARPS, change, machine).astype(np.float32)
    except Fault as fault:
        assert message and re.search(message, str(fault)), fault
        return
    assert not message and not np.allclose(got, want, rtol=2.0**-6, atol=2.0**-6)


@emulated
def test_the_ptx_is_what_the_page_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/stages/codegen.md walks a product from its AST to PTX."""
    page = (Path(__file__).parents[2] / "docs" / "stages" / "codegen.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```ptx\n(.*?)```", page, re.DOTALL)
    opts = re.findall(r"`((?:[a-z_]+\([\d, ]+\) ?){6,})`", page)
    get_device("CUDA:0").kernels.kernels.clear()
    monkeypatch.setattr(cuda_kernel.STORE, "get", lambda key: None)
    found = made_ptx(monkeypatch)
    made = opts_of_kernels(monkeypatch)
    a, b, bias = (Tensor.ones(*s).cast("bfloat16").to("CUDA:0").realize() for s in ((256, 512), (512, 256), (256,)))
    out = (a @ b + bias).relu().realize()
    (text,) = [p for p in found if "mma.sync" in p]
    for line in shown.splitlines():
        assert re.search(rf"^\s*{re.escape(line.split()[0])}\s", text, re.MULTILINE), line
    reads = [len(re.findall(rf"ld\.shared\.v4\.{word}", text)) for word in ("b32", "b16")]
    assert text.count("mma.sync") == 32 and reads == [8, 8]
    assert opts[0].strip() in [" ".join(map(str, o)) for o in made]  # type: ignore[call-overload]
    assert out[0, 0].item() == 512.0
