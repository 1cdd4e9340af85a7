"""Training loops: optimisers, schedules, averages of weights, gradients that are added up, checkpoints."""

from __future__ import annotations

import copy
import tempfile
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from manygrad import Tensor, TinyJit, autocast, autograd, dtypes, nn, no_grad
from manygrad.nn import functional as F
from tests.endurance.idiom import batch, idiom, loss_of, network, train, trained


def captured() -> tuple[TinyJit[Tensor], Any]:
    """A step, and the model that it trains."""
    model, optimizer = trained()

    @TinyJit
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step, model


@idiom
def average_of_weights() -> Iterator[Any]:
    model, optimizer = trained()
    shadow = {k: t.detach().clone() for k, t in model.state_dict().items()}
    for i in count():
        train(model, optimizer, i)
        with no_grad():
            for k, t in model.state_dict().items():
                shadow[k].mul_(0.99).add_(t, alpha=0.01)
        yield shadow["0.weight"].numpy() if i % 10 == 0 else None


@idiom
def average_of_weights_anew() -> Iterator[Any]:
    model, optimizer = trained()
    shadow = [p.detach().clone() for p in model.parameters()]
    for i in count():
        loss = train(model, optimizer, i)
        shadow = [(s * 0.9 + p.detach() * 0.1).realize() for s, p in zip(shadow, model.parameters())]
        yield loss.item() + shadow[0].sum().item()


@idiom
def average_model_with_deepcopy() -> Iterator[Any]:
    model, optimizer = trained()
    average = copy.deepcopy(model)
    for i in count():
        train(model, optimizer, i)
        with no_grad():
            for a, p in zip(average.parameters(), model.parameters()):
                a.copy_(a * 0.9 + p * 0.1)
            yield average(Tensor(batch(i)[0])).mean().item()


@idiom
def gradients_added_up() -> Iterator[Any]:
    model, optimizer = trained()
    for i in count():
        loss = loss_of(model, i) / 4
        loss.backward()
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
        yield loss.item()


@idiom
def gradients_added_up_and_clipped() -> Iterator[Any]:
    model, optimizer = trained()
    for i in count():
        optimizer.zero_grad(set_to_none=False)
        for k in range(2):
            (loss_of(model, 2 * i + k) / 2).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        yield norm.item()


@idiom
def clipped_by_value() -> Iterator[Any]:
    model, optimizer = trained()
    for i in count():
        optimizer.zero_grad()
        loss = loss_of(model, i)
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
        yield loss.item()


@idiom
def grad_scaler() -> Iterator[Any]:
    model, optimizer = trained()
    scaler = nn.optim.GradScaler(init_scale=1024.0, growth_interval=10)
    for i in count():
        optimizer.zero_grad()
        with autocast(dtype=dtypes.float16):
            loss = loss_of(model, i)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        yield loss.item()


@idiom
def autocast_bfloat16() -> Iterator[Any]:
    model = network(nn.LayerNorm(8))
    optimizer = nn.optim.AdamW(model.parameters(), lr=0.01)
    for i in count():
        optimizer.zero_grad()
        with autocast():
            loss = loss_of(model, i)
        loss.backward()
        optimizer.step()
        yield loss.item()


@idiom
def cosine_schedule() -> Iterator[Any]:
    model, optimizer = trained()
    scheduler = nn.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
    for i in count():
        loss = train(model, optimizer, i)
        scheduler.step()
        yield loss.item()


@idiom
def plateau_schedule() -> Iterator[Any]:
    model, optimizer = trained()
    scheduler = nn.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=3)
    for i in count():
        loss = train(model, optimizer, i).item()
        scheduler.step(loss)
        yield loss, optimizer.param_groups[0]["lr"]


@idiom
def warm_restarts_and_groups() -> Iterator[Any]:
    model = network()
    groups = [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2].parameters()}]
    optimizer = nn.optim.AdamW(groups, lr=0.02)
    scheduler = nn.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=10)
    for i in count():
        loss = train(model, optimizer, i)
        scheduler.step()
        yield loss.item()


@idiom
def rate_set_each_step() -> Iterator[Any]:
    model, optimizer = trained()
    for i in count():
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + i)
        yield train(model, optimizer, i).item()


@idiom
def early_stopping_with_best_state() -> Iterator[Any]:
    model, optimizer = trained(lr=0.2)
    best, best_state, bad = float("inf"), None, 0
    for i in count():
        train(model, optimizer, i)
        with no_grad():
            value = loss_of(model, 10_000 + i).item()
        if value < best:
            best, bad = value, 0
            best_state = copy.deepcopy(model.state_dict())
        else:
            bad += 1
        if bad == 10 and best_state is not None:
            model.load_state_dict(best_state)
            best, bad = float("inf"), 0
        yield value


@idiom
def best_state_cloned() -> Iterator[Any]:
    model, optimizer = trained()
    state: dict[str, Tensor] = {}
    for i in count():
        loss = train(model, optimizer, i)
        if i % 5 == 0:
            state = {k: v.detach().clone() for k, v in model.state_dict().items()}
        yield loss.item(), state["2.weight"].sum().item() if i % 25 == 0 else None


