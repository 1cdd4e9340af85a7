"""PyTorch's own database of operators (OpInfo: sample inputs, derivatives, inputs that are errors) run on manygrad.

pip install torch==2.13.0 expecttest      # CPU build; for this comparison only
python benchmarks/opinfo.py                          # all; exit code 1 where a value is wrong
python benchmarks/opinfo.py cumsum norm              # operators whose name holds one of the words
python benchmarks/opinfo.py --checks float64 second  # some of: a dtype, first, second, errors
python benchmarks/opinfo.py --samples 30 --part 0/2  # inputs an operator and check; every second operator

A row says for each check how many inputs agree with torch, and below it each that does not: *wrong* where a value, a
shape or a type differs or an error is no message to the user, *taken* where torch refuses the input and manygrad gives
a value. What manygrad refuses is counted only: an error says so. Complex, sparse, quantised and nested tensors and what
is drawn at random are set aside.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import operator
import os
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(os.path.dirname(HERE)))

from manygrad import Tensor, dtypes, linalg, nn, special  # noqa: E402

KINDS = ("float32", "float64", "int64", "bool", "bfloat16", "float16")
CHECKS = (*KINDS, "first", "second", "errors")
TOLERANCE = {"float32": 2e-5, "float64": 1e-9, "bfloat16": 1e-2, "float16": 2e-3, "first": 1e-6, "second": 1e-5}
LOOSE = {  # where torch rounds on the way and manygrad does not
    ("nn.functional.grid_sample", "bfloat16"): 2e-2,  # (each of the 16 terms of bicubic)
    ("nn.functional.multi_head_attention_forward", "bfloat16"): 2e-2,  # (each of its products)
    ("nn.functional.nll_loss", "bfloat16"): 2e-2,  # (each addition of the sum)
    ("nn.functional.nll_loss", "float16"): 5e-3,
    ("logspace", "bfloat16"): 2e-2,  # (the exponents at its ends)
    ("cov", "float64"): 1e-4,  # (sums of float32 weights, of which the difference to `correction` is taken)
    ("cov", "first"): 1e-4,
}
SET_ASIDE = re.compile(  # complex, sparse, quantised; strides; drawn at random; parts of torch's own kernels
    r"sparse\..*|fft\..*|masked\..*|signal\..*|torch\.ops\..*|jiterator.*|"
    r"_(segment|chunk|unsafe|upsample|native|softmax_backward|batch_norm).*|(to_sparse|istft|stft|complex|real|imag|view_as_.*)|"
    r"(polar|sgn|conj.*|resolve_.*|chalf|cfloat|cdouble|native_.*|resize_.*|(new_)?empty.*|item|broadcast_shapes)|"
    r"(uniform|normal|log_normal|rand.*|bernoulli|multinomial|exponential|cauchy|geometric|svd_lowrank|pca_lowrank)|"
    r"nn\.functional\.(.*dropout.*|rrelu|fractional_max_pool.*)"
)
OTHER_NAMES = {"special.expit": "sigmoid", "special.psi": "digamma", "special.gammaln": "lgamma"}
CALLS = {  # what the samples of a name are for, where that is no method's arguments
    "where": lambda x, condition, other: x.where(condition, other),
    "__getitem__": lambda x, key: x[key],
    **{name: operator.attrgetter(name) for name in ("T", "H", "mT", "mH")},
    "nn.functional.embedding": lambda weight, at, **named: nn.functional.embedding(at, weight, **named),
    "nn.functional.embedding_bag": lambda weight, at, **named: nn.functional.embedding_bag(at, weight, **named),
    "linalg.pinv.singular": lambda a, b: linalg.pinv(a @ b.mT),
    "linalg.lstsq.grad_oriented": lambda a, b, driver: linalg.lstsq(a, b, driver=driver)[:2],
}
NOT_RUN = (
    "gradient",  # (is of derivatives here)
    "linalg.norm.subgradients_at_zero",  # (torch's second derivative at 0 is NaN, ours 0)
    "nn.functional.triplet_margin_with_distance_loss",  # (its samples hold a torch module)
    "as_strided.partial_views",
)
STATIC = ("arange", "linspace", "logspace", "eye", "cat", "stack", "einsum", "block_diag", "cartesian_prod", "meshgrid")
# where torch's value or gradient is another one, and why ours stands
KNOWN = {
    ("as_strided_scatter", "first"): "torch's fails its own gradcheck where the view overlaps itself or covers all",
    ("nn.functional.soft_margin_loss", "float16"): "torch's overflows",
    ("nn.functional.local_response_norm", "int64"): "torch takes the mean of squares without its fraction",
    **{(name, kind): "which of equal values an index names is open"
       for name in ("kthvalue", "topk", "sort", "argsort", "msort", "median", "mode")
       for kind in ("int64", "bool", "bfloat16", "float16", "float32")},
}  # fmt: skip


# inputs that torch refuses and manygrad takes, by operator and torch's words, and why
TAKEN = {
    ("cov", "cannot be negative"): "the covariance is NaN then: weights are not read back",
    ("conv", "should be the same"): "types are promoted, as elsewhere",
    ("multilabel_margin_loss", "non-empty vector"): "the loss of no elements is that of an empty mean, or 0",
    ("max_pool", "optional 0 dim batch size"): "no channels give no values",
    ("max_pool", "positive length"): "no channels give no values",
}


@dataclass
class Outcome:
    """Of one operator and check: how many inputs agree, are refused here, and what is wrong."""

    good: int = 0
    refused: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def find(op: Any) -> Any:
    """The function here that has the operator's name, or None."""
    name = op.name
    if name_of(op) in CALLS or name in CALLS:
        return CALLS.get(name_of(op)) or CALLS[name]
    space, _, short = name.rpartition(".")
    if space == "nn.functional":
        return getattr(nn.functional, short, None)
    if space == "linalg":
        return getattr(linalg, short, None)
    if space == "special" and hasattr(special, short):
        return getattr(special, short) if short != "polygamma" else Tensor.polygamma
    return getattr(Tensor, OTHER_NAMES.get(name, short), None) if space in ("", "special") else None


