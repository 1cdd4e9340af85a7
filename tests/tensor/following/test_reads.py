"""Values that are read before a step ends: at a loss, after calls that write, one after the other."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from manygrad import Context, Tensor, nn
from manygrad.nn import functional as F
from manygrad.runtime.jit.calls import CapturedCalls
from manygrad.tensor.deferred.trace import THREAD
from manygrad.tensor.environment import FOLLOW
from tests.tensor.following.loops import LAYERS, Counts, Training, array, close, same

pytestmark = pytest.mark.skipif(not FOLLOW, reason="FOLLOW=0: no call is put off")


def test_a_loss_that_is_read_before_backward(counts: Counts) -> None:
    """The read is one replay, the rest of the step another, whatever of the step is kept."""

    def run(counts: Counts | None = None) -> list[np.ndarray]:
        loop, found = Training(nn.Tanh()), []
        kept: list[Any] = []
        for i in range(9):
            if counts is not None and i == 5:
                counts.replays = counts.captures = counts.flushes = 0
            loop.optimizer.zero_grad()
            out = loop.model(Tensor(array(5, 4, seed=i)))
            loss = F.mse_loss(out, Tensor(array(5, 3)))
            found.append(np.array(loss.item()))
            loss.backward()
            loop.optimizer.step()
            kept += [out, loss]
        return [*found, *loop.state(), *(t.numpy() for t in kept)]

    same(run)
    run(counts)
    assert (counts.replays, counts.captures, counts.flushes) == (8, 0, 0)


WRITING_LAYERS: dict[str, Callable[[], list[nn.Module]]] = {
    "dropout": lambda: [nn.Dropout(0.4), nn.Tanh()],
    "batch norm": lambda: [nn.BatchNorm1d(8), nn.Tanh()],
    "both": lambda: [nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Dropout(0.3), nn.LayerNorm(8), nn.Dropout(0.2)],
}


@pytest.mark.parametrize("name", WRITING_LAYERS)
def test_a_read_after_calls_that_write(name: str, counts: Counts) -> None:
    """What they write is written once, at the read, and not when the rest of the step is made."""

    def run(counts: Counts | None = None, kind: str = "loss") -> list[np.ndarray]:
        Tensor.manual_seed(5)
        loop, found = Training(*WRITING_LAYERS[name]()), []
        kept: list[Tensor] = []
        for i in range(12):
            if counts is not None and i == 8:
                counts.replays = counts.captures = counts.flushes = 0
            loop.optimizer.zero_grad()
            out = loop.model(Tensor(array(5, 4, seed=i)))
            loss = F.mse_loss(out, Tensor(array(5, 3)))
            if kind != "after":
                found.append(np.array(loss.item()))
            if kind == "two":
                found.append(out.sum().numpy())
            if kind == "more":
                loss = loss + out.abs().mean()
            if kind == "another way" and i > 5:
                loss = loss * 0.5 if i % 2 else loss + out.square().mean()
            if kind == "another pass" and i % 3 == 2:
                again = F.mse_loss(loop.model(Tensor(array(5, 4, seed=50 + i))), Tensor(array(5, 3)))
                found.append(np.array(again.item()))
                again.backward()
            if kind == "no more" and i % 2:
                continue
            if kind == "state":
                found += [t.numpy() for t in loop.model.state_dict().values()]
            loss.backward()
            if kind == "after":
                found.append(np.array(loss.item()))
            loop.optimizer.step()
            if kind == "kept":
                kept += [out, loss]
        return [*found, *loop.state(), *(t.numpy() for t in kept), Tensor.rand(3).numpy()]

    for kind in ("loss", "kept", "after", "two", "more", "another way", "another pass", "no more", "state"):
        same(lambda kind=kind: run(None, kind))  # type: ignore[misc]
    for kind in ("loss", "kept", "more", "after"):
        run(counts, kind)
        assert counts.replays >= 8 and (counts.captures, counts.flushes) == (0, 0), kind


@pytest.mark.parametrize("name", ["plain", "dropout", "batch norm"])
@pytest.mark.parametrize("read", [False, True])
def test_a_value_that_two_optimisers_train_from(name: str, read: bool) -> None:
    """As in a GAN: the first one's step ends a trace, and the gradient of a value that lives on flows on."""

    def run() -> list[np.ndarray]:
        Tensor.manual_seed(2)
        judge = nn.Sequential(nn.Linear(3, 4), *LAYERS["plain"](), nn.Linear(4, 1))
        learns = nn.optim.SGD(judge.parameters(), lr=0.1)
        loop, found = Training(*LAYERS[name]()), []
        loop.optimizer.param_groups[0]["eps"] = 1e-3  # (a bias before batch norm has no gradient but rounding)
        for i in range(9):
            fake = loop.model(Tensor(array(5, 4, seed=i)))
            if read:
                found.append(np.array(fake.sum().item()))
            learns.zero_grad()
            loss = judge(fake.detach()).square().mean()
            found.append(np.array(loss.item()))
            loss.backward()
            learns.step()
            loop.optimizer.zero_grad()
            loss = (judge(fake) - 1).square().mean()
            found.append(np.array(loss.item()))
            loss.backward()
            found += loop.state()
            loop.optimizer.step()
        return found

    (close if name == "batch norm" else same)(run)


