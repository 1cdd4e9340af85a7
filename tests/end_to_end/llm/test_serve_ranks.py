"""The server on two nodes: the same texts as on one, and what its clients hear when a node is lost."""

from __future__ import annotations

import os
import signal
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

if MISSING := [name for name in ("starlette", "uvicorn", "openai") if find_spec(name) is None]:
    pytest.skip(f'the server\'s tests need {", ".join(MISSING)}: pip install ".[test]"', allow_module_level=True)

import numpy as np
import openai

from manygrad import world
from manygrad.launcher.api import launch
from manygrad.llm.engine.batch import Request, SampledToken
from manygrad.llm.engine.writer import SamplingParams
from manygrad.llm.serve.ranks import SHORT, decode, decode_report, encode, encode_report, in_two
from manygrad.llm.serve.scheduler import Report, StepWork
from tests.end_to_end.llm.serving import LIMIT_S, PROGRAM, Served, serving
from tests.end_to_end.llm.tiny import write_model


def worker(served: Served, rank: int) -> psutil.Process:
    """Of the job that listens at the server's port."""
    known = {}
    for process in psutil.process_iter():
        if process.uids().real == os.getuid():
            try:
                known[process.pid] = process, process.environ()
            except psutil.Error:
                continue
    (first,) = [e for p, e in known.values() if any(c.laddr.port == served.port for c in listening(p))]
    job = first["MANYGRAD_JOB"]
    (found,) = [p for p, e in known.values() if e.get("MANYGRAD_JOB") == job and e.get("RANK") == str(rank)]
    return found


def listening(process: psutil.Process) -> list[psutil._common.pconn]:
    try:
        return [c for c in process.net_connections("tcp4") if c.status == psutil.CONN_LISTEN]
    except psutil.Error:
        return []


def test_two_nodes_write_the_same_texts_until_one_is_lost(tmp_path: Path) -> None:
    model = write_model(tmp_path, context=65536)
    launcher = [sys.executable, "-P", "-u", "-m", "manygrad.launcher.cli", "--nodes", "2"]
    options = ["--model", str(model), "--name", "tiny", "--port", "0", "--slots", "2", "--max-model-len", "65536"]
    with serving(*launcher, "--run-dir", str(tmp_path / "run"), *PROGRAM, "--", *options) as served:
        complete = served.client.completions.create
        given = {"model": "tiny", "max_tokens": 12, "extra_body": {"ignore_eos": True}}
        # a prompt that is longer than the first message to the other rank
        for prompt, said in (("abc", "EysyYJfY"), ([3, 4, 5] * 400, None), ("abc", "EysyYJfY")):
            one = complete(prompt=prompt, temperature=0, **given).choices[0]
            assert one.finish_reason == "length" and said in (None, one.text)
        drawn = {complete(prompt="abc", temperature=1, seed=3, **given).choices[0].text for _ in range(2)}
        assert len(drawn) == 1

        stream = complete(prompt="a", stream=True, **{**given, "max_tokens": 60000})
        next(iter(stream))
        heard = []

        def ask() -> None:
            try:
                complete(prompt="a", **{**given, "max_tokens": 60000})
            except openai.APIStatusError as error:
                heard.append(error)

        whole = threading.Thread(target=ask)
        whole.start()
        served.wait_for("llm_texts_running", 2)
        worker(served, 1).kill()
        with pytest.raises(openai.APIError, match="the model has stopped: .*rank 1"):
            list(stream)
        whole.join(LIMIT_S)
        assert heard and heard[0].status_code == 503 and "rank 1" in heard[0].message
        assert served.process.wait(LIMIT_S) == 137
        served.reader.join(LIMIT_S)
        assert "launcher: rank 1 failed" in "".join(served.out)


