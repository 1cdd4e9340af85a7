"""Whom the controller names where a run waits: ranks that are behind, silent, lost or stopped; saving before an end."""

from __future__ import annotations

import signal

from manygrad.launcher import report
from manygrad.launcher.controller import Controller
from manygrad.launcher.instructions import Beat, Instruction, Send, Warn
from manygrad.launcher.messages import (
    AgentBeat,
    AtStep,
    Committed,
    Exited,
    Failed,
    Finished,
    Interrupt,
    NodesBack,
    Planned,
    Progress,
    Stopping,
    Terminated,
    Tick,
)
from tests.launcher.controlled import running, sent


def timed_out(r: int, waited_for: str = "collective", peer: int = -1) -> Failed:
    return Failed(r, "CollectiveTimeout", "rank 0 waited", "Traceback", "t.py:3 in f", 7, 1, False, waited_for, peer)


def test_the_rank_that_did_not_come_is_the_cause() -> None:
    c = running(3)
    for r, n in ((0, 8), (1, 7), (2, 8)):
        c.handle(Progress(r, 3, 0, 0, n, "all_reduce at a.py:1", f"a.py:{r} in load"), 1.0)
    (abort,) = sent(c.handle(timed_out(0, peer=2), 61.0), "abort")
    assert c.root is not None and (c.root.rank, c.root.kind, c.root.where) == (1, "late", "a.py:1 in load")
    assert "did not come to collective 8 (all_reduce at a.py:1), where rank 0 waited" in abort.content["reason"]
    assert c.ranks[0].failure is not None and c.ranks[0].failure.consequence and c.exit_code == 1
    c.handle(Stopping(1, "a.py:9 in load"), 61.1)
    c.handle(timed_out(2, peer=0), 61.2)
    assert c.root.rank == 1 and c.root.where == "a.py:9 in load"


def lost(r: int, peer: int) -> Failed:
    text = f"rank {r} lost rank {peer}: its host has not answered"
    return Failed(r, "PeerLost", text, "Traceback", "t.py:3 in f", 7, 1, True, "peer", peer)


def test_a_rank_that_another_has_lost_is_the_cause() -> None:
    """Unless it says more itself, before or after."""
    c = running(3)
    (abort,) = sent(c.handle(lost(0, peer=2), 1.0), "abort")
    assert c.root is not None and (c.root.rank, c.root.kind) == (2, "unreachable")
    assert abort.content["rank"] == 2 and "rank 0 lost rank 2: its host has not answered" in abort.content["reason"]
    c.handle(lost(1, peer=0), 1.1)
    assert c.root.rank == 2
    c.handle(Exited(2, -9), 1.2)
    assert c.root.rank == 2 and c.root.title == "killed by SIGKILL"
    c = running(3)
    c.handle(Exited(2, -9), 1.0)
    c.handle(lost(0, peer=2), 1.1)
    assert c.root is not None and c.root.title == "killed by SIGKILL"


def test_a_rank_that_did_not_make_a_plan_is_the_cause() -> None:
    c = running(3)
    for r in (0, 2):
        c.handle(Planned(r, 1, "5", "all-reduce at a.py:1"), 1.0)
    c.handle(timed_out(2, "plan"), 61.0)
    assert c.root is not None and c.root.rank == 1 and "did not come to plan 1 (all-reduce at a.py:1)" in c.root.title


def test_a_stopped_rank_is_the_cause_also_within_a_collective() -> None:
    c = running(3)
    for t in range(1, 9):
        for r in range(3) if t < 4 else (0, 1):
            c.handle(Progress(r, 3, 0, 0, 8, "all_reduce at a.py:1", f"a.py:{r} in f"), float(t))
        c.handle(AgentBeat(2, "T", 100), float(t))
        c.handle(Tick(), float(t))
    c.handle(timed_out(0, peer=1), 9.0)
    assert (
        c.root is not None
        and c.root.rank == 2
        and "stopped (SIGSTOP)" in c.root.title
        and c.root.where == "a.py:2 in f"
    )


def test_a_time_out_of_nobody_else_is_its_own_cause() -> None:
    c = running(1)
    c.handle(timed_out(0), 1.0)
    assert c.root is not None and c.root.rank == 0 and c.root.kind == "exception"


