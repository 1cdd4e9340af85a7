"""PyTorch's own databases of modules and optimisers on manygrad and on torch: values, gradients, names, errors.

pip install torch==2.13.0 expecttest      # CPU build; for this comparison only
python benchmarks/suites_vs_torch.py                  # all: what differs, a summary; exit code 1 if something does
python benchmarks/suites_vs_torch.py Conv Adam        # those whose name holds one of the words
python benchmarks/suites_vs_torch.py --dtypes float64 # of modules' parameters and inputs
python benchmarks/suites_vs_torch.py --part 0/4       # every fourth case

Modules are made with the database's arguments, take torch's state dict (so names and shapes are compared, too), and run
forward and backward, from random gradients, in training and in evaluation. Optimisers take ten steps of a small problem
in each of the database's configurations, eagerly and as a captured step. What torch refuses has to be refused.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import itertools
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))

if importlib.util.find_spec("torch") is None:
    print("torch is not installed, there is nothing to compare with")
    raise SystemExit(0)

import torch  # noqa: E402
from torch.testing._internal.common_modules import module_db  # noqa: E402
from torch.testing._internal.common_optimizers import optim_db  # noqa: E402

from manygrad import Tensor, TinyJit, nn  # noqa: E402
from manygrad.nn import functional as F  # noqa: E402

TOLERANCE = {"float32": 2e-4, "float64": 1e-7, "bfloat16": 6e-2, "float16": 6e-3}  # relative to 1, or the largest value
HALF = ("bfloat16", "float16")
KNOWN = {  # parts of a case's name: why it is not run, or differs
    "FractionalMaxPool": "draws where it pools",
    "expected scalar type": "manygrad promotes the types of inputs and class weights",
    "input dtype .* does not match": "likewise",
    "CircularPad1d & expected 2D or 3D": "the last dims are padded, however many there are before",
    "Adafactor": "not in manygrad",
    "ASGD": "not in manygrad",
    "LBFGS": "not in manygrad",
    "Rprop": "not in manygrad",
    "SparseAdam": "gradients are dense in manygrad",
    "LPPool & norm": "sums of negative numbers to a power of 1.5 are nan",
    "<class 'complex'>": "there are no complex numbers in manygrad",
    "complex parameters": "there are no complex numbers in manygrad",
    "as a Tensor is not supported for capturable": "how kernels are run changes nothing here",
    "lr as Tensor doesn't work with foreach": "likewise",
    "betas must be either both floats or both Tensors": "manygrad takes either",
}
LOOSE = {"Muon": 3e-3}  # torch orthogonalises in bfloat16


def ours(x: Any) -> Any:
    """torch's arguments as manygrad's."""
    if isinstance(x, torch.Tensor):
        return tensor(x)
    if isinstance(x, torch.dtype):
        return str(x).removeprefix("torch.")
    if isinstance(x, torch.device):
        return None
    if isinstance(x, torch.nn.Module):
        return module_like(x)
    if isinstance(x, (list, tuple)):
        return type(x)(map(ours, x))
    if isinstance(x, dict):
        return {k: ours(v) for k, v in x.items()}
    return getattr(F, x.__name__) if callable(x) and hasattr(F, getattr(x, "__name__", "")) else x


def tensor(x: torch.Tensor) -> Tensor:
    array = x.detach().float().numpy() if x.dtype is torch.bfloat16 else x.detach().numpy()
    return Tensor(array.copy(), dtype=str(x.dtype).removeprefix("torch."), requires_grad=x.requires_grad or None)


def module_like(m: torch.nn.Module) -> Any:
    """A layer that is an argument of another one: what it was made with, read off it."""
    assert isinstance(m, (torch.nn.TransformerEncoderLayer, torch.nn.TransformerDecoderLayer)), type(m)
    return getattr(nn, type(m).__name__)(
        m.linear1.in_features, m.self_attn.num_heads, m.linear1.out_features, m.dropout.p, ours(m.activation),
        m.norm1.eps, m.self_attn.batch_first, m.norm_first, m.linear1.bias is not None,
        dtype=ours(m.linear1.weight.dtype),
    )  # fmt: skip


def flat(x: Any) -> list[Any]:
    return [z for y in x for z in flat(y)] if isinstance(x, (tuple, list)) else [x]


def array(x: Any) -> np.ndarray:
    return x.detach().double().numpy()


def differs(mine: Any, theirs: Any, tolerance: float) -> str:
    """What is not the same, or nothing."""
    if (mine is None) != (theirs is None):
        return f"{'None' if mine is None else 'a value'} instead of {'None' if theirs is None else 'a value'}"
    if mine is None:
        return ""
    if tuple(mine.shape) != tuple(theirs.shape):
        return f"shape {tuple(mine.shape)}, not {tuple(theirs.shape)}"
    if mine.dtype.name != ours(theirs.dtype):
        return f"type {mine.dtype.name}, not {ours(theirs.dtype)}"
    a, b = array(mine), array(theirs)
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return "nan or inf elsewhere"
    found = np.isfinite(b)
    off = np.abs(a[found] - b[found]).max(initial=0) / max(1, np.abs(b[found]).max(initial=0))
    return f"off by {off:.1e}" if off > tolerance else ""


def compare_module(info: Any, given: Any, training: bool, dtype: str) -> list[str]:
    """What differs; in a half type, where one rounding at a ReLU's corner may change a gradient, with most of five
    draws of the weights."""
    found = list(compare_once(info, given, training, dtype, 0))
    again = range(1, 5) if found and dtype in HALF else ()
    often = sum(bool(list(compare_once(info, given, training, dtype, seed))) for seed in again) >= 2
    return found if often or not again else []


def compare_once(info: Any, given: Any, training: bool, dtype: str, seed: int) -> Iterator[str]:
    torch.manual_seed(seed)
    args, kwargs = given.constructor_input.args, given.constructor_input.kwargs
    theirs = info.module_cls(*args, **{**kwargs, "dtype": getattr(torch, dtype)} if takes_dtype(info) else kwargs)
    own = {**ours(kwargs), "dtype": dtype} if takes_dtype(info) else ours(kwargs)
    mine = getattr(nn, info.name.removeprefix("nn."))(*ours(args), **{k: v for k, v in own.items() if k != "device"})
    forward = given.forward_input
    if forward is None:
        return
    for x in flat(forward.args):
        if isinstance(x, torch.Tensor) and x.is_leaf:
            x.grad = None
    inputs, named = ours(forward.args), ours(forward.kwargs)
    for m in (theirs, mine):
        m.train(training)
        for layer in m.modules():  # what it drops is drawn
            if type(layer).__name__ in ("Dropout", "MultiheadAttention", "RNN", "LSTM", "GRU"):
                setattr(layer, "p" if hasattr(layer, "p") else "dropout", 0.0)
    lazy = "Lazy" in info.name
    if lazy:
        theirs(*forward.args, **forward.kwargs)
    mine.load_state_dict({k: tensor(v) for k, v in theirs.state_dict().items()})
    if not lazy and list(mine.state_dict()) != list(theirs.state_dict()):
        yield f"names {list(mine.state_dict())}, not {list(theirs.state_dict())}"
    tolerance = TOLERANCE[dtype]
    want, got = flat(theirs(*forward.args, **forward.kwargs)), flat(mine(*inputs, **named))
    if len(want) != len(got):
        yield f"{len(got)} results, not {len(want)}"
    exact = copy.deepcopy(theirs).double() if dtype in HALF and not lazy else None
    for i, (w, g) in enumerate(zip(want, got)):
        if found := differs(g, w, tolerance):
            if exact is not None and is_as_near(g, w, true_results(exact, forward)[i], tolerance):
                continue
            yield f"result {i}: {found}"
    for name, t in theirs.named_buffers():
        if found := differs(dict(mine.named_buffers()).get(name), t, tolerance):
            yield f"buffer {name}: {found}"
    leaves = [(f"input {i}", w, g) for i, (w, g) in enumerate(zip(flat(forward.args), flat(inputs)))
              if isinstance(w, torch.Tensor) and w.requires_grad and w.is_leaf]  # fmt: skip
    leaves += [(name, t, dict(mine.named_parameters())[name]) for name, t in theirs.named_parameters()]
    total, total_ours = torch.zeros(()), Tensor(0.0)
    weights = []
    for w, g in zip(want, got):
        if isinstance(w, torch.Tensor) and w.requires_grad and w.is_floating_point():
            weight = torch.randn(w.shape, dtype=torch.float64).to(w.dtype)
            weights.append(weight.double())
            total, total_ours = total + (w * weight).sum(), total_ours + (g * tensor(weight)).sum()
    if not total.requires_grad:
        return
    total.backward()
    total_ours.backward()
    for name, w, g in leaves:
        if found := differs(g.grad, w.grad, tolerance):
            if exact is not None and is_as_near(
                g.grad, w.grad, true_gradients(exact, forward, weights).get(name), tolerance
            ):
                continue
            yield f"gradient of {name}: {found}"


def wide(x: Any) -> Any:
    """torch's arguments in float64."""
    if isinstance(x, torch.Tensor):
        return x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x
    return type(x)(map(wide, x)) if isinstance(x, (list, tuple)) else x


