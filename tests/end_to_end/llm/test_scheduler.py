"""Between the event loop and the model's loop: what waits, what goes, how it ends. No model, no sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from manygrad.llm.engine.batch import Request, SampledToken
from manygrad.llm.serve.answers import Answer, event
from manygrad.llm.serve.errors import ApiError
from manygrad.llm.serve.metrics import Metrics
from manygrad.llm.serve.scheduler import EmbedRequest, Given, Out, Report, Scheduler, StepWork

TEXT = Request((1,), 4)


def with_desk(check: Callable[[Scheduler], Awaitable[None]], most: int = 3, wait_s: float = 60.0) -> Scheduler:
    """`check` in an event loop, at a scheduler that is its own."""
    scheduler = Scheduler(most, wait_s)

    async def run() -> None:
        scheduler.loop = asyncio.get_running_loop()
        await asyncio.wait_for(check(scheduler), 10)

    asyncio.run(run())
    return scheduler


def take(scheduler: Scheduler, slots: int, pages: int, busy: bool) -> StepWork:
    """With one replica."""
    scheduler.hear([Report(running=int(busy), slots=slots, unpromised=pages, pages=pages)])
    return scheduler.take()


async def next_of(out: Out) -> tuple[int, Given]:
    return await asyncio.wait_for(out.get(), 5)


def test_texts_wait_for_slots_in_their_order() -> None:
    async def check(scheduler: Scheduler) -> None:
        keys, out = scheduler.submit([TEXT, TEXT])
        (third,), _ = scheduler.submit([TEXT])
        with pytest.raises(ApiError, match="3 texts wait already") as full:
            scheduler.submit([TEXT])
        assert full.value.status == 429 and full.value.headers
        assert take(scheduler, 1, 9, False) == StepWork(admit=((0, keys[0], TEXT),))
        scheduler.leave([third])  # it has not begun
        assert take(scheduler, 1, 9, True) == StepWork(admit=((0, keys[1], TEXT),), cancel=(third,))
        scheduler.give([(keys[0], SampledToken(keys[0], 5)), (keys[1], SampledToken(keys[1], 6, "length"))])
        assert [await next_of(out), await next_of(out)] == [
            (keys[0], SampledToken(keys[0], 5)), (keys[1], SampledToken(keys[1], 6, "length"))
        ]  # fmt: skip
        scheduler.leave(keys)  # one has ended, the other one runs
        assert take(scheduler, 2, 9, True) == StepWork(cancel=(keys[0],))
        scheduler.give([(keys[0], SampledToken(keys[0], 7))])  # (the step that ran meanwhile)
        await asyncio.sleep(0)
        assert out.empty() and not scheduler.outs

    with_desk(check)


def test_texts_wait_for_pages_in_their_order() -> None:
    async def check(scheduler: Scheduler) -> None:
        small, large = Request((1,), 32), Request((1,), 65)
        keys, _ = scheduler.submit([small, large, small])
        (vectors,), _ = scheduler.submit([("a",)])
        work = take(scheduler, 4, 2, True)  # the large one does not fit, and is not passed
        assert work == StepWork(admit=((0, keys[0], small),), embed=((vectors, ("a",)),))
        assert take(scheduler, 4, 2, True) == StepWork()
        assert take(scheduler, 4, 4, True) == StepWork(admit=((0, keys[1], large), (0, keys[2], small)))

    with_desk(check, most=4)


def test_a_text_goes_to_the_replica_with_most_room() -> None:
    async def check(scheduler: Scheduler) -> None:
        small, large = Request((1,), 32), Request((1,), 65)
        keys, out = scheduler.submit([small, large, small, small, small])
        made = SampledToken(9, 5)
        scheduler.hear([Report(slots=2, unpromised=9), Report((made,), 1, slots=3, unpromised=2), Report()])
        work = scheduler.take()  # the large one has too many pages for the second, whose slots are more
        assert [(replica, key) for replica, key, _ in work.admit] == list(zip((1, 0, 1, 0), keys))
        assert scheduler.placed == {0: 2, 1: 2}
        scheduler.hear([Report(slots=1, unpromised=1), Report(slots=1, unpromised=2), Report(running=2)])
        assert scheduler.take().admit == ((1, keys[4], small),)  # (as many slots, more pages)
        (left,), _ = scheduler.submit([large])
        scheduler.hear([Report(slots=1, unpromised=2), Report(slots=9, unpromised=2), Report(running=2)])
        assert scheduler.take() == StepWork()
        scheduler.drain(30)
        scheduler.hear(
            [Report(slots=9, unpromised=9), Report(slots=9, unpromised=9, made=(SampledToken(keys[1], 7),)), Report()]
        )
        assert await next_of(out) == (keys[1], SampledToken(keys[1], 7))
        assert scheduler.take() == StepWork(((0, left, large),))  # (the first of two that are alike)
        scheduler.hear([Report(), Report(), Report(running=1)])
        assert not scheduler.take().stop  # the last one writes
        scheduler.hear([Report(), Report(), Report()])
        assert scheduler.take().stop

    with_desk(check, most=6)


def test_vectors_are_made_a_chunk_a_step() -> None:
    async def check(scheduler: Scheduler) -> None:
        keys, out = scheduler.submit([("a",), ("b",)])
        assert take(scheduler, 0, 9, True).embed == ((keys[0], ("a",)),)
        assert take(scheduler, 0, 9, True).embed == ((keys[1], ("b",)),)
        found = EmbedRequest(np.zeros((1, 2), np.float32), 3)
        scheduler.give([(keys[1], found)])
        assert await next_of(out) == (keys[1], found) and list(scheduler.outs) == [keys[0]]

    with_desk(check)


def test_who_waits_too_long_is_told() -> None:
    async def check(scheduler: Scheduler) -> None:
        _, out = scheduler.submit([TEXT])
        time.sleep(0.02)
        assert take(scheduler, 0, 9, True) == StepWork()
        _, error = await next_of(out)
        assert isinstance(error, ApiError) and (error.status, error.code) == (503, "queue_timeout")
        assert not scheduler.outs and take(scheduler, 1, 9, True) == StepWork()

    with_desk(check, wait_s=0.01)


def test_draining_finishes_what_is_there() -> None:
    async def check(scheduler: Scheduler) -> None:
        (key,), _ = scheduler.submit([TEXT])
        scheduler.drain(30)
        with pytest.raises(ApiError, match="shutting down") as refused:
            scheduler.submit([TEXT])
        assert (refused.value.status, refused.value.code) == (503, "shutting_down")
        assert take(scheduler, 1, 9, False) == StepWork(admit=((0, key, TEXT),))
        assert not take(scheduler, 1, 9, True).stop
        assert take(scheduler, 1, 9, False).stop
        scheduler.drain(30)  # for a second time: at once
        assert take(scheduler, 1, 9, True).stop

    with_desk(check)


def test_closing_tells_everybody_why() -> None:
    async def check(scheduler: Scheduler) -> None:
        (first, second), out = scheduler.submit([TEXT, TEXT])
        take(scheduler, 1, 9, False)
        scheduler.close("rank 1 was lost")
        told = dict([await next_of(out), await next_of(out)])
        assert all(isinstance(e, ApiError) and e.message == "rank 1 was lost" for e in told.values())
        assert set(told) == {first, second} and take(scheduler, 2, 9, False).stop

    with_desk(check)


def test_metrics_are_what_prometheus_reads() -> None:
    metrics = Metrics()
    metrics.requests["/v1/completions", 200] += 2
    for seconds in (0.001, 0.02, 0.02, 100.0):
        metrics.between.add(seconds)
    reports = [Report(running=1, pages=1), Report(running=3, pages=2)]
    lines = metrics.text(reports, {1: 7}, waiting=2, slots=4, pages=8).splitlines()
    assert 'llm_requests_total{path="/v1/completions",status="200"} 2' in lines and "llm_texts_waiting 2" in lines
    assert {"llm_pages 16", "llm_pages_free 3", "llm_slots 8", "llm_texts_running 4"} <= {*lines}
    for name, values in (("running", (1, 3)), ("total", (0, 7))):
        assert {f'llm_replica_texts_{name}{{replica="{i}"}} {value}' for i, value in enumerate(values)} <= {*lines}
    buckets = [line for line in lines if line.startswith("llm_between_tokens_seconds")]
    assert buckets[0].endswith('{le="0.005"} 1') and buckets[2].endswith('{le="0.025"} 3')
    assert buckets[-3:] == [
        'llm_between_tokens_seconds_bucket{le="+Inf"} 4', "llm_between_tokens_seconds_sum 100.041",
        "llm_between_tokens_seconds_count 4",
    ]  # fmt: skip
    kinds = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(kinds) == len(set(kinds)) and all(any(x.startswith(k) for x in lines) for k in kinds)


@pytest.mark.parametrize("chat", [False, True])
def test_events_of_a_stream_are_what_json_makes_of_them(chat: bool) -> None:
    answer = Answer("k", 'a "model"', chat)
    for index, text, reason in [
        (0, 'a"é\\\n\x00🦙</s>', ""),
        (1, "b", ""),
        (0, "", ""),
        (0, " ", "stop"),
        (1, "", "length"),
    ]:
        assert answer.event(index, text, reason) == event(answer.piece(index, text, reason))