@idiom
def evaluation_every_few_steps() -> Iterator[Any]:
    model, optimizer = trained(nn.BatchNorm1d(8), nn.Dropout(0.2))
    for i in count():
        model.train()
        train(model, optimizer, i)
        value = None
        if i % 5 == 4:
            model.eval()
            with no_grad():
                value = sum(loss_of(model, 10_000 + k).item() for k in range(3))
        yield value


@idiom
def dropout_and_batch_norm() -> Iterator[Any]:
    model, optimizer = trained(nn.BatchNorm1d(8), nn.Dropout(0.2))
    model.train()
    for i in count():
        yield train(model, optimizer, i).item()


@idiom
def loss_read_before_backward() -> Iterator[Any]:
    model, optimizer = trained()
    for i in count():
        optimizer.zero_grad()
        loss = loss_of(model, i)
        value = loss.item()
        if value < 100:
            loss.backward()
            optimizer.step()
        yield value


@idiom
def gradient_norms_logged() -> Iterator[Any]:
    model, optimizer = trained()
    for i in count():
        train(model, optimizer, i)
        yield [float(p.grad.norm().item()) for p in model.parameters() if p.grad is not None]


@idiom
def hooks_on_tensors() -> Iterator[Any]:
    model, optimizer = trained()
    seen: deque[Tensor] = deque(maxlen=3)
    for i in count():
        optimizer.zero_grad()
        hidden = model[0](Tensor(batch(i)[0]))
        hidden.register_hook(lambda g: seen.append(g) or g * 0.5)
        loss = model[2](model[1](hidden)).square().mean()
        loss.backward()
        optimizer.step()
        yield seen[-1].sum().item()


@idiom
def hooks_on_modules() -> Iterator[Any]:
    model, optimizer = trained()
    means: dict[str, Tensor] = {}
    model[0].register_forward_hook(lambda module, args, out: means.update(hidden=out.detach().mean()))
    for i in count():
        train(model, optimizer, i)
        yield means["hidden"].item()