def ours(x: Any, leaves: list[Tensor] | None = None) -> Any:
    """A torch input as one of manygrad's; tensors that require a gradient are noted in `leaves`."""
    import torch

    if isinstance(x, torch.Tensor):
        if x.dtype is torch.bfloat16:
            t = Tensor(x.detach().float().numpy()).cast("bfloat16")
        else:
            t = Tensor(np.array(x.detach().resolve_conj().numpy()))
        if leaves is not None and x.requires_grad:
            t = t.realize() if t.numel() else t
            t.requires_grad = True
            leaves.append(t)
        return t
    if isinstance(x, (list, tuple)):
        made = [ours(y, leaves) for y in x]
        return type(x)(made) if type(x) in (list, tuple, torch.Size) else tuple(made)
    if isinstance(x, dict):
        return {k: ours(v, leaves) for k, v in x.items()}
    if isinstance(x, torch.dtype):
        return getattr(dtypes, str(x).removeprefix("torch."))
    if isinstance(x, torch.device):
        return None
    return x


def tensors(x: Any) -> list[Any]:
    """The tensors of a torch input, in the order in which `ours` notes them."""
    import torch

    if isinstance(x, torch.Tensor):
        return [x]
    return [t for y in (x.values() if isinstance(x, dict) else x) for t in tensors(y)] if isinstance(
        x, (list, tuple, dict)
    ) else []  # fmt: skip


def flat(x: Any) -> list[Any]:
    return [z for y in x for z in flat(y)] if isinstance(x, (tuple, list)) else [x]


def array(x: Any) -> np.ndarray:
    if isinstance(x, Tensor):
        return (x.float() if x.dtype in (dtypes.bfloat16, *dtypes.fp8s) else x).numpy()
    return (x.detach().float() if str(x.dtype) == "torch.bfloat16" else x.detach()).resolve_neg().numpy()


def difference(got: Any, want: Any, tolerance: float, exact_type: bool = True) -> str:
    """What differs between a result here and torch's; nothing: ""."""
    if not hasattr(want, "dtype"):
        value = got.item() if isinstance(got, Tensor) else got
        return "" if value == want or (value != value and want != want) else f"{value}, torch {want}"
    if not isinstance(got, Tensor):
        return f"{type(got).__name__}, torch a tensor"
    if tuple(got.shape) != tuple(want.shape):
        return f"shape {tuple(got.shape)}, torch {tuple(want.shape)}"
    if exact_type and got.dtype.name != str(want.dtype).removeprefix("torch."):
        return f"{got.dtype.name}, torch {want.dtype}"
    a, b = array(got), array(want)
    if a.dtype.kind not in "f" or b.dtype.kind not in "f":
        return "" if np.array_equal(a, b) else f"{short(a)}, torch {short(b)}"
    a, b = a.astype(np.float64), b.astype(np.float64)
    special = ~np.isfinite(a) | ~np.isfinite(b)
    if not np.array_equal(a[special], b[special], equal_nan=True):
        at = np.flatnonzero(special & ~((a == b) | (np.isnan(a) & np.isnan(b))))[0]
        return f"{a.flat[at]} at {at}, torch {b.flat[at]}"
    a, b = a[~special], b[~special]
    if not a.size:
        return ""
    gap = np.abs(a - b) / max(1.0, float(np.abs(b).max()))
    at = int(gap.argmax())
    return "" if gap[at] <= tolerance else f"{a[at]:.6g}, torch {b[at]:.6g} (off by {gap[at]:.1e})"