def beats(c: Controller, begin: float, end: float, ranks: list[int], cpu: int = 0) -> list[Instruction]:
    out = []
    for t in range(int(begin), int(end)):
        for r in ranks:
            out += c.handle(Progress(r, 3, 0, 0), float(t))
        for r in range(len(c.ranks)):
            out += c.handle(AgentBeat(r, "R", cpu * t), float(t))
        out += c.handle(Tick(), float(t))
    return out


def test_heartbeats_both_ways() -> None:
    c = running(2)
    out = beats(c, 1, 601, [0, 1])
    assert sum(isinstance(i, Beat) for i in out) == 600 and c.root is None
    beats(c, 601, 700, [0], cpu=500)  # rank 1's interpreter is held by native code, which computes
    assert c.root is None
    beats(c, 700, 800, [0], cpu=0)
    assert c.root is not None and (c.root.kind, c.root.rank) == ("silent", 1)


def test_our_own_suspension_is_not_the_ranks_silence() -> None:
    c = running(2)
    beats(c, 1, 10, [0, 1])
    c.handle(Tick(), 3600.0)
    assert c.root is None
    beats(c, 3600, 3700, [0, 1])
    assert c.root is None
    c.handle(Failed(0, "LaunchAborted", "the launcher is gone", "", "", 1, 1, True, "launcher"), 3700.0)
    assert (
        c.root is not None
        and c.root.rank is None
        and "did not hear the launcher" in c.root.title
        and "suspended" in c.root.title
    )


def test_a_time_out_of_the_run_names_who_is_behind() -> None:
    c = running(2, timeout_s=5.0)
    c.handle(Progress(0, 3, 0, 0, 8, "x", "a.py:1 in f"), 1.0)
    c.handle(Progress(1, 3, 0, 0, 7, "x", "a.py:2 in g"), 1.0)
    c.handle(Tick(), 6.0)
    assert c.root is not None and c.root.rank is None and "rank 1 is behind the others, at a.py:2 in g" in c.root.title


def test_ranks_that_train_apart_get_one_warning() -> None:
    c = running(2)
    assert not [i for s in (99, 150) for i in c.handle(Progress(0, s, 0, 0), 1.0) if isinstance(i, Warn)]
    (warning,) = [i for i in c.handle(Progress(1, 120, 0, 0), 1.0) if isinstance(i, Warn)]
    assert "2 ranks have each made 120 steps without any communication" in warning.text and "shard" in warning.text
    assert not [i for i in c.handle(Progress(0, 500, 0, 0), 2.0) if isinstance(i, Warn)]
    together = running(2)
    for r in range(2):
        assert not [i for i in together.handle(Progress(r, 500, 1, 0, 500, "all_reduce"), 1.0) if isinstance(i, Warn)]
    assert report.communication(c) == ""


def test_ranks_of_a_group_do_not_train_apart() -> None:
    """Nobody but they counts their collectives, which have bytes and take time."""
    c = running(2)
    for r in range(2):
        assert not [i for i in c.handle(Progress(r, 500, 0, 2_000_000, collective_ms=1500), 1.0) if isinstance(i, Warn)]
    told = "collectives of groups of ranks, up to 2.0 MB sent; 1.5 s, of which rank 0 waited 0.0 s"
    assert report.communication(c) == told


def test_a_long_text_does_not_bury_the_report() -> None:
    """The rank's log and report.json have it."""
    c = running(2)
    c.handle(Failed(1, "ValueError", "x" * 100_000, "Traceback\n" + "x" * 100_000, "t.py:3 in f", 7, 1, False), 1.0)
    text = report.render(c, ["log0", "log1"], "train.py")
    assert "rank 1 failed: ValueError: xxx" in text and "characters left out" in text and "t.py:3 in f" in text
    assert len(text) < 25_000 and text.endswith("launcher: exit code 1\n")
    assert report.as_dict(c, ["log0", "log1"])["root_cause"]["title"].endswith("x" * 100_000)


def test_a_rank_that_does_not_come_to_a_checkpoint_is_the_cause() -> None:
    """Who waited for it, and said so, is an echo; a stopped rank, for which that one may wait, comes first."""
    for stopped in (None, 1, 2):
        c, cause = running(3), stopped or 1
        if stopped is not None:
            c.handle(AgentBeat(stopped, "T", 10), 1.0)
        told = Failed(0, "OtherRankFailed", "was not committed", "Traceback", "t.py:3", 7, 1, True, "checkpoint", 1)
        c.handle(told, 2.0)
        assert c.root is not None and (c.root.kind, c.root.rank) == ("late", cause)
        assert " a checkpoint, where rank 0 waited until its deadline" in c.root.title
        assert ("stopped (SIGSTOP)" in c.root.title) == (stopped is not None)