class Clipped(autograd.Function):
    """The identity, whose gradient is clipped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0].clamp(-1, 1) * (x.abs() < 10).float()


@idiom
def function_of_ones_own() -> Iterator[Any]:
    model, optimizer = trained()
    for i in count():
        optimizer.zero_grad()
        loss = Clipped.apply(model(Tensor(batch(i)[0]))).square().mean()
        loss.backward()
        optimizer.step()
        yield loss.item()


@idiom
def input_gradients() -> Iterator[Any]:
    """As adversarial examples and saliency maps are made."""
    model = network()
    for i in count():
        x = Tensor(batch(i)[0], requires_grad=True)
        (g,) = autograd.grad(model(x).square().sum(), x)
        yield (x + g.sign() * 0.1).detach().sum().item()


@idiom
def gradient_penalty() -> Iterator[Any]:
    model, optimizer = trained(lr=0.01)
    for i in count():
        optimizer.zero_grad()
        x = Tensor(batch(i)[0], requires_grad=True)
        out = model(x)
        (g,) = autograd.grad(out.sum(), x, create_graph=True)
        loss = out.square().mean() + (g.norm(dim=1) - 1).square().mean()
        loss.backward()
        optimizer.step()
        yield loss.item()


@idiom
def checkpointed_layers() -> Iterator[Any]:
    model, optimizer = trained()
    for i in count():
        optimizer.zero_grad()
        loss = autograd.checkpoint(model, Tensor(batch(i)[0])).square().mean()
        loss.backward()
        optimizer.step()
        yield loss.item()


@idiom
def step_by_hand() -> Iterator[Any]:
    w, rate = Tensor.zeros(4, 1, requires_grad=True), 0.1
    for i in count():
        x, y = map(Tensor, batch(i))
        loss = (x @ w - y).square().mean()
        loss.backward()
        with no_grad():
            w -= rate * w.grad
            w.grad = None
        rate *= 0.99
        yield loss.item()


@idiom(rounds=True)
def functional_updates() -> Iterator[Any]:
    w = Tensor.zeros(4, 1, requires_grad=True)
    for i in count():
        x, y = map(Tensor, batch(i))
        loss = (x @ w - y).square().mean()
        (g,) = autograd.grad(loss, w)
        w = (w - 0.1 * g).detach().requires_grad_()
        yield loss.item()


@idiom
def adversarial_networks() -> Iterator[Any]:
    maker, judge = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), network()
    makers = nn.optim.Adam(maker.parameters(), lr=0.01)
    judges = nn.optim.Adam(judge.parameters(), lr=0.01)
    for i in count():
        real, made = Tensor(batch(i)[0]), maker(Tensor.randn(8, 4))
        judges.zero_grad()
        right, wrong = judge(real), judge(made.detach())
        loss = F.binary_cross_entropy_with_logits(right, right.ones_like())
        loss = loss + F.binary_cross_entropy_with_logits(wrong, wrong.zeros_like())
        loss.backward()
        judges.step()
        makers.zero_grad()
        out = judge(made)
        deceived = F.binary_cross_entropy_with_logits(out, out.ones_like())
        deceived.backward()
        makers.step()
        yield loss.item(), deceived.item()


@idiom
def models_made_anew() -> Iterator[Any]:
    """A search for hyperparameters."""
    for i in count():
        model, optimizer = trained(lr=0.01 * (1 + i % 3))
        for k in range(4):
            loss = train(model, optimizer, k)
        yield loss.item()


@idiom
def cross_validation() -> Iterator[Any]:
    x, y = batch(0, 12)
    for i in count():
        part = np.arange(12) % 3 == i % 3
        model, optimizer = trained()
        for _ in range(3):
            optimizer.zero_grad()
            F.mse_loss(model(Tensor(x[~part])), Tensor(y[~part])).backward()
            optimizer.step()
        with no_grad():
            yield F.mse_loss(model(Tensor(x[part])), Tensor(y[part])).item()


@idiom
def exceptions_are_caught() -> Iterator[Any]:
    model, optimizer = trained()
    for i in count():
        value = None
        try:
            optimizer.zero_grad()
            loss = loss_of(model, i)
            if i % 3 == 1:
                raise ArithmeticError(i)
            if i % 3 == 2:
                loss = loss + model(Tensor(np.ones((8, 5), np.float32))).sum()
            loss.backward()
            optimizer.step()
            value = loss.item()
        except (ArithmeticError, ValueError, RuntimeError) as e:
            value = type(e).__name__
        yield value


@dataclass
class Kept:
    """What a loop keeps of a step."""

    step: int
    loss: Tensor
    outputs: dict[str, Tensor]


@idiom
def results_in_dataclasses() -> Iterator[Any]:
    model, optimizer = trained()
    for i in count():
        optimizer.zero_grad()
        x, y = map(Tensor, batch(i))
        out = model(x)
        state = Kept(i, F.mse_loss(out, y), {"out": out, "error": (out - y).abs()})
        state.loss.backward()
        optimizer.step()
        yield state.loss.item(), state.outputs["error"].max().item()


@idiom
def checkpoints_of_all() -> Iterator[Any]:
    model, optimizer = trained()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "state.pt")
        for i in count():
            loss = train(model, optimizer, i)
            if i % 5 == 4:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": i}
                nn.state.torch_save(state, path)
            if i % 15 == 14:
                state = nn.state.torch_load(path)
                model.load_state_dict(state["model"])
                optimizer.load_state_dict(state["optimizer"])
            yield loss.item()


@idiom
def weights_saved_and_loaded() -> Iterator[Any]:
    model, optimizer = trained()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "weights.safetensors"))
        for i in count():
            loss = train(model, optimizer, i)
            nn.state.safe_save(model.state_dict(), path)
            if i % 3 == 2:
                model.load_state_dict(nn.state.safe_load(path))
            yield loss.item()


@idiom
def captured_step() -> Iterator[Any]:
    step, _ = captured()
    for i in count():
        yield step(*map(Tensor, batch(i))).item()


@idiom
def captured_step_and_plain_evaluation() -> Iterator[Any]:
    step, model = captured()
    for i in count():
        loss = step(*map(Tensor, batch(i)))
        value = None
        if i % 4 == 0:
            with no_grad():
                value = loss_of(model, i).item()
        yield value, loss.item() if i % 3 == 0 else None


@idiom
def frozen_and_thawed() -> Iterator[Any]:
    model, optimizer = trained()
    for i in count():
        for p in model[0].parameters():
            p.requires_grad_((i // 5) % 2 == 0)
        yield train(model, optimizer, i).item()


@idiom
def sizes_that_change() -> Iterator[Any]:
    model, optimizer = trained()
    for i in count():
        optimizer.zero_grad()
        loss = loss_of(model, i, rows=5 + i % 4)
        loss.backward()
        optimizer.step()
        yield loss.item()


@idiom
def recurrent_with_state_carried() -> Iterator[Any]:
    """Truncated backpropagation through time."""
    model, head = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 1)
    optimizer = nn.optim.Adam([*model.parameters(), *head.parameters()], lr=0.01)
    state = Tensor.zeros(1, 2, 8)
    for i in count():
        optimizer.zero_grad()
        x = Tensor(batch(i)[0].reshape(2, 4, 4))
        out, state = model(x, state.detach())
        loss = head(out).square().mean()
        loss.backward()
        optimizer.step()
        yield loss.item()


@idiom
def embedding_of_words() -> Iterator[Any]:
    table, head = nn.Embedding(50, 4), nn.Linear(4, 1)
    optimizer = nn.optim.Adagrad([*table.parameters(), *head.parameters()], lr=0.1)
    for i in count():
        words = Tensor(np.random.default_rng(i).integers(0, 50, (8, 3)))
        optimizer.zero_grad()
        loss = (head(table(words).mean(1)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        yield loss.item()