def test_interrupt_finishes_what_runs_on_all_nodes(tmp_path: Path) -> None:
    model = write_model(tmp_path, context=65536)
    launcher = [sys.executable, "-P", "-u", "-m", "manygrad.launcher.cli", "--nodes", "2"]
    options = ["--model", str(model), "--name", "tiny", "--port", "0", "--slots", "2", "--max-model-len", "8192"]
    with serving(*launcher, "--run-dir", str(tmp_path / "run"), *PROGRAM, "--", *options) as served:
        complete = served.client.completions.create
        given = {"model": "tiny", "prompt": "a", "temperature": 0, "extra_body": {"ignore_eos": True}}
        whole = complete(max_tokens=2000, **given).choices[0].text
        stream = complete(max_tokens=2000, stream=True, **given)
        pieces = [next(iter(stream)).choices[0].text]
        served.process.send_signal(signal.SIGINT)
        with pytest.raises(openai.InternalServerError) as refused:
            while True:  # until the signal has arrived
                complete(max_tokens=1, **given)
        assert refused.value.status_code == 503 and refused.value.body["code"] == "shutting_down"
        pieces += [event.choices[0].text for event in stream]
        assert "".join(pieces) == whole
        assert served.process.wait(LIMIT_S) == 0, "".join(served.out)
        assert "SIGINT goes to rank 0, whose script ends by itself" in "".join(served.out)


def test_interrupt_right_after_listening(tmp_path: Path) -> None:
    model = write_model(tmp_path, context=1024)
    launcher = [sys.executable, "-P", "-u", "-m", "manygrad.launcher.cli", "--nodes", "2"]
    options = ["--model", str(model), "--port", "0", "--slots", "1", "--max-model-len", "128"]
    with serving(*launcher, "--run-dir", str(tmp_path / "run"), *PROGRAM, "--", *options) as served:
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(LIMIT_S) == 0, "".join(served.out)


def test_what_the_ranks_are_told() -> None:
    request = Request((1, 2, 3), 5, SamplingParams(0.1, 3, 0.30000000000000004, None, 1.1, 2**32 - 1), True)
    for work in (
        StepWork(),
        StepWork(((0, 7, request), (1, 8, Request((1,), 1))), (1, 2), ((9, ('a"é🦙', "", (101, 102))),), True),
    ):
        assert decode(encode(work)) == work
    for report in (Report(), Report((SampledToken(7, 8), SampledToken(9, 2**31, "stop")), 1, 2, 3, 4)):
        assert decode_report(encode_report(report)) == report


@pytest.mark.parametrize("size", [0, 1, SHORT - 5, SHORT - 4, SHORT - 3, 2 * SHORT, 2 * SHORT + 1, 9999])
def test_long_messages_are_two(size: int) -> None:
    lengths = []

    def exchange(rows: np.ndarray) -> np.ndarray:
        lengths.append(rows.shape)
        return rows

    sent = [b"\1" * 3, b"\2" * size, b""]
    assert in_two(sent, exchange) == sent
    assert len(lengths) == 1 + (size > SHORT - 4) and lengths[0] == (3, SHORT)


def tell(replicas: int) -> int:
    """All ranks tell each other this and that; how many first ranks heard what all said."""
    from manygrad.llm.serve.ranks import Ranks

    ranks, heard = Ranks(replicas), 0
    for count in (0, 3, 200, 1, 900, 900, 0):
        # (of one replica the message is long at times)
        reports = [
            Report(tuple(SampledToken(i, r) for i in range(count if r == replicas - 1 else 2)), r)
            for r in range(replicas)
        ]
        found = ranks.gather(reports[ranks.replica])
        assert found == (reports if ranks.is_first else [reports[ranks.replica]])
        work = StepWork(tuple((r, r, Request((1,) * count, 3)) for r in range(replicas)))
        assert ranks.share(work if world.rank == 0 else StepWork()) == work
        heard += ranks.is_first
    return heard


@pytest.mark.parametrize("replicas", [2, 4])
def test_first_ranks_hear_of_all_replicas(tmp_path: Path, replicas: int) -> None:
    heard = launch(tell, replicas, nodes=4, run_dir=tmp_path / "run")
    assert heard == [7 if rank % (4 // replicas) == 0 else 0 for rank in range(4)]