def test_losses_of_several_batches_that_are_read_before_their_backward() -> None:
    """Each has the masks of its own time."""

    def run() -> list[np.ndarray]:
        loop, found = Training(nn.Dropout(0.5), nn.Tanh()), []
        for i in range(9):
            loop.optimizer.zero_grad()
            losses = []
            for k in range(3):
                loss = F.mse_loss(loop.model(Tensor(array(5, 4, seed=3 * i + k))), Tensor(array(5, 3)))
                found.append(np.array(loss.item()))
                losses.append(loss)
            for loss in losses:
                loss.backward()
            found.append(loop.model[0].weight.grad.numpy())
            loop.optimizer.step()
        return [*found, *loop.state()]

    same(run)


def test_what_a_kept_loss_says_of_its_gradient() -> None:
    """After the step it has none, and says why, as where calls are made at once; so does what was read before."""

    def run(read: bool) -> list[str]:
        loop, found = Training(nn.Tanh()), []
        kept: list[Tensor] = []
        for i in range(8):
            loop.optimizer.zero_grad()
            out = loop.model(Tensor(array(5, 4, seed=i)))
            loss = F.mse_loss(out, Tensor(array(5, 3)))
            if read:
                loss.item()
            loss.backward()
            loop.optimizer.step()
            kept += [out, loss]
        for t in kept[6:]:
            found.append(str(t.requires_grad))
            with pytest.raises(RuntimeError) as error:
                t.sum().backward()
            found.append(re.sub(r" of shape \(.*?\)", "", str(error.value)))
        return found

    for read in (False, True):
        with Context(FOLLOW=0):
            want = run(read)
        assert run(read) == want
        assert any("was overwritten" in text for text in want) == read
        assert all("read after that had been written to" in text for text in want[1 :: 4 if read else 2])


def test_data_that_decides_is_read_each_time() -> None:
    def run() -> list[np.ndarray]:
        found = []
        for i in range(8):
            x = Tensor(array(6, seed=i))
            y = x * 2 if x.sum().item() > 0 else x - 1
            found += [y.numpy(), x[x > 0].numpy()]
        return found

    same(run)


READS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "a view, then its base": lambda h: [h[1], h],
    "a base, then its view": lambda h: [h, h[1]],
    "two views": lambda h: list(h.chunk(2)),
    "a view of a view": lambda h: [h.reshape(-1)[2:9].reshape(7, 1), h.T, h],
    "what is made of what is read": lambda h: [h, h.exp() * 3, h.exp()],
    "what is made of a part": lambda h: [h[0], (h * h).sum(), h],
    "the same twice": lambda h: [h * 2, h * 2],
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("write", [False, True])
def test_values_read_one_after_the_other(name: str, wait: bool, write: bool, counts: Counts) -> None:
    """A read stores what is one storage with it, and what is made of it reads it there; a write is seen in all."""

    def run() -> list[np.ndarray]:
        Tensor.manual_seed(1)
        layer, found = nn.Linear(4, 6), []
        for i in range(8):
            h = layer(Tensor(array(3, 4, seed=i))).tanh()
            if write:
                h = h.detach()
            values = READS[name](h)
            for t in values:
                found.append(t.numpy())
                if wait:
                    found.append(h.numpy())
                if write:
                    t += 1.0
            found += [t.numpy() for t in values]
            later = (values[0] * 3 + values[-1].sum()).sum()
            found += [h.numpy(), later.numpy()]
        return found

    same(run)
    assert counts.replays >= 5 or write


def test_values_that_are_read_one_by_one_ask_for_what_each_stands_on() -> None:
    """Predictions, kept with gradients on and read at the end: each read has the one batch that it needs as its input,
    not those of all others (sixty took half a minute)."""

    loop = Training(nn.Tanh())

    def run() -> list[np.ndarray]:
        found: list[np.ndarray] = []
        for k in range(4):
            kept = [loop.model(Tensor(array(5, 4, seed=7 * k + i))).detach() for i in range(7)]
            found += [t.numpy() for t in kept]
        return found

    same(run)
    reads = [e.replay.captured for e in THREAD.trace.tree.captures if isinstance(e.replay, CapturedCalls)]
    assert reads and all(len(c.inputs) == 1 for c in reads)
