"""The controller: every run ends, the root cause is the first real failure. No process is started."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manygrad.launcher import report
from manygrad.launcher.controller import Controller
from manygrad.launcher.controller.log import KEPT
from manygrad.launcher.controller.table import FITS, KINDS, OF_THE_RUN, UNFIT, text
from manygrad.launcher.instructions import Done, Kill, Send, Warn
from manygrad.launcher.messages import (
    PROTOCOL,
    AgentBeat,
    AgentLost,
    AtStep,
    Closed,
    Committed,
    Event,
    Exited,
    Failed,
    Finished,
    Hello,
    Interrupt,
    NodesBack,
    Output,
    Planned,
    Progress,
    Ready,
    Spawned,
    Stacks,
    Started,
    Stopping,
    Terminated,
    Tick,
    Values,
)
from manygrad.launcher.ranks import State, ranks_text
from tests.launcher.controlled import failed, hello, running, sent


def test_a_good_run() -> None:
    c = Controller(2, 0.0)
    c.handle(hello(1), 0.0)
    (cards,) = sent(c.handle(hello(0), 0.0), "cards")
    assert cards.content == {"cards": [{"rank": 0}, {"rank": 1}], "master": ["127.0.0.1", 5000]}
    events: list[Event] = [Started(0), Started(1), Planned(0, 1, "5", "a")]
    assert [i for e in events for i in c.handle(e, 0.1)] == []
    assert sent(c.handle(Planned(1, 1, "5", "a"), 0.1), "plan_ok")[0].content == {"n": 1}
    c.handle(Finished(1), 0.2)
    assert sent(c.handle(Finished(0), 0.2), "release")
    events = [Exited(0, 0), Closed(0), Exited(1, 0)]
    assert [i for e in events for i in c.handle(e, 0.3)] == []
    assert c.handle(Closed(1), 0.3) == [Done()]
    assert c.exit_code == 0


def test_stages_of_the_end() -> None:
    c = running(2)
    (abort,) = sent(c.handle(failed(0), 1.0), "abort")
    assert abort.ranks == (1,) and abort.content["reason"] == "rank 0 failed: ValueError: bad"
    assert c.handle(Tick(), 2.9) == []
    assert c.handle(Tick(), 3.1) == [Kill((0, 1), signal.SIGTERM)]
    assert c.handle(Tick(), 3.8) == [Kill((0, 1), signal.SIGKILL)]
    assert c.handle(Tick(), 4.5) == [Done()]


@pytest.mark.parametrize(
    "code, expected, words", [(-9, 137, "SIGKILL"), (-11, 139, "SIGSEGV"), (3, 3, "code 3"), (0, 1, "code 0")]
)
def test_a_process_that_ends_unannounced(code: int, expected: int, words: str) -> None:
    c = running(3)
    assert sent(c.handle(Exited(1, code), 1.0), "abort")
    assert c.exit_code == expected and c.root is not None and words in c.root.title and c.root.rank == 1


def test_an_echo_of_the_failure_may_arrive_first() -> None:
    c = running(3)
    c.handle(failed(0, consequence=True, text="PeerLost"), 1.0)
    c.handle(Exited(2, -9), 1.01)
    assert c.root is not None and c.root.rank == 2 and c.exit_code == 137


def test_last_words_that_come_after_the_exit() -> None:
    c = running(2)
    c.handle(Exited(1, 1), 1.0)
    c.handle(failed(1), 1.01)
    assert c.root is not None and c.root.traceback == "Traceback"


def test_plans_differ() -> None:
    c = running(3)
    c.handle(Planned(2, 1, "5", "all-reduce (4,) at a.py:1"), 1.0)
    (abort,) = sent(c.handle(Planned(0, 1, "6", "all-reduce (5,) at a.py:2"), 1.1), "abort")
    assert abort.ranks == (0, 1, 2) and abort.content["kind"] == "plan"
    assert (
        "rank 2: all-reduce (4,) at a.py:1" in abort.content["reason"]
        and "rank 0: all-reduce (5,) at a.py:2" in abort.content["reason"]
    )


LEFT_ALONE: list[tuple[Event, str]] = [
    (Planned(1, 1, "6", "all-reduce (5,) at a.py:2", 7), "rank 1: plan 1, all-reduce (5,) at a.py:2"),
    (Finished(1, 7, "all-reduce (4,) at a.py:1"), "rank 1: the end of the script, the last all-reduce (4,) at a.py:1"),
]


@pytest.mark.parametrize("other, words", LEFT_ALONE)
@pytest.mark.parametrize("progress_first", [True, False])
def test_a_rank_waits_in_a_collective_that_another_never_enters(other: Event, words: str, progress_first: bool) -> None:
    c = running(2)
    events = [Progress(0, 3, 0, 99, 8, "all-reduce (9,) at a.py:9"), other]
    out = [i for e in (events if progress_first else events[::-1]) for i in c.handle(e, 1.0)]
    (abort,) = sent(out, "abort")
    assert abort.ranks == (0, 1) and abort.content["kind"] == "plan"
    for w in ("rank 0 is in collective 8", "after 7", "rank 0: all-reduce (9,) at a.py:9", words):
        assert w in abort.content["reason"], abort.content["reason"]


def test_a_rank_that_is_only_slower_is_waited_for() -> None:
    c = running(2)
    events: list[Event] = [
        Progress(0, 3, 0, 99, 8, "a"),
        Progress(1, 2, 0, 99, 5, "a"),
        Planned(0, 1, "5", "b", 8),
        Progress(1, 3, 0, 99, 8, "a"),
    ]
    assert [i for e in events for i in c.handle(e, 1.0)] == []
    assert sent(c.handle(Planned(1, 1, "5", "b", 8), 1.1), "plan_ok")
    events = [
        Progress(0, 4, 1, 99, 9, "b"),
        Progress(1, 3, 1, 99, 8, "a"),
        Progress(1, 3, 1, 99, 9, "b"),
        Finished(1, 9, "b"),
    ]
    assert [i for e in events for i in c.handle(e, 1.2)] == []
    assert sent(c.handle(Finished(0, 9, "b"), 1.3), "release")


@pytest.mark.parametrize("finished_first", [True, False])
def test_a_rank_finishes_while_others_wait_in_a_plan(finished_first: bool) -> None:
    c = running(2)
    events: list[Event] = [Finished(1), Planned(0, 1, "5", "all-reduce at train.py:31")]
    out = [i for e in (events if finished_first else events[::-1]) for i in c.handle(e, 1.0)]
    (abort,) = sent(out, "abort")
    assert (
        "rank 1 finished the script while rank 0 waits in plan 1" in abort.content["reason"]
        and "train.py:31" in abort.content["reason"]
    )


@pytest.mark.parametrize("finished", [True, False])
def test_a_rank_waits_for_one_of_its_group_that_will_not_come(finished: bool) -> None:
    """It finished, or waits in a plan of all ranks; collectives of groups are not counted."""
    c = running(3)
    other = Finished(2) if finished else Planned(2, 1, "ab", "a sum at t.py:9")
    waits = {"waits_for": 2, "waits_in": "all_reduce over 2 devices at t.py:5"}
    assert c.handle(other, 10.0) is not None and c.root is None
    for now, ms in ((11.0, 9_000), (14.9, 12_900), (16.0, 1_000)):  # what it sent may still be on its way
        c.handle(Progress(1, 5, 0, 1000, waits_ms=ms, **waits), now)
        assert c.root is None
    c.handle(Progress(1, 5, 0, 1000, waits_ms=9_000, waits_for=99), 17.0)
    assert c.root is None
    c.handle(Progress(1, 5, 0, 1000, waits_ms=7_000, **waits), 18.0)
    assert c.root is not None and c.root.rank == 2
    does = "finished the script" if finished else "came to plan 1, a sum at t.py:9,"
    assert f"rank 2 {does} while rank 1 waits for it" in c.root.title and "over 2 devices at t.py:5" in c.root.title


def test_limits() -> None:
    c = Controller(2, 0.0, timeout_s=5.0)
    assert sent(c.handle(Tick(), 5.1), "abort") and c.exit_code == 124
    c = Controller(2, 0.0, start_timeout_s=5.0)
    c.handle(hello(0), 1.0)
    c.handle(Tick(), 5.1)
    assert c.exit_code == 124 and c.root is not None and c.root.title.startswith("rank 1 did not start")
    c = running(2, silent_s=5.0)
    c.handle(Progress(0, 3, 0, 0), 4.0)
    c.handle(Tick(), 6.0)
    assert c.root is not None and c.root.kind == "silent" and c.root.rank == 1


def test_the_user_is_told_who_has_not_ended_long_after_the_others() -> None:
    c = running(3)
    c.handle(Finished(0), 1.0)
    told = {}
    for t in range(2, 200):
        for r in range(3):
            c.handle(AgentBeat(r, "S", 0), float(t))
            c.handle(Progress(r, 3, 0, 0, where="train.py:7 in stuck" if r == 1 else ""), float(t))
        told[t] = [w.text for w in c.handle(Tick(), float(t)) if isinstance(w, Warn)]
    (first, text), (second, again) = ((t, words[0]) for t, words in told.items() if words)
    assert (first, second) == (61, 121)
    assert text.startswith("rank 0 ended 60 s ago, ranks 1-2 did not: rank 1 at train.py:7 in stuck")
    assert "stacks" in text and "120 s" in again
    assert c.root is None


def test_interrupts() -> None:
    c = running(2)
    assert sent(c.handle(Interrupt(signal.SIGINT), 1.0), "abort") and c.exit_code == 130
    assert Kill((0, 1), signal.SIGKILL) in c.handle(Interrupt(signal.SIGINT), 1.1)
    c = running(2)
    c.handle(Interrupt(signal.SIGTERM), 1.0)
    assert c.exit_code == 143


@pytest.mark.parametrize("ending", ["well", "again", "raises"])
def test_an_interrupt_goes_to_scripts_that_handle_it(ending: str) -> None:
    c = running(2)
    c.handle(Progress(0, None, 0, 0, takes_interrupt=True), 0.5)
    out = c.handle(Interrupt(signal.SIGTERM), 1.0)
    (told,) = sent(out, "interrupt")
    assert told.ranks == (0,) and not sent(out, "abort") and c.root is None
    assert [w.text for w in out if isinstance(w, Warn)] == [
        "SIGTERM goes to rank 0, whose script ends by itself; a second one ends the run at once"
    ]
    if ending == "again":
        assert sent(c.handle(Interrupt(signal.SIGINT), 1.1), "abort") and c.exit_code == 130
        assert Kill((0, 1), signal.SIGKILL) in c.handle(Interrupt(signal.SIGINT), 1.2)
        return
    if ending == "raises":  # (its handler did, maybe a library's)
        assert sent(c.handle(failed(0, text="KeyboardInterrupt"), 1.1), "abort") and c.exit_code == 143
        return
    c.handle(Finished(1), 30.0)
    assert sent(c.handle(Finished(0), 30.1), "release")
    for r in range(2):
        c.handle(Exited(r, 0), 30.2)
        c.handle(Closed(r), 30.2)
    assert c.done and c.exit_code == 0


def test_what_fits_no_state_is_an_error_that_is_shown() -> None:
    c = running(2)
    c.handle(Finished(1), 1.0)
    out = c.handle(Planned(1, 1, "1", "all_reduce at train.py:9"), 1.1)
    assert sent(out, "abort") and c.root is not None and c.root.rank == 1 and c.exit_code == 1
    assert "makes plan 1 (all_reduce at train.py:9) after its script, its threads" in c.root.title
    c = running(2)
    c.handle(Started(0), 1.0)
    assert c.root is not None and "its Started does not fit, it is running" in c.root.title


def test_what_comes_when_all_may_go_is_late() -> None:
    c = running(2)
    c.handle(Finished(1), 1.0)
    assert sent(c.handle(Finished(0), 1.0), "release")
    for event in (Planned(1, 1, "1", "p"), Exited(1, 0), Progress(1, None, 0, 0), Exited(0, 0), Closed(0), Closed(1)):
        c.handle(event, 1.1)
    assert c.done and c.exit_code == 0


TABLE = """
            waiting  spawned  joined  connecting  running   finished  failed  ready   exited
