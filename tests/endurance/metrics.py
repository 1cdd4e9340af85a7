"""Losses and metrics: what loops read, add up and keep."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count
from typing import Any

from manygrad import Tensor, nn, no_grad
from manygrad.nn import functional as F
from tests.endurance.idiom import batch, idiom, loss_of, network, train, trained


@idiom
def item_each_step() -> Iterator[Any]:
    model, optimizer = trained()
    total = 0.0
    for i in count():
        total += train(model, optimizer, i).item()
        yield total / (i + 1)


@idiom
def item_now_and_then() -> Iterator[Any]:
    model, optimizer = trained()
    for i in count():
        loss = train(model, optimizer, i)
        yield loss.item() if i % 10 == 0 else None


@idiom
def nothing_is_ever_read() -> Iterator[Any]:
    model, optimizer = trained()
    for i in count():
        train(model, optimizer, i)
        yield None


@idiom
def last_losses_are_kept() -> Iterator[Any]:
    model, optimizer = trained()
    losses: deque[Tensor] = deque(maxlen=10)
    for i in count():
        losses.append(train(model, optimizer, i).detach())
        yield sum(x.item() for x in losses) / len(losses) if i % 10 == 9 else None


@idiom
def mean_of_stacked_losses() -> Iterator[Any]:
    model, optimizer = trained()
    losses: list[Tensor] = []
    for i in count():
        losses.append(train(model, optimizer, i).detach())
        mean = None
        if len(losses) == 10:
            mean = Tensor.stack(losses).mean().item()
            losses.clear()
        yield mean


@idiom(keeps=1)
def all_losses_are_kept() -> Iterator[Any]:
    model, optimizer = trained()
    losses = []
    for i in count():
        losses.append(train(model, optimizer, i))
        yield losses[-1].item() if i % 20 == 0 else None


@idiom
def running_mean_of_losses_as_numbers() -> Iterator[Any]:
    model, optimizer = trained()
    mean = None
    for i in count():
        loss = train(model, optimizer, i).item()
        mean = loss if mean is None else 0.9 * mean + 0.1 * loss
        yield mean


@idiom
def running_sum_of_losses() -> Iterator[Any]:
    model, optimizer = trained()
    total: Any = 0.0
    for i in count():
        total = total + train(model, optimizer, i).detach()
        yield total.item() if i % 4 == 3 else None


@idiom
def running_sum_in_place() -> Iterator[Any]:
    model, optimizer = trained()
    total = Tensor.zeros(1)
    for i in count():
        total += train(model, optimizer, i).detach()
        yield total.item() if i % 4 == 3 else None


@idiom
def metrics_in_a_dict() -> Iterator[Any]:
    model, optimizer = trained()
    sums = {"loss": Tensor(0.0), "largest": Tensor(-1.0), "seen": 0}
    for i in count():
        loss = train(model, optimizer, i).detach()
        sums["loss"] = sums["loss"] + loss
        sums["largest"] = sums["largest"].maximum(loss)
        sums["seen"] += 8
        yield (sums["loss"] / sums["seen"]).item(), sums["largest"].item() if i % 10 == 9 else None


@idiom
def averages_that_are_never_read() -> Iterator[Any]:
    model, optimizer = trained()
    average = [p.detach() for p in model.parameters()]
    for i in count():
        loss = train(model, optimizer, i)
        average = [a * 0.9 + p.detach() * 0.1 for a, p in zip(average, model.parameters())]
        yield loss.item()


@idiom
def momentum_by_hand() -> Iterator[Any]:
    model = network()
    velocity = {k: p.detach() * 0 for k, p in model.named_parameters()}
    for i in count():
        loss = loss_of(model, i)
        loss.backward()
        with no_grad():
            for k, p in model.named_parameters():
                velocity[k] = velocity[k] * 0.9 + p.grad
                p -= 0.05 * velocity[k]
                p.grad = None
        yield loss.item()


@idiom
def confusion_matrix_in_place() -> Iterator[Any]:
    model = nn.Linear(4, 3)
    counts = Tensor.zeros(3, 3).contiguous().realize()
    for i in count():
        x, _ = batch(i)
        with no_grad():
            guess = model(Tensor(x)).argmax(1)
            truth = Tensor(x.argmax(1) % 3)
            counts += F.one_hot(truth, 3).float().T @ F.one_hot(guess, 3).float()
        yield counts.numpy() if i % 5 == 4 else None
