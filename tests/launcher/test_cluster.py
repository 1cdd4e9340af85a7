"""The launcher's dealings with Ray, where a Ray of the test's own making says what Ray might say."""

from __future__ import annotations

import os
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from manygrad.errors import Infeasible
from manygrad.launcher import cluster, driver
from manygrad.launcher import guard as guard_module
from manygrad.launcher.cluster import Cluster
from manygrad.launcher.job import Job
from manygrad.launcher.places import Place, share


class Gone(Exception):
    """What this Ray raises when it is asked for anything."""


def attached(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, **ray: Any) -> tuple[Cluster, list[Any]]:
    """A cluster with two agents and a placement group in a Ray that was there before; and what Ray was asked for."""
    asked: list[Any] = []

    def ask(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> None:
            asked.append(name)
            if name in ray:
                ray[name]()

        return call

    monkeypatch.setitem(
        sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True, kill=ask("kill"), shutdown=ask("shutdown"))
    )
    monkeypatch.setattr(cluster, "_remove", ask("remove"))
    c = Cluster(Job("script", "train.py", nodes=2), str(tmp_path))
    c._agents, c._group = ["agent 0", "agent 1"], "group"
    return c, asked


def gone() -> None:
    raise Gone("the GCS is dead\nand more")


def test_all_is_given_back_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    c, asked = attached(monkeypatch, tmp_path)
    assert c.stop(fast=True) == "" and asked == ["kill", "kill", "remove", "shutdown"]


def test_ray_is_left_after_who_listens_to_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """A question to a Ray that was shut down ends the process (exit code 1, no word of Python's)."""
    c, asked = attached(monkeypatch, tmp_path)

    def wait(*_: Any, **__: Any) -> tuple[list[Any], list[Any]]:
        asked.append("wait")
        time.sleep(0.2)
        asked.append("waited")
        return [], []

    monkeypatch.setattr(sys.modules["ray"], "wait", wait, raising=False)
    c._agents = [SimpleNamespace(run=SimpleNamespace(remote=lambda *_: object())) for _ in range(2)]
    c.run({rank: {"epoch": 0} for rank in range(2)}, b"")
    while not asked:
        time.sleep(0.01)
    assert c.stop(fast=True) == ""
    time.sleep(0.5)
    assert asked[-1] == "shutdown" and asked.count("wait") == asked.count("waited")


def test_what_ray_raises_while_closing_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Each step is tried, whatever became of the others; the same trouble is told once."""
    c, asked = attached(monkeypatch, tmp_path, kill=gone, remove=gone)
    assert (
        c.stop(fast=True) == "ending a node agent: Gone: the GCS is dead; giving back the places: Gone: the GCS is dead"
    )
    assert asked == ["kill", "kill", "remove", "shutdown"]


def test_a_ray_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    over = threading.Event()
    monkeypatch.setattr(cluster, "RAY_STOP_S", 0.1)
    c, _ = attached(monkeypatch, tmp_path, remove=over.wait)
    try:
        assert c.stop(fast=True) == "it has not answered for 0.1 s"
    finally:
        over.set()


def names() -> list[str]:
    return [t.name for t in threading.enumerate()]


def listening(c: Cluster) -> None:
    c._agents = [SimpleNamespace(run=SimpleNamespace(remote=lambda *_: object())) for _ in range(2)]
    c.run({rank: {"epoch": 0} for rank in range(2)}, b"")


@pytest.mark.parametrize("odd", [False, True])
def test_an_error_in_the_thread_that_asks_ray_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capfd: pytest.CaptureFixture[str], odd: bool
) -> None:
    """Ray's own is the loss of those that are not supervised yet; another one is that, too, and shown as what it is."""
    c, _ = attached(monkeypatch, tmp_path)

    def wait(*_: Any, **__: Any) -> Any:
        if odd:
            return None  # (which is no pair of lists)
        gone()

    monkeypatch.setattr(sys.modules["ray"], "wait", wait, raising=False)
    listening(c)
    c._supervised[0] = None
    c._listeners[0].join(20)
    lost, trouble = c.lost()
    words = "TypeError: cannot unpack" if odd else "the GCS is dead"
    assert [rank for rank, _ in lost] == [1] and lost[0][1].startswith(words) and trouble.startswith(words)
    assert c.stop(fast=False) == "" and not [n for n in names() if "ray" in n]
    written = capfd.readouterr().err
    assert ("the thread manygrad-ray has ended by an error:\nTraceback" in written) == odd