def test_all_save_after_the_last_step_that_any_has_done() -> None:
    c = running(3)
    for r in range(3):
        c.handle(Progress(r, 5, 0, 0, saves=True), 1.0)
    assert [i.type for i in c.handle(Interrupt(signal.SIGTERM), 1.1) if isinstance(i, Send)] == ["save"]
    assert not sent(c.handle(AtStep(2, 6), 1.2), "save_at") and not sent(c.handle(AtStep(0, 7), 1.3), "save_at")
    (order,) = sent(c.handle(AtStep(1, 6), 1.4), "save_at")
    assert order.content == {"step": 8} and order.ranks == (0, 1, 2) and c.root is None
    c.handle(Failed(1, "Preempted", "step 8 is saved in d", "", "t.py:1", 8, 143, True), 1.6)
    assert c.root is not None and (c.root.kind, c.root.rank, c.exit_code) == ("preempted", None, 143)


def back_on_three(grace_s: float = 3.0) -> Controller:
    """Two ranks, which are told to save, as there could be three."""
    c = running(2, grace_s=grace_s)
    for r in range(2):
        c.handle(Progress(r, 5, 0, 0, saves=True), 1.0)
    assert not sent(c.handle(NodesBack(3), 1.1), "save")
    assert sent(c.handle(Committed(0, 6), 1.2), "save")
    return c


def test_nodes_that_are_back_are_used_from_the_next_checkpoint_on() -> None:
    """However long saving takes: nothing is wrong with the run."""
    c = back_on_three()
    assert not sent(c.handle(Committed(0, 6), 1.3), "save")
    c.handle(AtStep(0, 6), 1.4)
    (order,) = sent(c.handle(AtStep(1, 7), 1.5), "save_at")
    assert order.content == {"step": 8}
    c.handle(Tick(), 60.0)
    assert c.root is None and not c.run.preemption.by_launcher
    c.handle(Failed(1, "Preempted", "step 8 is saved in d", "", "t.py:1", 8, 143, True), 61.0)
    assert c.root is not None and (c.root.kind, c.root.rank) == ("preempted", None)
    assert c.root.title == "ends to go on on 3 nodes: step 8 is saved in d" and not c.run.preemption.by_launcher


def test_sigterm_comes_before_nodes_that_are_back() -> None:
    """The ranks are saving already, and have the grace from then on."""
    c = back_on_three()
    assert not sent(c.handle(Interrupt(signal.SIGTERM), 30.0), "save")
    assert c.root is None and c.run.preemption.by_launcher
    c.handle(Failed(1, "Preempted", "step 8 is saved in d", "", "t.py:1", 8, 143, True), 31.0)
    assert c.root is not None and c.root.title == "was preempted (SIGTERM): step 8 is saved in d"
    c = back_on_three()
    c.handle(Interrupt(signal.SIGTERM), 30.0)
    c.handle(Tick(), 33.1)
    assert c.root is not None and "within --grace 3 s" in c.root.title


def test_a_save_that_takes_longer_than_the_grace() -> None:
    c = running(2, grace_s=3.0)
    for r in range(2):
        c.handle(Progress(r, 5, 0, 0, saves=True), 1.0)
    c.handle(Terminated(1), 1.1)
    c.handle(Tick(), 4.0)
    assert c.root is None
    c.handle(Tick(), 4.2)
    assert c.root is not None and c.root.rank == 1 and "within --grace 3 s" in c.root.title


def test_who_has_finished_does_not_save_and_the_others_go_on_to_the_end() -> None:
    c = running(2)
    c.handle(Terminated(0), 1.0)
    c.handle(Finished(1, 0, ""), 1.1)
    (order,) = sent(c.handle(AtStep(0, 7), 1.2), "save_at")
    assert order.content["step"] > 1 << 60


def test_ranks_that_cannot_save_end_at_sigterm() -> None:
    c = running(2)
    c.handle(Progress(0, 5, 0, 0, saves=True), 1.0)
    c.handle(Interrupt(signal.SIGTERM), 1.1)
    assert c.root is not None and c.root.kind == "interrupt"
