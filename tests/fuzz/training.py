"""A captured training step gives what the plain one gives, whatever happens between its calls: modes, frozen layers,
options of optimisers, schedules, loading, replaced weights, forgotten gradients, kept results. Where Python decides
inside of the step (a schedule, a counter) it may be a JitError instead, never other numbers."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from hypothesis import strategies as st

from manygrad import Context, Tensor, TinyJit, nn
from manygrad.nn import functional as F
from manygrad.runtime.jit.tiny_jit import JitError

EXAMPLES = 12
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (nn.optim.SGD, {"momentum": 0.5}),
    "Adam": (nn.optim.Adam, {"betas": (0.5, 0.9)}),
    "AdamW": (nn.optim.AdamW, {"weight_decay": 0.1}),
}
EVENTS = (
    *("eval", "train", "layer mode", "freeze", "thaw", "weight_decay", "own option", "maximize", "lr", "schedule"),
    *("load", "load optimizer", "data", "weight", "layer", "forget", "scale", "group", "all train", "assign"),
)
INSIDE = ("schedule", "counter")
Program = dict[str, Any]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """What the step is made of, and what happens before each of its calls."""
    return {
        "optimizer": draw(st.sampled_from(sorted(OPTIMIZERS))),
        "norm": draw(st.booleans()),
        "dropout": draw(st.booleans()),
        "inside": draw(st.sampled_from((None, None, None, *INSIDE))),
        "outside": draw(st.booleans()),  # zero_grad() and step()
        "kept": draw(st.booleans()),
        "events": draw(st.lists(st.sampled_from((None, None, *EVENTS)), min_size=5, max_size=14)),
    }


class Side:
    """One of the two: model, optimiser, and its way to call the step."""

    devices: tuple[str, ...] = ()  # that the model lies on; none: the default one

    def __init__(self, program: Program, jit: bool) -> None:
        Tensor.manual_seed(11)
        self.program = program
        self.norm = nn.BatchNorm1d(3) if program["norm"] else nn.Identity()
        self.dropout = nn.Dropout(0.5) if program["dropout"] else nn.Identity()
        self.model = nn.Sequential(self.norm, nn.Linear(3, 4), nn.Tanh(), self.dropout, nn.Linear(4, 1))
        self.extra = nn.Linear(1, 1)
        for t in (*self.model.state_dict().values(), *self.extra.parameters()):
            t.shard_(self.devices).realize() if self.devices else None
        kind, options = OPTIMIZERS[program["optimizer"]]
        self.optimizer = kind(self.model.parameters(), lr=0.05, **options)
        self.schedule = nn.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.scale, self.count = 1.0, 0
        self.saved: tuple[Any, Any] = (self.weights(), None)
        self.everywhere: bool | None = None
        self.step: Any = TinyJit(self.plain) if jit else self.plain

    def placed(self, *shape: int, rng: np.random.Generator, axis: int | None = None) -> Tensor:
        """Random numbers, on the devices of the model."""
        t = Tensor(rng.standard_normal(shape).astype(np.float32))
        return t.shard(self.devices, axis) if self.devices else t

    def weights(self) -> dict[str, Tensor]:
        return {k: t.detach().clone().realize() for k, t in self.model.state_dict().items()}

    def plain(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        inside, outside = self.program["inside"], self.program["outside"]
        if not outside:
            self.optimizer.zero_grad()
        out = self.extra(self.model(x)) * self.scale
        if inside == "counter":
            self.count += 1
            out = out * self.count
        loss = F.mse_loss(out, y)
        loss.backward()
        if not outside:
            self.optimizer.step()
        if inside == "schedule":
            self.schedule.step()
        return {"loss": loss, "out": out}

    def happen(self, event: str | None, i: int) -> None:
        group, linear = self.optimizer.param_groups[0], self.model[1]
        rng = np.random.default_rng(i)
        if event in ("eval", "train"):
            self.model.train(event == "train")
        elif event == "layer mode":
            self.dropout.training = not self.dropout.training
        elif event in ("freeze", "thaw"):
            linear.requires_grad_(event == "thaw")
        elif event == "weight_decay":
            group["weight_decay"] = 0.25 if group["weight_decay"] == 0 else 0.0
        elif event == "own option":
            group.update({"momentum": 0.75} if "momentum" in group else {"eps": 0.01})
        elif event == "maximize":
            group["maximize"] = not group["maximize"]
        elif event == "lr":
            group["lr"] = 0.02
        elif event == "schedule":
            self.schedule.step()
        elif event == "load":
            self.model.load_state_dict(self.saved[0], strict=False)
        elif event == "load optimizer":
            if self.saved[1] and len(self.saved[1]["param_groups"]) == len(self.optimizer.param_groups):
                self.optimizer.load_state_dict(self.saved[1])
            self.saved = (self.weights(), self.optimizer.state_dict())
        elif event == "data":
            linear.weight.data = self.placed(4, 3, rng=rng)
        elif event == "assign":
            linear.weight.detach().assign(self.placed(4, 3, rng=rng))
        elif event == "weight":
            self.extra.weight = nn.Parameter(self.placed(1, 1, rng=rng))
        elif event == "layer":
            self.extra = nn.Linear(1, 1, bias=False)
            self.extra.weight.shard_(self.devices) if self.devices else None
            self.extra.weight.assign(self.placed(1, 1, rng=rng)).realize()
        elif event == "forget":
            for p in self.model.parameters():
                p.grad = None
        elif event == "scale":
            self.scale = 1.5 - self.scale
        elif event == "group" and len(self.optimizer.param_groups) == 1 and self.extra.weight.requires_grad:
            self.optimizer.add_param_group({"params": [self.extra.weight], "lr": 0.01})
        elif event == "all train":
            self.everywhere = not self.everywhere

    def call(self, event: str | None, i: int) -> dict[str, Tensor]:
        self.happen(event, i)
        rng = np.random.default_rng(100 + i)
        x, y = (Tensor(rng.standard_normal((4, n)).astype(np.float32)).realize() for n in (3, 1))
        if self.program["outside"]:
            self.optimizer.zero_grad()
        if self.everywhere is None:
            out = self.step(x, y)
        else:
            with Tensor.train(self.everywhere):
                out = self.step(x, y)
        if self.program["outside"]:
            self.optimizer.step()
        found: dict[str, Tensor] = out
        return found

    def seen(self, out: dict[str, Tensor]) -> list[np.ndarray]:
        return [t.numpy() for t in out.values()]

    def state(self) -> list[np.ndarray]:
        tensors = [*self.model.state_dict().values(), *self.extra.parameters()]
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return [t.numpy() for t in (*tensors, *grads)]


def check(program: Program) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # (a step that is captured again and again says so)
        with Context(FOLLOW=0):  # (a plain loop is captured by the same means)
            want = _run(program, False)
        got = _run(program, True)
    if got is None:
        assert program["inside"] in INSIDE
        return
    assert want is not None
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert len(a) == len(b), f"call {i}: {len(a)} values, {len(b)} without a capture"
        for x, y in zip(a, b):
            np.testing.assert_allclose(x, y, 2e-5, 2e-5, err_msg=f"call {i}")


def _run(program: Program, jit: bool) -> list[list[np.ndarray]] | None:
    """What each call showed; None where it was refused."""
    side, kept, found = Side(program, jit), [], []
    try:
        for i, event in enumerate(program["events"]):
            out = side.call(event, i)
            kept.append(out)
            found.append([*([] if program["kept"] else side.seen(out)), *side.state()])
    except JitError:
        if program["inside"] is None:
            raise
        return None
    return [*found, *(side.seen(out) for out in kept)]
