"""What is compared before a plan runs: that the wait for it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from manygrad import Tensor
from manygrad.runtime.agreement import agreement
from manygrad.runtime.current import use
from manygrad.runtime.exchange.communication import Communication, Hooks
from manygrad.runtime.runtime import Runtime
from manygrad.tensor.environment import Context


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Threads wait at it, and go on when the test is over."""
    event = threading.Event()
    yield event
    event.set()


def begun(values: int, tell: Callable[..., Any]) -> agreement.Agreement:
    """A second agreement on a plan that reads so many values, alike on all ranks; `tell` takes their digests."""
    leaves = [Tensor(np.full(4, i, np.float32)).realize().uop for i in range(values)]
    plan: Any = SimpleNamespace(key=0x5EED, leaves=tuple(range(values)), cut=(), by_all=True, outline=lambda: "")
    hooks = Hooks(make_plan=lambda *plan: lambda: None, compare_values=tell)
    with use(Runtime()) as runtime:
        runtime.epoch.communication = Communication(hooks=hooks, compared={plan.key: 0})
        return agreement.Agreement(plan, leaves[0], leaves)


def test_digests_that_do_not_come_are_named(gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    digest: Callable[[Any], str] = agreement.digest
    made: list[str] = []

    def stuck(b: Any) -> str:
        if len(made) == 2:
            gate.wait()
        made.append(digest(b))
        return made[-1]

    monkeypatch.setattr(agreement, "digest", stuck)
    with Context(COLLECTIVE_TIMEOUT_S=0.2):
        a = begun(3, lambda name, values: None)
        with pytest.raises(
            TimeoutError,
            match=(
                r"waited 0.2 s for the digest of float32 \(4,\).* \(2 of 3 are made\).*plan "
                r"0x.*5eed.*COLLECTIVE_TIMEOUT_S"
            ),
        ):
            a.end()


def test_digests_that_are_not_taken_are_named(gate: threading.Event) -> None:
    with Context(COLLECTIVE_TIMEOUT_S=0.2):
        a = begun(2, lambda name, values: gate.wait())
        with pytest.raises(TimeoutError, match=r"the digests to be handed to the launcher \(2 of 2 are made\)"):
            a.end()


def test_digests_that_get_on_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """All together take longer than the deadline; each is progress."""
    told: list[Any] = []
    step = threading.Event()
    digest: Callable[[Any], str] = agreement.digest

    def slow(b: Any) -> str:
        step.wait(0.3)
        return digest(b)

    monkeypatch.setattr(agreement, "digest", slow)
    with Context(COLLECTIVE_TIMEOUT_S=1.0):
        begun(5, lambda name, values: told.extend(values)).end()
    assert [slot for slot, _, _ in told] == list(range(5))


def refuse(name: str, values: Any) -> None:
    raise ValueError("the launcher does not take them")


@pytest.mark.parametrize("asked", [True, False])
def test_an_error_in_the_thread_of_the_digests_is_raised(asked: bool) -> None:
    """By the plan that waits for them; where its kernels could not be compiled, and nobody waits, by the scope."""
    with use(Runtime()) as runtime:
        leaf = Tensor(np.full(4, 1.0, np.float32)).realize().uop
        plan: Any = SimpleNamespace(key=0x5EED, leaves=(0,), cut=(), by_all=True, outline=lambda: "")
        hooks = Hooks(make_plan=lambda *plan: lambda: None, compare_values=refuse)
        runtime.epoch.communication = Communication(hooks=hooks, compared={plan.key: 0})
        a = agreement.Agreement(plan, leaf, [leaf])
        assert a.thread is not None
        a.thread.join(20)
        with pytest.raises(ValueError, match="does not take them") as raised:
            a.end() if asked else runtime.epoch.threads.check()
        assert "(this has ended the thread manygrad-digest)" in raised.value.__notes__
        runtime.epoch.threads.check()
        assert runtime.epoch.threads.close(1.0) == []