def short(a: np.ndarray) -> str:
    return " ".join(str(a.reshape(-1)[:8]).split())


def told(error: Exception) -> str:
    first = str(error).splitlines()[0] if str(error) else ""
    return f"{type(error).__name__}: {first}"


def describe(sample: Any) -> str:
    def text(x: Any) -> str:
        if hasattr(x, "dtype") and hasattr(x, "shape"):
            return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" + (
                f"={short(array(x))}" if x.numel() == 1 else ""
            )
        if isinstance(x, (list, tuple)):
            return "(" + ", ".join(map(text, x)) + ")"
        return str(x)

    parts = [text(sample.input), *map(text, sample.args), *(f"{k}={text(v)}" for k, v in sample.kwargs.items())]
    return ", ".join(parts)[:160]


def same(results: list[Any], wants: list[Any], tolerance: float) -> str:
    if len(results) != len(wants):
        return f"{len(results)} results, torch {len(wants)}"
    return next((d for g, w in zip(results, wants) if (d := difference(g, w, tolerance))), "")


def processed(sample: Any, result: Any) -> Any:
    """Of results that are not unique what is (OpInfo knows)."""
    return sample.output_process_fn_grad(result) if sample.output_process_fn_grad is not None else result


def values(op: Any, here: Any, sample: Any, kind: str) -> str:
    want = flat(processed(sample, op(sample.input, *sample.args, **sample.kwargs)))
    got = flat(processed(sample, here(ours(sample.input), *ours(sample.args), **ours(sample.kwargs))))
    return same(got, want, LOOSE.get((op.name, kind), TOLERANCE.get(kind, TOLERANCE["float32"])))


def derivatives(op: Any, here: Any, sample: Any, second: bool) -> str | None:
    """None: torch has none. What holds for some inputs only (symmetric ones, triangles, logarithms of probabilities) is
    derived through a function which makes such ones, as in torch's own tests (`gradcheck_wrapper`)."""
    import torch

    def wrapped(f: Any) -> Any:
        if op.name == "cholesky_inverse":  # (torch's wrapper calls torch's functions)
            return lambda x, upper=False: f(x.triu() if upper else x.tril(), upper=upper)
        return lambda *args, **kwargs: op.gradcheck_wrapper(f, *args, **kwargs)

    rng = np.random.default_rng(0)
    inputs = [t for t in tensors([sample.input, list(sample.args), sample.kwargs]) if t.requires_grad]
    want = [
        t for t in flat(processed(sample, wrapped(op)(sample.input, *sample.args, **sample.kwargs)))
        if isinstance(t, torch.Tensor) and t.requires_grad and t.dtype.is_floating_point
    ]  # fmt: skip
    if not inputs or not want:
        return None
    weights = [rng.uniform(0.5, 1.5, tuple(t.shape)) for t in want]
    total = sum((w * torch.tensor(k)).sum() for w, k in zip(want, weights))
    slopes = torch.autograd.grad(total, inputs, create_graph=second, allow_unused=True)
    pushes = [rng.uniform(0.5, 1.5, tuple(t.shape)) for t in inputs]
    if second:
        parts = [(g * torch.tensor(p)).sum() for g, p in zip(slopes, pushes) if g is not None and g.requires_grad]
        if not parts:
            return None
        slopes = torch.autograd.grad(sum(parts), inputs, allow_unused=True)
    leaves: list[Tensor] = []
    made = (ours(sample.input, leaves), ours(sample.args, leaves), ours(sample.kwargs, leaves))
    result = flat(processed(sample, wrapped(here)(made[0], *made[1], **made[2])))
    got = [t for t in result if isinstance(t, Tensor) and t.dtype.is_float and t.requires_grad]
    if len(got) != len(want):
        return f"{len(got)} results with a gradient, torch {len(want)}"
    outcome = sum(((t * Tensor(k)).sum() for t, k in zip(got, weights)), Tensor(0.0, dtype="float64"))
    mine = outcome.gradient(*leaves)
    if second:
        inner = sum(((g * Tensor(p)).sum() for g, p in zip(mine, pushes)), Tensor(0.0, dtype="float64"))
        mine = inner.gradient(*leaves)
    slopes = [torch.zeros_like(t) if g is None or g._is_zerotensor() else g for g, t in zip(slopes, inputs)]
    check = "second" if second else "first"
    return same(mine, slopes, LOOSE.get((op.name, check), TOLERANCE[check]))


