"""Gradients of what a captured function gives, and of what it has overwritten, are those without a capture, or an
error: never a part of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from manygrad import Context, Tensor, TinyJit

CALLS = 7
Function = Callable[..., tuple[Tensor, ...]]


def given(*values: float) -> Tensor:
    return Tensor(np.array(values, np.float32)).realize()


class Kept:
    """Where a function leaves what it makes on the way."""

    value: Tensor


def through_what_is_kept(x: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    Kept.value = (x * s).realize()
    return (Kept.value * 3,)


def assigning(x: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    s.assign(s * x + 1).realize()
    return (x * s,)


FUNCTIONS: dict[str, Function] = {  # of an argument, of what is trained (`w`) and of the state
    "of an argument": lambda x, w, s: (x * x,),
    "of state": lambda x, w, s: (s * s,),
    "of both": lambda x, w, s: ((x * s).exp(),),
    "of what is trained": lambda x, w, s: (w * w,),
    "of all": lambda x, w, s: (w * x + s,),
    "one of another": lambda x, w, s: (y := x * s, y.realize() * 2),
    "views": lambda x, w, s: ((x * s).reshape(2, 1), (w * s)[:1]),
    "of a view": lambda x, w, s: (x[:1] * s.reshape(2, 1), w.flip(0) * 2),
    "cut off": lambda x, w, s: (x.detach() * w.detach() * s.detach(),),
    "through what is kept": through_what_is_kept,
    "assigning": assigning,
}
OF_TRAINED = ("of what is trained", "of all", "views", "of a view")  # through these a gradient ends at a replay


def seen(run: Callable[..., tuple[Tensor, ...]], same: bool, i: int, w: Tensor, s: Tensor, x: Tensor) -> list[object]:
    """For each result its gradients by each tensor, or that there is none; beside the tensors themselves, so that a
    part of it reaches them anyway."""
    x = x if same else given(i + 1.0, 2.0 - i)
    results, found = run(x), list[object]()
    for z in results:
        for read in (False, True):
            loss = (z * 2 if read else z).sum() + (x * x + w * w + s * s).sum()
            if read:
                loss.realize()
            for t in (x, w, s):
                try:
                    found.append(loss.gradient(t)[0].numpy())
                except RuntimeError:
                    found.append(None)
            w.grad = None
            try:
                loss.backward()
                found.append(w.grad.numpy())
            except RuntimeError:
                found.append(None)
    return found


def outcomes(name: str, same: bool, capture: Callable[[Function], Function], held: bool) -> list[list[object]]:
    x, w, s = given(0.5, 2.0), given(1.0, 3.0), given(2.0, 0.25)
    w.requires_grad = True
    step = capture(lambda x: FUNCTIONS[name](x, w, s))
    kept = []

    def run(x: Tensor) -> tuple[Tensor, ...]:
        results = step(x)
        Tensor.realize(*results)
        if held:
            kept.append(results)
        return results

    return [seen(run, same, i, w, s, x) for i in range(CALLS)]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("same", [True, False], ids=["one argument", "others"])
@pytest.mark.parametrize("held", [True, False], ids=["held", "dropped"])
def test_they_are_right_or_an_error(name: str, same: bool, held: bool) -> None:
    with Context(FOLLOW=0):
        want = outcomes(name, same, lambda f: f, held)
    got = outcomes(name, same, TinyJit, held)
    for i, (call, plain) in enumerate(zip(got, want)):
        for n, (a, b) in enumerate(zip(call, plain)):
            assert a is None or b is not None, (i, n)
            if a is None:
                assert b is None or name in OF_TRAINED, (i, n)
            else:
                np.testing.assert_allclose(a, b, rtol=1e-5, err_msg=f"call {i}, gradient {n}")


def test_a_total_of_results_holds_none_of_them() -> None:
    w, x, total = given(1.0, 3.0).requires_grad_(), given(1.0, 2.0), given(0.0)
    step, nodes = TinyJit(lambda x: (w * x).sum()), set()
    for _ in range(20):
        loss = step(x)
        nodes.add(id(loss.uop))
        total = (total + loss).realize()
    assert total.item() == 140 and len(nodes) <= 4
    with pytest.raises(RuntimeError, match="a call of a TinyJit"):
        total.backward()
    total.detach().item()


def test_an_earlier_result_is_not_the_one_that_lies_there_now() -> None:
    step, total = TinyJit(lambda x: x * 2), given(0.0, 0.0)
    for i in range(12):
        z = step(given(i, 1.0))
        (slope,) = (total * z).sum().gradient(z)
        assert slope.tolist() == total.tolist()
        total = (total.detach() + z.detach() if i % 2 else total + z).realize()
        del z


def test_results_of_calls_that_native_code_repeats() -> None:
    step, x = TinyJit(lambda x: x * x), given(1.0, 2.0)
    for calls in range(1, 8):
        for _ in range(calls):
            z = step(x)
        with pytest.raises(RuntimeError, match="was computed from one of the targets"):
            (z + x).sum().gradient(x)
