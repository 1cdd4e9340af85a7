"""Which failures lead to another attempt: the policy alone, no process is started."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manygrad.errors import EXIT_RESTARTS, Infeasible, UsageError
from manygrad.launcher.attempts import Attempts
from manygrad.launcher.command_line import parse
from manygrad.launcher.ranks import Failure
from manygrad.launcher.restarts import OUTSIDE, Again, AttemptStory, Over, Restarts

KILLED = Failure(1, "signal", "killed by SIGKILL", 137)
RAISED = Failure(1, "exception", "ValueError: loss is 3", 1, where="train.py:9 in step")
RAISED_ELSEWHERE = Failure(0, "exception", "ValueError: loss is 3", 1, where="train.py:12 in step")


def story(root: Failure | None, step: int | None = None, saved: int | None = None, epoch: int = 0) -> AttemptStory:
    return AttemptStory(epoch, 2, 0.0, 1.0, 0.5, step, saved, root)


def after(limit: int, *stories: AttemptStory) -> Again | Over:
    """What follows the last of these stories; the others have been retried."""
    restarts = Restarts(limit)
    for s in stories[:-1]:
        assert isinstance(restarts.after(s), Again)
    return restarts.after(stories[-1])


def test_without_restarts_the_first_failure_is_the_last() -> None:
    assert after(0, story(KILLED)) == Over()


def test_a_good_end_needs_no_other() -> None:
    assert after(3, story(KILLED, 5), story(None, 9)) == Over()


def test_who_asks_for_the_end_gets_it() -> None:
    assert after(3, story(Failure(None, "interrupt", "interrupted by Ctrl-C", 130))) == Over()
    assert Restarts(3).after(story(KILLED), ends=True) == Over()


def test_restarts_are_exhausted() -> None:
    found = after(2, story(RAISED, 4), story(KILLED, 5), story(RAISED_ELSEWHERE, 5))
    assert isinstance(found, Over) and found.exit_code == EXIT_RESTARTS == 75 and "--max-restarts 2" in found.text


@pytest.mark.parametrize("second", [(9, None), (10, None), (8, None), (3, None), (None, None), (12, None), (9, 9)])
def test_a_fault_of_the_program_that_comes_again(second: tuple[int | None, int | None]) -> None:
    """At the same step (or one that another rank was ahead), with other numbers in its text: it is not retried."""
    step, saved = second
    again = Failure(0, "exception", "ValueError: loss is 7", 1, where=RAISED.where)
    found = after(5, story(RAISED, 9), story(again, step, saved))
    if saved is None and step in (8, 9, 10):
        assert isinstance(found, Over) and found.exit_code is None and "2 times without progress" in found.text
        assert "loss is 7" in found.text
    else:
        assert isinstance(found, Again)


def test_another_fault_is_retried() -> None:
    assert isinstance(after(5, story(RAISED, 9), story(RAISED_ELSEWHERE, 9)), Again)
    assert isinstance(after(5, story(RAISED, 9), story(RAISED_ELSEWHERE, 9), story(RAISED, 9)), Again)


def test_faults_from_outside_are_the_steps_when_they_come_three_times_there() -> None:
    assert isinstance(after(5, story(KILLED, 9), story(KILLED, 9)), Again)
    assert isinstance(after(5, story(KILLED, 9), story(KILLED, 9), story(KILLED, 9)), Over)
    assert isinstance(after(5, story(KILLED, 9), story(KILLED, 7), story(KILLED, 9), story(KILLED, 9)), Again)
    assert isinstance(after(5, story(KILLED, 9), story(KILLED, 9), story(KILLED, 9, 8)), Again)


def test_a_lost_supervisor_has_another_process_id_each_time() -> None:
    lost = [story(Failure(0, "lost", f"its supervisor is gone: process {p} ended", 1), 3) for p in (10, 11, 12)]
    assert isinstance(after(5, *lost), Over)


def test_a_preempted_rank_does_not_count() -> None:
    preempted = Failure(1, "preempted", "was preempted (SIGTERM): step 8 is saved in checkpoints", 143)
    restarts = Restarts(1)
    for step in range(8, 12):
        then = restarts.after(story(preempted, step, step))
        assert isinstance(then, Again) and then.delay_s == 0 and restarts.counted == 0
    assert isinstance(restarts.after(story(KILLED, 12)), Again)
    assert "rank 1 was preempted" in restarts.stories[0].line()


def test_back_off_grows_without_progress_and_begins_anew_with_it() -> None:
    restarts = Restarts(20)
    delays = []
    for n, step in enumerate([5, 4, 4, 3, 9, 9]):
        root = Failure(0, "exception", f"E{n}: x", 1, where="t.py:1")
        then = restarts.after(story(root, step))
        assert isinstance(then, Again)
        delays.append(then.delay_s)
    assert delays == [0.0, 0.5, 1.0, 2.0, 0.0, 0.5]


def test_a_line_says_how_far_it_came() -> None:
    assert story(KILLED, 37, 30, 1).line() == (
        "attempt 2: 2 nodes, 1.0 s, to step 37 (saved: 30): rank 1 failed: killed by SIGKILL"
    )
    assert "no step told: it ended well" in story(None).line()
    assert replace(story(None), kept=1).line().startswith("attempt 1: 2 nodes (1 kept), 1.0 s")


kinds = st.sampled_from(["exception", "exit", "plan", "late", "protocol", "preempted", *OUTSIDE])
numbers = st.none() | st.integers(0, 4)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 6), st.lists(st.tuples(kinds, st.sampled_from("ab"), numbers, numbers), min_size=40, max_size=40))
def test_failures_come_to_an_end(limit: int, drawn: list[tuple[str, str, int | None, int | None]]) -> None:
    """Whatever happens, not more restarts than were allowed, and back-offs of a bounded length."""
    restarts, n = Restarts(limit), 0
    for kind, text, step, saved in drawn:
        then = restarts.after(story(Failure(0, kind, text, 1), step, saved, n))
        n += kind != "preempted"
        assert restarts.counted <= limit
        if isinstance(then, Over):
            assert n > 0 or not limit
            return
        assert 0 <= then.delay_s <= 30
    assert all(kind == "preempted" for kind, *_ in drawn[limit + 1 :]) or n <= limit


class Between:
    """What `Attempts` needs of the surroundings between two attempts."""

    def __init__(self, signals: list[int], why: str = "") -> None:
        self.signals, self.cluster, self.job, self.why = self, self, parse(["t.py", "--nodes", "2"], {}), why
        self.queue, self.started_ray, self.asked = list(signals), False, list[int]()
        self.began, self.inquiries, self.stories = 0.0, self, list[AttemptStory]()

    def popleft(self) -> int:
        return self.queue.pop(0)

    def again(self, least: int, give_up: object) -> list[str]:
        self.asked.append(least)
        if self.why:
            raise Infeasible(self.why)
        return ["place"] * 2


def test_between_two_attempts() -> None:
    there = Between([])
    attempts = Attempts(there)  # type: ignore[arg-type]
    assert attempts._places(Again(0.0, "")) == ["place"] * 2 and there.asked == [2]  # type: ignore[comparison-overlap]
    found = Attempts(Between([], "1 node is left, of at least 2"))._places(Again(0.0, ""))  # type: ignore[arg-type]
    assert isinstance(found, Over) and found.exit_code == 69 and "of at least 2" in found.text


def test_a_signal_ends_the_back_off() -> None:
    there = Between([])
    there.queue = Queue([signal.SIGINT])  # type: ignore[assignment]
    found = Attempts(there)._places(Again(1000.0, ""))  # type: ignore[arg-type]
    assert isinstance(found, Over) and found.exit_code == 130


class Queue(list[int]):
    def popleft(self) -> int:
        return self.pop(0)


@pytest.mark.parametrize(
    "argv, words",
    [
        (["t.py", "--max-restarts", "2"], "give --nodes, too"),
        (["t.py", "--nodes", "2", "--min-nodes", "3"], "--min-nodes 3 is more than --nodes 2"),
        (["t.py", "--nodes", "2", "--max-restarts", "-1"], "must be from 0"),
    ],
)
def test_options_that_mean_nothing(argv: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse(argv, {})
