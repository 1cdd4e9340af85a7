"""Loops whose data, or steps, come from loaders and threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from queue import Queue
from typing import Any

import numpy as np

from manygrad import Tensor, nn, no_grad
from manygrad.nn import functional as F
from tests.endurance.idiom import batch, idiom, loss_of, network, train, trained


class Rows:
    """A dataset that makes its samples."""

    def __init__(self, as_tensors: bool = False) -> None:
        self.as_tensors = as_tensors

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> Any:
        x = np.random.default_rng(i).standard_normal(4).astype(np.float32)
        return (Tensor(x) * 2, 1.0) if self.as_tensors else (x, np.float32(x.sum()))


def over(loader: Any) -> Iterator[Any]:
    """Trains for epochs without end."""
    model, optimizer = trained()
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x)[:, 0], y)
            loss.backward()
            optimizer.step()
            yield loss.item()


@idiom
def loader() -> Iterator[Any]:
    yield from over(nn.data.DataLoader(Rows(), 8, shuffle=True, num_workers=0))


@idiom
def loader_with_threads() -> Iterator[Any]:
    yield from over(nn.data.DataLoader(Rows(), 8, shuffle=True, num_workers=2))


@idiom
def loader_of_tensors() -> Iterator[Any]:
    yield from over(nn.data.DataLoader(Rows(as_tensors=True), 8, num_workers=1))


@idiom
def loader_over_devices() -> Iterator[Any]:
    devices = ("CPU:0", "CPU:1")
    data = nn.data.DataLoader(Rows(), 8, devices=devices)
    model = network()
    for p in model.parameters():
        p.shard_(devices)
    while True:
        for x, y in data:
            with no_grad():
                yield F.mse_loss(model(x)[:, 0], y).item()


@idiom
def loader_left_in_the_middle() -> Iterator[Any]:
    data = nn.data.DataLoader(Rows(), 8, num_workers=1)
    while True:
        for x, _ in data:
            yield x.sum().item()
            break


@idiom
def loader_made_anew() -> Iterator[Any]:
    while True:
        for x, _ in nn.data.DataLoader(Rows(), 8, num_workers=1):
            yield x.sum().item()


@idiom
def batches_sampled_from_a_tensor() -> Iterator[Any]:
    x, y = map(Tensor, batch(0, 32))
    model, optimizer = trained()
    for _ in count():
        rows = Tensor.randint(8, low=0, high=32)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        yield loss.item()


@idiom
def batches_cut_from_a_tensor() -> Iterator[Any]:
    x, y = map(Tensor, batch(0, 32))
    model, optimizer = trained()
    for i in count():
        at = 8 * (i % 4)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x[at : at + 8]), y[at : at + 8])
        loss.backward()
        optimizer.step()
        yield loss.item()


def produced(make: Any) -> Iterator[Any]:
    """What a thread makes, by way of a queue."""
    queue: Queue[Any] = Queue(maxsize=2)
    over = threading.Event()

    def produce() -> None:
        for i in count():
            if over.is_set():
                return
            queue.put(make(i))

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        while True:
            yield queue.get()
    finally:
        over.set()
        while thread.is_alive():
            while not queue.empty():
                queue.get()
            thread.join(0.01)


@idiom
def arrays_from_a_thread() -> Iterator[Any]:
    model, optimizer = trained()
    for x, y in produced(batch):
        optimizer.zero_grad()
        loss = F.mse_loss(model(Tensor(x)), Tensor(y))
        loss.backward()
        optimizer.step()
        yield loss.item()


@idiom
def tensors_from_a_thread() -> Iterator[Any]:
    model, optimizer = trained()
    for x, y in produced(lambda i: tuple(map(Tensor, batch(i)))):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        yield loss.item()


@idiom
def computed_tensors_from_a_thread() -> Iterator[Any]:
    model = network()
    for x in produced(lambda i: ((Tensor(batch(i)[0]) - 0.5) * 2).realize()):
        with no_grad():
            yield model(x).sum().item()


@idiom
def a_thread_for_each_step() -> Iterator[Any]:
    model, optimizer = trained()
    for i in count():
        losses: list[Tensor] = []
        thread = threading.Thread(target=lambda i=i, losses=losses: losses.append(train(model, optimizer, i)))
        thread.start()
        thread.join()
        yield losses[0].item()


@idiom
def a_pool_that_evaluates() -> Iterator[Any]:
    model = network()

    def value(i: int) -> float:
        with no_grad():
            return loss_of(model, i).item()

    with ThreadPoolExecutor(2) as pool:
        for i in count():
            yield list(pool.map(value, range(4 * i, 4 * i + 4)))


@idiom
def models_trained_in_threads() -> Iterator[Any]:
    """Each thread has a model; they take turns as they like."""
    with ThreadPoolExecutor(2) as pool:
        pairs = [trained() for _ in range(2)]
        for i in count():
            done = [pool.submit(lambda p=p, i=i: train(*p, i).item()) for p in pairs]
            yield [d.result() for d in done]


@idiom
def shared_model_in_threads() -> Iterator[Any]:
    """One model, trained by threads one after the other."""
    model, optimizer = trained()
    with ThreadPoolExecutor(2) as pool:
        for i in count():
            yield pool.submit(lambda i=i: train(model, optimizer, i).item()).result()
