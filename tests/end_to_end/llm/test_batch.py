"""Many texts at once: each is what it would be alone, whatever the others do."""

from __future__ import annotations

from itertools import cycle

import numpy as np
import pytest

from manygrad import Tensor, nn
from manygrad.llm.engine.batch import Batch, Request, SampledToken
from manygrad.llm.engine.steps import Steps
from manygrad.llm.engine.writer import SamplingParams, Writer
from manygrad.llm.sharding import rules
from manygrad.llm.shared_heads import share_heads
from manygrad.runtime.devices import get_device
from manygrad.runtime.executors.items import GraphItem
from tests.end_to_end.llm.test_variants import decoder, reference
from tests.end_to_end.llm.variants import TOKENS

LENGTH = 128
CHOICES = (
    SamplingParams(),
    SamplingParams(0.9, seed=3),
    SamplingParams(1.2, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.3, seed=4),
    SamplingParams(repetition_penalty=1.4),
    SamplingParams(1.5, top_k=2, seed=5),  # (no top_p: neither has its row)
    SamplingParams(1.5, top_k=2, top_p=1.0, seed=5),
)


def requests(count: int, choices: tuple[SamplingParams, ...], rng: np.random.Generator) -> list[Request]:
    return [
        Request(tuple(rng.integers(3, 61, rng.integers(1, 70)).tolist()), int(rng.integers(1, 30)), choice)
        for _, choice in zip(range(count), cycle(choices))
    ]


def alone(writer: Writer, request: Request) -> list[int]:
    tokens = [writer.start(request.ids)]
    while len(tokens) < request.tokens:
        tokens.append(writer.write(tokens[-1]))
    return tokens


def batch_of(
    variant: str,
    slots: int,
    devices: tuple[str, ...] = (),
    ends: tuple[int, ...] = (),
    kind: str = "float32",
    tokens: int = 0,
) -> Batch:
    model = decoder(variant)
    share_heads(model, len(devices) or 1)
    model.reserve_pages(tokens or slots * LENGTH, LENGTH, kind)
    if devices:
        nn.shard_rules(model, rules(model, devices), devices)
    Tensor.realize(*model.parameters(), *model.buffers())
    return Batch(Steps(model, slots, LENGTH), ends)


def run(batch: Batch, asked: list[Request], rng: np.random.Generator, cancel: tuple[int, ...] = ()) -> dict[int, list]:
    """What was made of each, where texts arrive, and those of `cancel` go, at random moments."""
    made: dict[int, list[SampledToken]] = {i: [] for i in range(len(asked))}
    waiting, gone = list(range(len(asked))), set()
    while waiting or batch.busy:
        while waiting and batch.free and asked[waiting[0]].pages <= batch.pages.unpromised and rng.random() < 0.4:
            batch.admit(waiting[0], asked[waiting.pop(0)])
        for i in cancel:
            if i not in waiting and i not in gone and rng.random() < 0.2:
                batch.cancel(i)
                gone.add(i)
        for m in batch.step():
            made[m.key].append(m)
            assert m.key not in gone
        taken = [page for page in batch.pages.rows.flat if page]
        assert sorted([*taken, *batch.pages.free]) == list(range(1, batch.steps.pages + 1))  # each has one owner
    assert batch.pages.unpromised == len(batch.pages.free) == batch.steps.pages
    return made