def samples_of(op: Any, check: str, limit: int) -> Iterator[Any]:
    """At most `limit` sample inputs, from all over the list that torch has."""
    import torch

    derivative = check in ("first", "second")
    kind = torch.float64 if derivative else getattr(torch, check)
    found = list(op.sample_inputs("cpu", kind, requires_grad=derivative))
    step = max(1, len(found) / limit)
    yield from (found[int(i * step)] for i in range(min(limit, len(found))))


def run(op: Any, here: Any, check: str, limit: int) -> Outcome | None:
    """None: torch does not have the operator in this type."""
    import torch

    out = Outcome()
    if check == "errors":
        if op.error_inputs_func is None:
            return None
        for bad in op.error_inputs("cpu"):
            s = bad.sample_input
            if not isinstance(s.input, torch.Tensor) and op.name not in STATIC:  # (no method of ours)
                continue
            if any(name in op.name and words in str(bad.error_regex) for name, words in TAKEN):
                continue
            if not bad.error_regex and any(isinstance(a, (bool, int, float)) for a in s.args):
                continue  # (torch's functions of two tensors take no number; ours do)
            try:
                op(s.input, *s.args, **s.kwargs)
                continue
            except Exception:  # (torch refuses it, as it says)
                pass
            try:
                for r in flat(here(ours(s.input), *ours(s.args), **ours(s.kwargs))):
                    if isinstance(r, Tensor):
                        r.numpy()
                out.wrong.append(f"taken: {describe(s)}; torch: {str(bad.error_regex)[:80]}")
            except (ValueError, TypeError, IndexError, RuntimeError):  # (NotImplementedError is one of the last)
                out.good += 1
            except Exception as error:  # no refusal: it failed inside
                out.wrong.append(f"failed inside ({type(error).__name__}: {error}): {describe(s)}")
        return out
    kind = "float64" if check in ("first", "second") else check
    if getattr(torch, kind) not in op.dtypes or (kind != check and not op.supports_autograd):
        return None
    if (check == "second" and not op.supports_gradgrad) or (op.name, check) in KNOWN:
        return None
    for sample in samples_of(op, check, limit):
        given = tensors([sample.input, list(sample.args), sample.kwargs])
        drawn = "attention" in op.name and (sample.kwargs.get("dropout_p") or sample.kwargs.get("training"))
        if drawn or any(t.is_sparse or t.is_complex() for t in given):
            continue
        try:
            differs = (
                values(op, here, sample, check) if kind == check else derivatives(op, here, sample, check == "second")
            )
        except (AssertionError, AttributeError, IndexError, KeyError, ZeroDivisionError) as error:  # no refusal
            out.wrong.append(f"{describe(sample)}: failed inside ({told(error)})")
            continue
        except Exception as error:
            out.refused[told(error)] += 1
            continue
        if differs is None:
            continue
        if differs:
            out.wrong.append(f"{describe(sample)}: {differs}")
        else:
            out.good += 1
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--checks", nargs="+", default=CHECKS, choices=CHECKS)
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--refusals", action="store_true", help="list what is refused here, too")
    arguments = parser.parse_args()
    if importlib.util.find_spec("torch") is None:
        print("torch is not installed, there is nothing to compare with")
        return 0
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

    part, parts = map(int, arguments.part.split("/"))
    chosen = [
        op for op in op_db
        if not SET_ASIDE.fullmatch(op.name)
        and name_of(op) not in NOT_RUN
        and (not arguments.words or any(w in op.name for w in arguments.words))
    ]  # fmt: skip
    absent, wrong, good, refused = [], 0, 0, 0
    for op in chosen[part::parts]:
        here = find(op)
        if here is None:
            absent.append(op.name)
            continue
        cells, lines = [], []
        for check in arguments.checks:
            outcome = run(op, here, check, arguments.samples)
            if outcome is None:
                continue
            good, wrong, refused = good + outcome.good, wrong + len(outcome.wrong), refused + sum(
                outcome.refused.values()
            )  # fmt: skip
            cells.append(f"{check} {outcome.good}" + (f"+{n} refused" if (n := sum(outcome.refused.values())) else ""))
            lines += [f"    {check}: {line}" for line in outcome.wrong]
            if arguments.refusals:
                lines += [f"    {check}: {n} refused: {why[:200]}" for why, n in outcome.refused.items()]
        print("\n".join([f"{name_of(op):<48} {', '.join(cells)}", *lines]), flush=True)
    print(f"\nNot here: {', '.join(dict.fromkeys(absent))}")
    print(f"{good} inputs agree, {refused} are refused here, {wrong} are wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
