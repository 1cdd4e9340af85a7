"""A plain loop whose calls are put off and replayed gives what one gives whose calls are made as they come, whatever
happens between two steps and in the middle of one: values read early, kept results, other batch sizes, numbers that
change, errors, evaluation, seeds, threads, writes to what is read."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from hypothesis import strategies as st

from manygrad import Context, Tensor, TinyJit, no_grad, scan, world
from manygrad import nn as _nn
from manygrad.autograd import Function, checkpoint
from manygrad.nn import functional as F
from tests.fuzz import training

EXAMPLES = 12
INSIDE = (
    *("read first", "clip", "evaluate", "evaluate with gradients", "error", "seed", "read statistics", "in place"),
    *("thread", "counted", "kept", "twice", "write what is read", "read gradient", "other size", "retained", "hook"),
    *("view", "list index", "choose", "noise", "frozen copy", "detached", "grad of input", "no step", "sum of losses"),
    *("added up", "by hand", "scan", "two optimisers", "checkpoint"),
    *("leaf", "running sum", "captured", "lazy from before"),
    *("accumulate", "read norm", "hook of a leaf", "gradient in place", "activation in place"),
    *("custom function", "custom function that changes"),
)
# where gradients may be stored before they are used: what they are added to is rounded once more then
IN_BETWEEN = frozenset(
    "clip|twice|read gradient|retained|leaf|added up|no step|by hand|accumulate|read norm|gradient in place".split("|")
)
PLACES = ("before", "forward", "backward", "after")  # where in a step one worker reads by itself
Program = dict[str, Any]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """What the model is made of, what happens before each step (as in `training`), and within it."""
    usual = draw(st.lists(st.sampled_from(INSIDE), max_size=2))
    count = draw(st.integers(8, 20))
    rare = st.sampled_from((*[None] * 40, *training.EVENTS))
    within = st.sampled_from((*[None] * 40, *INSIDE))
    return {
        "optimizer": draw(st.sampled_from(sorted(training.OPTIMIZERS))),
        "norm": draw(st.booleans()),
        "dropout": draw(st.booleans()),
        "usual": usual,
        "events": [draw(rare) for _ in range(count)],
        "within": [draw(within) for _ in range(count)],
        "all stepped": draw(st.sampled_from((True, True, False))),
        "sizes": draw(st.sampled_from(((4,), (4,), (4, 3), (4, 4, 4, 2)))),
        "devices": draw(st.sampled_from((0, 0, 0, 2, 3))),  # that the model is on each of; 0: one process's usual one
        "cut": draw(st.booleans()),  # batches over these
    }


STEEP = [2.0]  # how much of a gradient goes back through `Bent`


class Bent(Function):
    """tanh with a gradient of its own, which depends on an attribute, on what is saved and on a list outside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        out = (x * factor).tanh()
        ctx.save_for_backward(x, out)
        ctx.factor = factor
        return out, x * 0.5

    @staticmethod
    def backward(ctx: Any, grad: Tensor, half: Tensor) -> tuple[Tensor, None]:
        x, out = ctx.saved_tensors
        return grad * (1 - out * out) * (ctx.factor * STEEP[0]) + half + x * 0.001, None


