"""Every operator's cases (tests/tensor/cases/) on manygrad and on torch: shapes, types, values and gradients.

pip install torch==2.13.0 hypothesis      # CPU build; for this comparison only
python benchmarks/ops_vs_torch.py                    # all: a table and a summary; exit code 1 where they differ
python benchmarks/ops_vs_torch.py cumsum interpolate # those whose name holds one of the words
python benchmarks/ops_vs_torch.py --names            # writes docs/torch_names.txt again
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))

from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import tests.tensor.cases  # noqa: E402
from manygrad import Tensor, nn  # noqa: E402
from tests.tensor.cases.case import Case, Library  # noqa: E402

EXAMPLES = 6
REFUSALS = (RuntimeError, TypeError, NotImplementedError, IndexError, ValueError, AttributeError)
KNOWN = {  # where torch's gradient is another one, and why ours stands: tests hold it against finite differences
    "Tensor.ldexp": "torch's gradient is 0 where a whole exponent is negative",
    "Tensor.scatter_reduce": "torch's gradient of a product is not right where several factors are 0",
    "functional.ctc_loss": "torch's gradient holds for the output of log_softmax only",
    "Tensor.cholesky_inverse": "torch's gradient also has a part above the diagonal, which is not read",
    "Tensor.cholesky_solve": "torch's gradient also has a part above the diagonal, which is not read",
    "Tensor.as_strided_scatter": "torch's gradient counts overwritten elements where the view overlaps itself",
}
TOLERANCE = (
    2e-4  # of float32 results, relative to 1 or to the largest value; gradients of short normalised rows lose most
)


@dataclass
class Row:
    case: Case
    runs: int = 0
    refused: int = 0  # inputs that torch does not take
    forward: float = 0.0
    backward: float = 0.0
    problems: list[str] = field(default_factory=list)


def flat(x: Any) -> list[Any]:
    return [z for y in x for z in flat(y)] if isinstance(x, (tuple, list)) else [x]


def deviation(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference, relative to 1 or to the largest finite value;
    inf where one is NaN or infinite and the other not."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.size == 0:
        return 0.0
    special = ~np.isfinite(a) | ~np.isfinite(b)
    if not np.array_equal(a[special], b[special], equal_nan=True):
        return float("inf")
    a, b = a[~special], b[~special]
    return float((np.abs(a - b) / max(1.0, float(np.abs(b).max()))).max()) if a.size else 0.0


def compare(case: Case) -> Row:
    import torch

    row = Row(case)
    ours, theirs = Library("manygrad", Tensor, nn.functional), Library("torch", torch, torch.nn.functional)

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def trial(data: st.DataObject) -> None:
        sample = case.samples(data.draw)
        arrays = [a.astype(np.float32) if a.dtype.kind == "f" else a for a in sample.arrays]
        floats = [i for i, a in enumerate(arrays) if a.dtype.kind == "f" and case.grad]
        # torch differentiates some by their first argument only, some not at all
        for trained in (floats, floats[:1], []):
            peers = [torch.tensor(a, requires_grad=i in trained) for i, a in enumerate(arrays)]
            try:
                wants = flat(case.run(theirs, peers, sample))
                break
            except REFUSALS:
                continue
        else:
            row.refused += 1
            return
        row.runs += 1
        tensors = [Tensor(a, requires_grad=i in trained) for i, a in enumerate(arrays)]
        gots = flat(case.run(ours, tensors, sample))
        if len(gots) != len(wants):
            row.problems.append(f"{len(gots)} results, torch {len(wants)}")
            return
        total, peer_total = None, None
        for got, want in zip(gots, wants):
            if not isinstance(want, torch.Tensor):
                if got != want:
                    row.problems.append(f"{got}, torch {want}")
                continue
            if tuple(got.shape) != tuple(want.shape) or got.dtype.name != str(want.dtype).removeprefix("torch."):
                row.problems.append(f"{tuple(got.shape)} {got.dtype.name}, torch {tuple(want.shape)} {want.dtype}")
                return
            row.forward = max(row.forward, deviation(got.numpy(), want.detach().numpy()))
            if want.requires_grad and want.dtype.is_floating_point:
                weight = np.random.default_rng(0).uniform(0.5, 1.5, want.shape).astype(np.float32)
                total = (got * Tensor(weight)).sum() if total is None else total + (got * Tensor(weight)).sum()
                part = (want * torch.tensor(weight)).sum()
                peer_total = part if peer_total is None else peer_total + part
        if peer_total is not None:
            try:
                peer_total.backward()
            except RuntimeError:  # torch has none for this input
                row.refused += 1
                return
            for i, g in zip(trained, total.gradient(*(tensors[i] for i in trained))):
                want = peers[i].grad
                row.backward = max(
                    row.backward, deviation(g.numpy(), np.zeros(g.shape) if want is None else want.numpy(force=True))
                )

    try:
        trial()
    except Exception as error:
        row.problems.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    if case.op in KNOWN:
        row.backward = 0.0
    if max(row.forward, row.backward) > case.rtol.get("float32", TOLERANCE):
        row.problems.append("values differ")
    return row


def write_names() -> None:
    """docs/torch_names.txt from the installed torch."""
    import torch

    helpers = {
        "Optional",
        "assert_int_or_pair",
        "boolean_dispatch",
        "handle_torch_function",
        "has_torch_function",
        "has_torch_function_unary",
        "has_torch_function_variadic",
    }
    f, modules = torch.nn.functional, torch.nn
    sections = {
        "Tensor": dir(torch.Tensor),
        "nn.functional": [
            n for n in dir(f) if callable(getattr(f, n)) and not inspect.isclass(getattr(f, n)) and n not in helpers
        ],
        "nn": [n for n in dir(modules) if inspect.isclass(getattr(modules, n))],
    }
    with open(os.path.join(os.path.dirname(HERE), "docs", "torch_names.txt"), "w") as out:
        out.write(
            f"# Names of torch {torch.__version__.split('+')[0]} that docs/ops.md lists; "
            "written by benchmarks/ops_vs_torch.py --names.\n"
        )
        for section, names in sections.items():
            out.write(
                f"[{section}]\n" + "".join(f"{n}\n" for n in sorted(names, key=str.lower) if not n.startswith("_"))
            )


def main(words: list[str]) -> int:
    cases = [
        case
        for module in pkgutil.iter_modules(tests.tensor.cases.__path__)
        for case in getattr(importlib.import_module(f"tests.tensor.cases.{module.name}"), "CASES", [])
        if not words or any(w in case.name for w in words)
    ]
    if importlib.util.find_spec("torch") is None:
        print(
            f"{len({c.op for c in cases})} operators in {len(cases)} cases "
            f"({', '.join(sorted({c.op for c in cases})[:3])}, ...); torch is not installed, "
            "there is nothing to compare them with"
        )
        return 0
    print(f"{'operator':<58} {'runs':>4} {'refused':>7} {'forward':>9} {'backward':>9}")
    rows = []
    for case in cases:
        row = compare(case)
        rows.append(row)
        state = (
            KNOWN.get(case.op, "")
            or "; ".join(dict.fromkeys(row.problems))
            or ("" if row.runs else "torch takes none of these inputs")
        )
        print(
            f"{case.name:<58} {row.runs:>4} {row.refused:>7} {row.forward:>9.1e} {row.backward:>9.1e}  {state[:110]}",
            flush=True,
        )
    compared = [r for r in rows if r.runs]
    good = [r for r in compared if not r.problems]
    print(
        f"\n{len({r.case.op for r in good})} operators ({len(good)} cases) agree with torch, "
        f"{len(compared) - len(good)} cases differ, {len(rows) - len(compared)} could not be compared"
    )
    return 0 if len(good) == len(compared) else 1


if __name__ == "__main__":
    if sys.argv[1:] == ["--names"]:
        write_names()
    else:
        sys.exit(main(sys.argv[1:]))