def true_results(module: Any, forward: Any, args: Any = None) -> list[Any]:
    """What the module gives in float64. `args`: its arguments, if they are in it already."""
    given = wide(forward.args) if args is None else args
    return flat(module(*given, **{k: wide(v) for k, v in forward.kwargs.items()}))


def true_gradients(module: Any, forward: Any, weights: list[Any]) -> dict[str, Any]:
    """By parameter, and by the number of an input, in float64."""
    module.zero_grad()
    args = wide(forward.args)
    wanted = lambda t: isinstance(t, torch.Tensor) and t.requires_grad and t.is_floating_point()  # noqa: E731
    out = filter(wanted, true_results(module, forward, args))
    sum((t * w).sum() for t, w in zip(out, weights)).backward()
    inputs = {f"input {i}": x.grad for i, x in enumerate(flat(args)) if wanted(x)}
    return {**inputs, **{name: p.grad for name, p in module.named_parameters()}}


def is_as_near(mine: Any, theirs: Any, true: Any, tolerance: float) -> bool:
    """Whether a value in a half type is as near to that in float64 as torch's is: its roundings on the way add up, and
    one at a ReLU's corner changes a gradient altogether."""
    if true is None or mine is None or array(mine).shape != array(theirs).shape:
        return False
    want = array(true)
    off = [np.abs(array(g).astype(np.float64) - want).max() / max(1.0, np.abs(want).max()) for g in (mine, theirs)]
    return bool(off[0] <= 2 * off[1] + tolerance)