@pytest.mark.parametrize(("variant", "devices"), [("llama", 1), ("gemma2", 2)])
def test_each_text_is_what_it_is_alone(variant: str, devices: int) -> None:
    names = tuple(f"CPU:{i}" for i in range(devices)) if devices > 1 else ()
    rng = np.random.default_rng(devices)
    asked = requests(12, CHOICES if devices == 1 else CHOICES[::2], rng)
    model = decoder(variant, LENGTH)
    writers = {choice: Writer(model, LENGTH, choice) for choice in CHOICES}
    want = [alone(writers[r.choice], r) for r in asked]
    batch = batch_of(variant, 4, names, tokens=LENGTH + 32)  # (fewer pages than four long texts need)
    if devices == 1:
        batch.warm_up()
    compiled = len(get_device("CPU").kernels.kernels)
    for cancel in ((), (1, 6)):
        made = run(batch, asked, rng, cancel)
        for i, row in made.items():
            tokens = [m.token for m in row]
            assert tokens == (want[i][: len(tokens)] if i in cancel else want[i]), (i, asked[i].choice)
            assert [m.reason for m in row if m.reason] == (["length"] if len(row) == asked[i].tokens else [])
    if devices == 1:
        assert len(get_device("CPU").kernels.kernels) == compiled
        captures = [*batch.steps.ends.values(), *batch.steps.blocks.values(), *batch.steps.draws.values()]
        assert {type(item) for capture in captures for item in capture.captured.items} == {GraphItem}


@pytest.mark.parametrize("window", [1, 33, 70, 500])
def test_what_a_window_shows_where_texts_grow_past_it(window: int) -> None:
    """A token sees its window alone, in one page and in several; blocks of 32 begin within it."""
    model = decoder("gemma3", LENGTH, sliding_window=window)
    writer, asked = Writer(model, LENGTH), [Request(tuple(TOKENS * 2), 40), Request(tuple(TOKENS[:3]), 125)]
    want = [alone(writer, r) for r in asked]
    for request, made in zip(asked, want):
        tokens = [*request.ids, *made]
        found = reference(model, tokens)[len(request.ids) - 1 : -1].argmax(-1)
        assert found.tolist() == made
    paged = decoder("gemma3", sliding_window=window)
    paged.reserve_pages(2 * LENGTH, LENGTH)
    batch = Batch(Steps(paged, 2, LENGTH))
    made = run(batch, asked, np.random.default_rng(0))
    assert [[m.token for m in row] for row in made.values()] == want


def test_a_text_ends_with_a_mark_of_the_end_and_its_slot_is_free() -> None:
    batch = batch_of("llama", 1)
    free = Request(tuple(TOKENS[:5]), 20)
    batch.admit("a", free)
    written = [m.token for _ in range(20) for m in batch.step()]
    at = next(i for i in range(1, 20) if written[i] not in written[:i])
    batch.ends = {written[at]}
    batch.admit("b", free)
    ended = [m for _ in range(at + 1) for m in batch.step()]
    assert [m.token for m in ended] == written[: at + 1] and ended[-1] == SampledToken("b", written[at], "stop")
    assert not batch.busy and not batch.step()
    batch.admit("c", Request(free.ids, 20, ignore_end=True))
    assert [m.token for _ in range(20) for m in batch.step()] == written
    drawn = []
    for key in ("c", "d"):  # a key may come again, with other settings
        batch.admit(key, Request(free.ids, 20, SamplingParams(1.0, seed=1), ignore_end=True))
        drawn.append([m.token for _ in range(20) for m in batch.step()])
    assert drawn[0] == drawn[1] != written


def test_what_does_not_fit_is_refused() -> None:
    batch = batch_of("llama", 1)
    for request, message in [
        (Request((), 1), "the prompt is empty"),
        (Request((3,), 0), "0 tokens were asked for: at least 1"),
        (Request((3,) * 100, 29), "the prompt's 100 tokens and 29 more do not fit the context of 128"),
    ]:
        with pytest.raises(ValueError, match=message):
            batch.admit(0, request)
    batch.admit(0, Request((3,), 1))
    with pytest.raises(ValueError, match="all 1 slots are taken"):
        batch.admit(1, Request((3,), 1))
    batch = batch_of("llama", 2, tokens=64)
    with pytest.raises(ValueError, match="the prompt's 60 tokens and 5 more do not fit the context of 64"):
        batch.admit(0, Request((3,) * 60, 5))
    batch.admit(0, Request((3,) * 4, 30))
    with pytest.raises(ValueError, match="it may need 1 pages, and 0 are left"):
        batch.admit(1, Request((3,), 1))
    batch.cancel(0)
    batch.admit(1, Request((3,), 1))