class Loop(training.Side):
    """A loop of plain steps."""

    def __init__(self, program: Program, devices: tuple[str, ...] = ()) -> None:
        self.devices = devices or tuple(f"CPU:{i}" for i in range(program["devices"]))
        super().__init__({**program, "inside": None, "outside": False, "kept": False}, False)
        self.log: list[Any] = []
        self.kept: list[Tensor] = []
        self.judge = _nn.Linear(1, 1)
        for p in self.judge.parameters() if self.devices else ():
            p.shard_(self.devices)
        self.judges = _nn.optim.SGD(self.judge.parameters(), lr=0.1)
        self.total: Any = 0
        self.doubled = TinyJit(lambda t: (t * 2).sum())
        self.before = self.placed(1, 1, rng=np.random.default_rng(99), axis=None) * 0.5
        if program["all stepped"]:
            self.optimizer.add_param_group({"params": list(self.extra.parameters()), "lr": 0.01})

    def read_alone(self, place: str, i: int) -> None:
        """One of several workers reads what it holds."""
        who = self.program["alone"][i] if "alone" in self.program else None
        if who is not None and (who[0], who[1]) == (world.rank, place):
            weight = self.model[1].weight
            (weight.detach().square().sum() if who[2] else weight).numpy()

    def note(self, *tensors: Tensor) -> None:
        self.log += [t.numpy() for t in tensors]

    def one(self, event: str | None, within: set[str], i: int) -> None:
        self.happen(event, i)
        rng = np.random.default_rng(100 + i)
        size = self.program["sizes"][i % len(self.program["sizes"])] + ("other size" in within)
        axis = 0 if self.program["cut"] else None
        x, y = (self.placed(size, n, rng=rng, axis=axis) for n in (3, 1))
        if "seed" in within:
            Tensor.manual_seed(i)
        if "grad of input" in within:
            x.requires_grad = True
        if "accumulate" not in within:
            self.optimizer.zero_grad()
        if "added up" not in within:
            self.extra.zero_grad()
        if "thread" in within:
            t = threading.Thread(target=self.body, args=(x, y, within, i))
            t.start()
            t.join()
        else:
            self.body(x, y, within, i)
        if "grad of input" in within and x.grad is not None:
            self.note(x.grad)

    def body(self, x: Tensor, y: Tensor, within: set[str], i: int) -> None:
        try:
            self.step_of(x, y, within, i)
        except ArithmeticError as e:
            self.log.append(str(e))
        except RuntimeError as e:
            if "overwritten" not in str(e):  # (a gradient of what was computed before "write what is read")
                raise
            self.log.append("overwritten")
            self.optimizer.zero_grad()

    def step_of(self, x: Tensor, y: Tensor, within: set[str], i: int) -> None:
        linear = self.model[1]
        self.read_alone("before", i)
        z = x
        if "noise" in within:
            z = z + z.randn_like() * 0.1
        if "in place" in within:
            z = z * 1.0
            z += 1
            z[0] = 0.5
        if "view" in within:
            z = z.reshape(-1)[: z.numel()].reshape(z.shape)
        if "list index" in within:
            z = z[list(range(z.shape[0]))[::-1]]
        if "hook of a leaf" in within and linear.weight.requires_grad:
            linear.weight.register_hook(lambda g: g * 0.75)
        hidden = checkpoint(self.model, z) if "checkpoint" in within else self.model(z)
        out = self.extra(hidden) * self.scale
        if "activation in place" in within:
            out = out * 1.0
            out += hidden.mean()
            out.tanh_()
        if not within.isdisjoint(("custom function", "custom function that changes")):
            STEEP[0] = 1.0 + i % 3 if "custom function that changes" in within else 2.0
            out, halves = Bent.apply(out, 0.5 + (i % 2 if "custom function that changes" in within else 0))
            self.kept.append(halves)
        if "scan" in within:
            out = out + scan(lambda h, o: ((h * 0.5 + o).tanh(), h), out[0].detach() * 0, out)[1]
        if "counted" in within:
            out = out * (i + 1)
        if "choose" in within and float(out.sum().item()) > 0:
            out = out * 0.5
        if "write what is read" in within:
            with no_grad():
                linear.bias.detach().assign(linear.bias.detach() + 0.125)
        if "error" in within:
            raise ArithmeticError(f"step {i}")
        if "two optimisers" in within:
            self.judges.zero_grad()
            loss = self.judge(out.detach()).square().mean()
            self.note(loss)
            loss.backward()
            self.judges.step()
            out = out + self.judge(out)
        if "lazy from before" in within:
            out = out + self.before
        leaf = Tensor.rand(1, requires_grad=True) if "leaf" in within and not self.devices else None
        if leaf is not None:
            out = out + leaf
        if "captured" in within and not self.devices:
            self.kept.append(self.doubled(out.detach()))
        loss = F.mse_loss(out, y)
        self.read_alone("forward", i)
        if "retained" in within and hidden.requires_grad:
            hidden.retain_grad()
        if "hook" in within and loss.requires_grad:
            loss.register_hook(lambda g: g * 2)
        if "read first" in within:
            self.note(loss)
        if "sum of losses" in within:
            loss = loss + F.l1_loss(out, y) * 0.5
        if "detached" in within:
            self.kept.append(out.detach().clone())
        if loss.requires_grad:
            loss.backward()
            if "twice" in within:
                F.mse_loss(self.model(x), y.expand(x.shape[0], 1)).backward()
        if "retained" in within and hidden.grad is not None:
            self.note(hidden.grad)
        if leaf is not None:
            assert leaf.grad is not None
            self.note(leaf.grad)
        if "read gradient" in within and linear.weight.grad is not None:
            self.note(linear.weight.grad)
        if "clip" in within and any(p.grad is not None for p in self.model.parameters()):
            self.kept.append(_nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.grad is not None], 0.5))
        if "read norm" in within and linear.weight.grad is not None:
            self.log.append(np.float32(_nn.utils.clip_grad_norm_([linear.weight], 0.5).item()))
        if "gradient in place" in within and linear.weight.grad is not None:
            linear.weight.grad.mul_(0.5)
            if i % 2:
                linear.weight.grad.add_(linear.weight.detach(), alpha=0.125)
        if "read statistics" in within:
            self.note(*self.model.state_dict().values())
        if "frozen copy" in within:
            self.kept.append(linear.weight.detach().clone())
        self.read_alone("backward", i)
        if "by hand" in within:
            with no_grad():
                for p in self.model.parameters():
                    if p.grad is not None:
                        p -= p.grad * (0.01 / (i + 1))
                        p.grad = None
        elif within.isdisjoint({"no step", "accumulate"}):
            self.optimizer.step()
        self.read_alone("after", i)
        if "running sum" in within:
            self.total = self.total + loss.detach()
        if "evaluate" in within:
            with no_grad():
                self.kept.append(self.model(y.expand(y.shape[0], 3)).sum())
        if "evaluate with gradients" in within:
            self.note(self.model(x))
        if "kept" in within:
            self.kept += [loss, out, hidden]
        else:
            self.note(loss)