def test_an_error_while_leaving_ray_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    c, _ = attached(monkeypatch, tmp_path)
    c._agents = None  # type: ignore[assignment]
    c._listeners = [SimpleNamespace(join=lambda: [].index(0))]  # type: ignore[assignment]
    assert c.stop(fast=False) == "ValueError: 0 is not in list"
    assert "the thread manygrad-leave-ray has ended by an error:\nTraceback" in capfd.readouterr().err


def test_places_are_kept_where_their_agents_can_start_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """The word of an agent on a supervisor in whose place there is another one by now is not of this one."""
    monkeypatch.setattr(cluster, "ENDING_S", 0.1)
    c, _ = attached(monkeypatch, tmp_path)
    c.places = [Place("h", "10.0.0.1", 4, r, 2) for r in range(2)]
    c._epochs, c._supervised = {0: 0, 1: 0}, {0: None, 1: None}
    assert not c.keeps({0}), "nothing was heard of the agent of rank 1"
    c._news.put((1, 0, b"", ""))
    assert c.keeps({0}) and not c.keeps({0}), "each word is for one start"
    c._epochs[1] = 1
    c._news.put((1, 0, b"", ""))
    assert c.lost() == ([], "")
    assert c.keeps({0, 1}), "no new process is needed"
    c._news.put((0, 0, None, "the node died"))
    c._news.put((1, 1, b"", ""))
    assert not c.keeps({0}), "rank 0 runs where Ray has no node any more"
    c._without_agents, c.job.nodes = set(), 3
    assert not c.keeps({0, 1}), "a third node may have come back"


def test_room_is_looked_for_less_often_where_it_was_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """A run that ends for three nodes and gets two again (what Ray calls free lies on hosts that have too little each)
    would else end at each of its checkpoints."""
    monkeypatch.setattr(cluster, "ROOM_EVERY_S", 0.05)
    c, asked = attached(monkeypatch, tmp_path)
    c.job, c._room_every_s, found = Job("script", "train.py", nodes=3), 0.05, 2

    def free() -> dict[str, float]:
        asked.append("free")
        return {"CPU": 1.0}

    monkeypatch.setattr(sys.modules["ray"], "available_resources", free, raising=False)
    places = [Place("a", "1.2.3.4", 1, i, 3) for i in range(3)]
    c.places = places[:2]
    monkeypatch.setattr(Cluster, "_find_places", lambda self, least: setattr(self, "places", places[:found]))

    def look() -> int:
        c.look_for_room()
        until = time.monotonic() + 10
        while not c.room and time.monotonic() < until:
            time.sleep(0.01)
        return c.room

    assert look() == 3 and asked[-1] == "free"
    assert c.again(1, lambda: False) == places[:2] and c.room == 0 and c._room_every_s == 0.5
    found = 3
    assert look() == 3
    assert c.again(1, lambda: False) == places and c._room_every_s == 0.05
    found = 2
    assert c.again(1, lambda: False) == places[:2] and c._room_every_s == 0.05  # (it did not end for more)
    c.stop(fast=False)


def test_the_guard_ends_and_loses_no_error(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    guard = guard_module.Guard(lambda text: None)
    guard.start()
    assert "manygrad-guard" in names()
    guard.close()
    assert "manygrad-guard" not in names() and capfd.readouterr().err == ""
    monkeypatch.setattr(guard_module, "ray_processes", gone)
    guard = guard_module.Guard(lambda text: None)
    guard.start()
    guard.stop()
    guard.close()
    written = capfd.readouterr().err
    assert (
        "the thread manygrad-guard has ended by an error:\nTraceback" in written and "Gone: the GCS is dead" in written
    )


def test_the_launcher_says_so_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is a warning; the outcome (here: that the nodes do not fit) is what it was."""

    def start(self: Cluster) -> None:
        raise Infeasible("too many nodes")

    monkeypatch.setattr(Cluster, "start", start)
    monkeypatch.setattr(Cluster, "stop", lambda self, fast: "leaving Ray: Gone: it is dead")
    with pytest.raises(Infeasible, match="too many nodes"):
        driver.run(Job("script", "train.py", nodes=2, run_dir=str(tmp_path / "run")))
    assert "launcher: warning: Ray could not be left in order (leaving Ray: Gone: it is dead)" in capfd.readouterr().err
    assert not os.path.exists(tmp_path / "run")


def test_hosts_of_the_same_name() -> None:
    """Their addresses tell them apart."""
    found = [("node", "10.0.0.1", 8), ("node", "10.0.0.2", 8), ("node", "10.0.0.1", 8)]
    assert share(found) == [
        Place("node", "10.0.0.1", 8, 0, 2),
        Place("node", "10.0.0.2", 8, 0, 1),
        Place("node", "10.0.0.1", 8, 1, 2),
    ]