def takes_dtype(info: Any) -> bool:
    made = (getattr(c.__init__, "__code__", None) for c in info.module_cls.__mro__)
    return any("dtype" in code.co_varnames for code in made if code is not None)


def modules(words: list[str], dtypes: list[str]) -> Iterator[tuple[str, Callable[[], Iterable[str]]]]:
    for info in module_db:
        for dtype in dtypes:
            for training in (True, False):
                kind = getattr(torch, dtype)
                if kind not in info.dtypes and dtype in ("float32", "float64"):
                    continue
                torch.manual_seed(0)  # (the same inputs whichever cases run)
                made = info.module_inputs_func(info, device="cpu", dtype=kind, requires_grad=True, training=training)
                for i, given in enumerate(made):
                    name = f"{info.name} {dtype} {'training' if training else 'evaluation'} {i} {given.desc}".rstrip()
                    if not words or any(w in name for w in words):
                        yield (
                            name,
                            lambda info=info, given=given, t=training, d=dtype: compare_module(info, given, t, d),
                        )
        if info.module_error_inputs_func is None:
            continue
        for training in (True, False):
            wrong = info.module_error_inputs_func(
                info, device="cpu", dtype=torch.float32, requires_grad=False, training=training
            )
            for i, case in enumerate(wrong):
                name = f"{info.name} error {i} {case.error_regex[:60]}"
                if not words or any(w in name for w in words):
                    yield name, lambda info=info, case=case: module_error(info, case)


def module_error(info: Any, case: Any) -> Iterator[str]:
    given = case.module_error_input
    try:
        mine = getattr(nn, info.name.removeprefix("nn."))(
            *ours(given.constructor_input.args), **ours(given.constructor_input.kwargs)
        )
        if given.forward_input is not None:
            for out in flat(mine(*ours(given.forward_input.args), **ours(given.forward_input.kwargs))):
                out.numpy()
    except (ValueError, TypeError, RuntimeError, IndexError):
        return
    yield f"taken; torch: {case.error_type.__name__} {case.error_regex}"


# *** optimisers ***


def problem(seed: int) -> tuple[list[np.ndarray], np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(s).astype(np.float32) for s in ((4, 3), (2, 4))], rng.standard_normal(
        (10, 4, 3)
    ).astype(np.float32)