Spawned     spawned  -        joined  connecting  running   finished  failed  ready   -
Hello       joined   joined   -       -           -         -         -       -       -
Started     -        -        -       running     -         -         -       -       -
Progress    waiting  spawned  joined  connecting  running   finished  -       ready   -
Planned     -        -        -       -           running   -         -       -       -
Values      -        -        -       -           running   -         -       -       -
Finished    -        -        -       -           finished  -         -       -       -
Failed      failed   failed   failed  failed      failed    failed    -       -       exited
Stopping    waiting  spawned  joined  connecting  running   finished  -       -       -
AgentBeat   waiting  spawned  joined  connecting  running   finished  failed  ready   exited
Exited      exited   exited   exited  exited      exited    exited    exited  exited  -
Closed      -        -        -       -           -         -         -       -       exited
AgentLost   exited   exited   exited  exited      exited    exited    exited  exited  exited
Output      -        -        -       -           -         -         -       -       -
Committed   -        -        -       -           running   -         failed  -       exited
AtStep      -        -        -       -           running   finished  failed  ready   exited
Terminated  -        -        -       -           running   -         -       -       -
Stacks      -        -        -       -           -         -         -       -       -
Ready       -        -        -       -           -         -         ready   -       -
"""


def test_the_table_has_every_state_and_every_kind_of_event() -> None:
    assert text() == TABLE.strip("\n")
    assert set(KINDS) == set(Event.__subclasses__()) and len(set(KINDS)) == len(KINDS)
    assert FITS.keys() | UNFIT.keys() == {(s, k) for s in State for k in KINDS}
    assert not FITS.keys() & UNFIT.keys() and all(UNFIT.values())
    assert set(OF_THE_RUN) == {Interrupt, NodesBack, Tick}


def test_the_table_leads_out_of_every_state() -> None:
    for state in State:
        if state is not State.EXITED:
            assert FITS[state, Exited][0] is State.EXITED and FITS[state, AgentLost][0] is State.EXITED


def test_who_is_ready_ends_no_attempt_and_begins_the_next() -> None:
    c = running(3)
    c.handle(Exited(2, -9), 1.0)
    for r in (0, 1):
        c.handle(failed(r, consequence=True, text="LaunchAborted"), 1.1)
    c.handle(Ready(0), 1.2)
    assert c.handle(Closed(2), 1.3) == []
    assert c.handle(Ready(1), 1.4) == [Done()]
    again = Controller(3, 2.0, ready={r.rank: r for r in c.ranks if r.state is State.READY})
    assert [(r.state, r.pid) for r in again.ranks] == [(State.SPAWNED, 100), (State.SPAWNED, 101), (State.WAITING, 0)]
    assert [i for r in (0, 1) for i in again.handle(hello(r), 2.1)] == []
    assert sent(again.handle(hello(2), 2.2), "cards"), "the new process is told of those that were there"


def test_who_says_that_it_is_ready_when_it_was_told_to_end_is_killed() -> None:
    c = running(2)
    c.handle(Exited(1, -9), 1.0)
    c.handle(failed(0, consequence=True), 1.1)
    assert c.handle(Tick(), 3.1) == [Kill((0,), signal.SIGTERM)]
    c.handle(Ready(0), 3.2)
    assert c.ranks[0].state is State.FAILED and c.handle(Tick(), 3.8) == [Kill((0,), signal.SIGKILL)]


def test_the_story_of_a_rank() -> None:
    c = running(2)
    for t in range(1, 13):
        c.handle(Progress(1, t, 0, 0, t, "all_reduce", "a.py:9 in f"), float(t))
        c.handle(AgentBeat(1, "R", 100 * t), float(t))
    c.handle(failed(1), 12.5)
    c.handle(Planned(1, 1, "1", "p"), 12.6)
    c.handle(Exited(1, 1), 12.7)
    assert c.story(1) == [
        "0.00 s  Spawned: waiting -> spawned (pid 101 on h)",
        "0.10 s  Hello: spawned -> joined (pid 101 on h)",
        "0.10 s  told cards",
        "0.20 s  Started: connecting -> running",
        "1.00-12.00 s  12 Progress (step 12, 0 plans, 12 collectives, at a.py:9 in f)",
        "1.00-12.00 s  12 AgentBeat (process R, 1200 ms of CPU)",
        "12.50 s  Failed: running -> failed (ValueError: bad, at t.py:3 in f)",
        "12.60 s  Planned: late in failed (plan 1, p)",
        "12.70 s  Exited: failed -> exited (code 1)",
    ]
    assert c.story(0)[-1] == "12.50 s  told abort"
    shown = report.render(c, ["log0", "log1"], "train.py")
    assert "\nLast events of rank 1:\n  0.20 s  Started: connecting -> running\n  1.00-12.00 s  12 Progress" in shown
    assert (
        "12.60 s  Planned: late in failed (plan 1, p)\n  12.70 s  Exited: failed -> exited (code 1)\n\nNext:" in shown
    )
    kept = report.as_dict(c, ["log0", "log1"])
    assert kept["ranks"][1]["story"] == c.story(1) and kept["ignored_events"] == 1
    assert kept["events"][-3:] == [
        "12.50 s  rank 0: told abort",
        "12.60 s  rank 1: Planned: late in failed (plan 1, p)",
        "12.70 s  rank 1: Exited: failed -> exited (code 1)",
    ]


def test_what_led_to_a_failure_is_kept() -> None:
    """However many ranks there are, whose ends follow; and the log does not grow."""
    n = 3 * KEPT
    c = running(n)
    for t in range(2 * KEPT):
        c.handle(Stopping(5, f"t.py:{t}"), 1.0 + t)
    c.handle(failed(5), 500.0)
    for r in range(n):
        c.handle(Exited(r, 1), 501.0)
    events = report.as_dict(c, ["log"] * n)["events"]
    assert len(events) == 2 * KEPT and "500.00 s  rank 5: Failed: running -> failed" in events[KEPT - 1]
    assert events[-1].startswith(f"501.00 s  rank {n - 1}: Exited")
    assert len(c.story(5)) == KEPT and "Failed: running -> failed" in c.story(5)[-2]
    c = running(2)
    c.handle(Interrupt(signal.SIGINT), 3.0)
    shown = report.render(c, ["log0", "log1"], "train.py")
    assert "0.20 s  rank 1: Started: connecting -> running\n  3.00 s  Interrupt (SIGINT)\n\nNext:" in shown


def test_an_event_that_does_not_fit_is_shown() -> None:
    c = running(2)
    c.handle(Started(0), 1.0)
    assert c.root is not None and c.root.title.endswith("it is running: it has started before")
    assert "Last events of rank 0:" in (shown := report.render(c, ["log0", "log1"], "train.py"))
    assert "1.00 s  Started: does not fit in running" in shown
    c.handle(AgentLost(0, "gone"), 1.1)
    c.handle(AgentLost(1, "gone"), 1.1)
    assert c.done and c.handle(Closed(1), 1.2) == []
    assert c.story(1)[-1] == "1.20 s  Closed: the run is over"


def any_event(draw: st.DrawFn, n: int) -> Event | Interrupt | NodesBack | Tick:
    r, count = draw(st.integers(0, n - 1)), st.integers(0, 3)
    kinds: dict[type, Callable[[], Event | Interrupt | NodesBack | Tick]] = {
        Spawned: lambda: Spawned(r, 100 + r, "h", 7),
        Hello: lambda: Hello(r, {"rank": r}, "h", "1.2.3.4", 100, 5000, PROTOCOL - draw(st.sampled_from([0, 0, 0, 1]))),
        Started: lambda: Started(r),
        Progress: lambda: Progress(
            r, draw(st.none() | st.integers(0, 200)), draw(count), draw(count), draw(count), "c",
            takes_interrupt=draw(st.booleans()), waits_for=draw(st.integers(-1, n)), waits_ms=draw(count) * 3000,
            saves=draw(st.booleans()),
        ),
        Planned: lambda: Planned(
            r, draw(count), draw(st.sampled_from("112")), "p", draw(count), draw(st.sampled_from(["", "?"]))
        ),
        Values: lambda: Values(r, draw(st.sampled_from("ab")), draw(st.sampled_from(["0\t1\tx", "0\t2\tx", "?"]))),
        Finished: lambda: Finished(r, draw(count), "c"),
        Failed: lambda: Failed(
            r, draw(st.sampled_from(["ValueError", "SystemExit", "KeyboardInterrupt", "Preempted"])), "", "", "", None,
            draw(count), draw(st.booleans()),
            draw(st.sampled_from(["", "collective", "checkpoint", "plan", "peer", "launcher"])),
            draw(st.integers(-1, n)),
        ),
        Stopping: lambda: Stopping(r, "t.py:1"),
        Committed: lambda: Committed(r, draw(count)),
        AtStep: lambda: AtStep(r, draw(count)),
        Terminated: lambda: Terminated(r),
        Stacks: lambda: Stacks(r, "text"),
        Ready: lambda: Ready(r),
        AgentBeat: lambda: AgentBeat(r, draw(st.sampled_from(["", "T", "D", "R"])), draw(count)),
        Exited: lambda: Exited(r, draw(st.sampled_from([0, 1, -9, -70]))),
        Closed: lambda: Closed(r),
        AgentLost: lambda: AgentLost(r, "gone"),
        Output: lambda: Output(r, "stdout", "text"),
        Interrupt: lambda: Interrupt(draw(st.sampled_from([signal.SIGINT, signal.SIGTERM]))),
        NodesBack: lambda: NodesBack(n + 1),
        Tick: Tick,
    }  # fmt: skip
    assert set(kinds) == {*KINDS, *OF_THE_RUN}
    # the first ones of a life are drawn more often, else no rank would come far
    wanted = draw(st.sampled_from([*kinds, Spawned, Hello, Hello, Started, Started, Tick]))
    return kinds[wanted]()


@st.composite
def any_events(draw: st.DrawFn) -> tuple[int, list[tuple[Event | Interrupt | NodesBack | Tick, float]]]:
    n = draw(st.integers(1, 3))
    times = st.sampled_from([0.0, 0.1, 0.5, 3.0, 70.0])
    return n, [(any_event(draw, n), draw(times)) for _ in range(draw(st.integers(0, 60)))]


@settings(max_examples=300, deadline=None)
@given(any_events())
def test_whatever_comes_is_decided_and_stands_in_the_log(
    drawn: tuple[int, list[tuple[Event | Interrupt | NodesBack | Tick, float]]],
) -> None:
    n, events = drawn
    c, now, told = Controller(n, 0.0, timeout_s=1000.0), 0.0, 0
    for event, later in events:
        now += later
        over, before, stood = c.done, [r.state for r in c.ranks], c.log.refused
        out = c.handle(event, now)
        told += not isinstance(event, Tick)
        assert c.log.events == told
        refused = isinstance(event, Event) and (over or (before[event.rank], type(event)) not in FITS)
        assert c.log.refused - stood == (refused or (over and isinstance(event, (Interrupt, NodesBack))))
        if isinstance(event, Event):
            last = [x for x in c.log.stories[event.rank] if x.is_event and x.what == type(event).__name__][-1]
            assert last.until == now and last.refused == refused
            if refused:
                assert c.ranks[event.rank].state is before[event.rank] and (over or c.root or c.run.released)
        assert not over or out == []
        assert sum(isinstance(i, Done) for i in out) == (c.done and not over)
    rank_events = [e for e, _ in events if isinstance(e, Event)]
    assert sum(x.count for story in c.log.stories for x in story if x.is_event) == len(rank_events)
    shown = report.render(c, ["log"] * n, "train.py")
    assert bool(shown) == (c.root is not None) and len(report.as_dict(c, ["log"] * n)["ranks"]) == n
    for _ in range(200):
        now += 0.1
        c.handle(Tick(), now)
    if c.root is not None:
        assert c.done, "a run that has failed ends"


def test_ranks_text() -> None:
    assert [ranks_text(x) for x in ([3], [0, 1, 2], [5, 0, 1])] == ["rank 3", "ranks 0-2", "ranks 0-1, 5"]


@st.composite
def stories(draw: st.DrawFn) -> tuple[int, dict[int, list[str]], list[int]]:
    """Per rank what it does until it ends, and in which order the ranks act."""
    n = draw(st.integers(1, 4))
    ends = st.sampled_from(["ok", "raise", "kill", "exit", "lost", "hang", "echo"])
    lives = {}
    for r in range(n):
        plans = draw(st.integers(0, 2))
        cut = draw(st.integers(0, 3 + plans))
        lives[r] = [*(["spawn", "hello", "start"] + ["plan"] * plans)[:cut], draw(ends)]
    return n, lives, draw(st.lists(st.integers(0, n - 1), max_size=60))


@settings(max_examples=300, deadline=None)
@given(stories(), st.booleans())
def test_every_run_ends_and_the_first_failure_is_the_root(
    story: tuple[int, dict[int, list[str]], list[int]], obedient: bool
) -> None:
    n, lives, order = story
    c, now, done = Controller(n, 0.0, start_timeout_s=20.0, timeout_s=60.0), 0.0, False
    plans, first, dead, aborted = [0] * n, None, set[int](), False
    queue = list(order)

    def give(event: Event | Interrupt | NodesBack | Tick) -> None:
        nonlocal done, aborted
        for i in c.handle(event, now):
            assert not done, "nothing may follow Done"
            done = done or isinstance(i, Done)
            if isinstance(i, Send) and i.type == "abort":
                aborted = True
            if isinstance(i, Kill) and i.signum == signal.SIGKILL:
                queue.extend(~r for r in i.ranks if r not in dead)

    for _ in range(3000):
        now += 0.05
        if not queue:
            give(Tick())
            if done:
                break
            continue
        r = queue.pop(0)
        if r < 0:
            dead.add(~r)
            give(Exited(~r, -9))
            continue
        if r in dead:
            continue
        before = c.root
        if aborted and obedient:
            dead.add(r)
            give(failed(r, consequence=True))
            give(Exited(r, 1))
        elif lives[r]:
            act = lives[r].pop(0)
            state = c.ranks[r].state
            if act == "plan":
                plans[r] += 1
            event: Event | None = {
                "spawn": Spawned(r, 1, "h"),
                "hello": hello(r),
                "start": Started(r),
                "plan": Planned(r, plans[r], "1", "p"),
                "ok": Finished(r),
                "raise": failed(r),
                "kill": Exited(r, -9),
                "exit": Exited(r, 3),
                "lost": AgentLost(r, "gone"),
                "echo": failed(r, consequence=True),
            }.get(act)
            if event is None:
                continue
            give(event)
            if act in ("kill", "exit", "lost"):
                dead.add(r)
            real = act in ("raise", "kill", "exit", "lost") and (state, type(event)) in FITS
            if before is None and real and c.root is not None:
                assert c.root.rank == r or c.root.kind == "timeout"
                first = first if first is not None else c.root
        if first is not None:
            assert c.root is first, "a later failure took the place of the first"
    assert (done and c.exit_code != 0) or all(r.state is State.EXITED for r in c.ranks)
    assert now < 60.0 + 10.0