def run(program: Program, how: AbstractContextManager[Any], devices: tuple[str, ...] = ()) -> list[Any]:
    """All that a loop showed."""
    with how:
        loop = Loop(program, devices)
        usual = set(program["usual"])
        for i, (event, within) in enumerate(zip(program["events"], program["within"])):
            loop.one(event, usual ^ ({within} - {None}), i)
        loop.note(*loop.kept)
        if isinstance(loop.total, Tensor):  # (the product that a mean is may be added up before it is rounded)
            loop.log.append(("about", loop.total.numpy()))
        return [*loop.log, *loop.state()]


def check(program: Program, devices: tuple[str, ...] = ()) -> list[Any]:
    """Gives what a loop showed. `devices`: other than the program says."""
    in_between = not IN_BETWEEN.isdisjoint((*program["usual"], *program["within"]))
    if in_between:  # (Adam makes as much of a gradient that is rounding alone as of any other)
        program = {**program, "optimizer": "SGD"}
    want, got = run(program, Context(FOLLOW=0), devices), run(program, nullcontext(), devices)
    assert len(got) == len(want)
    for k, (a, b) in enumerate(zip(got, want)):
        if isinstance(b, str):
            assert a == b
            continue
        if isinstance(b, tuple):
            np.testing.assert_allclose(a[1], b[1], rtol=1e-6)
            continue
        assert a.shape == b.shape and a.dtype == b.dtype, f"value {k}"
        if in_between:
            np.testing.assert_allclose(a, b, 1e-4, 1e-5, err_msg=f"value {k} of {len(want)}")
        else:
            np.testing.assert_array_equal(a, b, err_msg=f"value {k} of {len(want)}")
    return got