def compare_optimiser(cls: Any, kwargs: dict[str, Any], captured: bool) -> Iterator[str]:
    (start, steps), tolerance = problem(0), LOOSE.get(cls.__name__, TOLERANCE["float32"])
    params = [torch.nn.Parameter(torch.from_numpy(a.copy())) for a in start]
    mine = [nn.Parameter(Tensor(a)) for a in start]
    theirs, own = cls(params, **kwargs), getattr(nn.optim, cls.__name__)(mine, **ours(kwargs))

    def loss(p: list[Any], at: Any) -> Any:
        return ((p[1] @ (p[0] - at)) ** 2).mean() + ((p[0] - at) ** 2).sum() * 0.1

    def step(at: Tensor) -> None:
        own.zero_grad()
        loss(mine, at).backward()
        own.step()

    run = TinyJit(step) if captured else step
    for at in steps:
        theirs.zero_grad()
        loss(params, torch.from_numpy(at)).backward()
        theirs.step()
        run(Tensor(at))
    for i, (p, q) in enumerate(zip(params, mine)):
        if found := differs(q, p, tolerance):
            yield f"parameter {i}: {found}"
    mine_state, their_state = own.state_dict()["state"], theirs.state_dict()["state"]
    for i, entry in their_state.items():
        for k, v in entry.items():
            if isinstance(v, torch.Tensor) and v.numel() > 1 and (found := differs(mine_state[i].get(k), v, tolerance)):
                yield f"state {k} of {i}: {found}"
    again = getattr(nn.optim, cls.__name__)(
        [nn.Parameter(Tensor(p.detach().numpy().copy())) for p in params], **ours(kwargs)
    )
    again.load_state_dict(
        {"state": {i: {k: tensor(v) if isinstance(v, torch.Tensor) else v for k, v in e.items()}
                   for i, e in their_state.items()},
         "param_groups": ours(theirs.state_dict()["param_groups"])}
    )  # fmt: skip
    for p, q in zip(params, again.params):
        p.grad = torch.ones_like(p)
        q.grad = Tensor(np.ones(q.shape, np.float32))
    theirs.step()
    again.step()
    for i, (p, q) in enumerate(zip(params, again.params)):
        if found := differs(q, p, tolerance):
            yield f"parameter {i} after loading torch's state: {found}"


def optimiser_error(cls: Any, case: Any) -> Iterator[str]:
    given = case.optimizer_error_input
    made: dict[int, Tensor] = {}

    def parameters(x: Any) -> Any:  # (the same tensor where it is the same)
        if isinstance(x, torch.Tensor):
            return made.setdefault(id(x), tensor(x))
        return (
            {k: parameters(v) for k, v in x.items()}
            if isinstance(x, dict)
            else (type(x)(map(parameters, x)) if isinstance(x, (list, tuple)) else x)
        )

    params = parameters(given.params) if given.params is not None else [nn.Parameter(Tensor.ones(2, 3))]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimiser = getattr(nn.optim, cls.__name__)(params, **ours(given.kwargs))
        for p in optimiser.params:
            p.grad = Tensor.ones(*p.shape)
        optimiser.step()
    except (ValueError, TypeError, RuntimeError, UserWarning):
        return
    yield f"taken; torch: {case.error_type.__name__} {case.error_regex}"


def optimisers(words: list[str]) -> Iterator[tuple[str, Callable[[], Iterator[str]]]]:
    for info in optim_db:
        cls = info.optim_cls
        for i, given in enumerate(info.optim_inputs_func(device="cpu")):
            kwargs = {
                k: v for k, v in given.kwargs.items() if k not in ("foreach", "fused", "capturable", "differentiable")
            }
            for captured in (False, True):
                name = f"{cls.__name__} {i} {given.desc}{' captured' if captured else ''}"
                if not words or any(w in name for w in words):
                    yield name, lambda c=cls, k=kwargs, j=captured: compare_optimiser(c, k, j)
        for i, case in enumerate(info.optim_error_inputs_func(device="cpu", dtype=torch.float32)):
            name = f"{cls.__name__} error {i} {case.optimizer_error_input.desc}"
            if not words or any(w in name for w in words):
                yield name, lambda c=cls, case=case: optimiser_error(c, case)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "float64"], choices=list(TOLERANCE))
    parser.add_argument("--part", default="0/1")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    part, parts = map(int, args.part.split("/"))
    cases = itertools.islice(
        itertools.chain(modules(args.words, args.dtypes), optimisers(args.words)), part, None, parts
    )
    for kind, group in itertools.groupby(cases, lambda case: case[0].split()[0]):
        before, began = counts.copy(), time.perf_counter()
        for name, check in group:
            why = next((why for parts, why in KNOWN.items() if all(p in name for p in parts.split(" & "))), "")
            if why:
                counts["set aside"] += 1
                continue
            try:
                problems = list(check())
            except NotImplementedError as error:
                if "\" not implemented for '" not in str(
                    error
                ):  # (torch's words of a kernel that it has not for a half type)
                    raise
                counts["not in torch"] += 1
                continue
            except Exception as error:
                problems = [f"{type(error).__name__}: {str(error)[:300]}"]
            counts["differ" if problems else "same"] += 1
            for p in problems:
                print(f"{name}: {p}", flush=True)
        seconds = time.perf_counter() - began
        print(f"{kind:<32} {', '.join(f'{n} {k}' for k, n in (counts - before).items())} ({seconds:.0f} s)", flush=True)
    print(", ".join(f"{n} {k}" for k, n in counts.items()))
    raise SystemExit(1 if counts["differ"] else 0)


if __name__ == "__main__":
    main()
