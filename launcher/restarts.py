"""Whether a failed run is attempted again: pure, from the stories of the attempts so far.

An attempt makes progress if it commits a checkpoint later than those before, or comes further than the one before it.
A fault of the program itself (an exception, an exit code, ranks that differ) that comes twice at the same step without
a checkpoint in between would come again, and one from outside (a killed process, a lost host) that comes three times
there is the step's: these are not retried. Who asks for the end (Ctrl-C, SIGTERM, --timeout) gets it. A rank that was
preempted is replaced, and does not count; nor does an attempt that ends to go on on more nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from manygrad.errors import EXIT_RESTARTS

from .ranks import Failure

BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 30.0
OUTSIDE = ("signal", "lost", "silent", "unreachable", "unheard", "timeout")  # kinds of failures that name no line
REPEATS, REPEATS_OUTSIDE = 2, 3  # so many times the same fault without progress is not retried


@dataclass(frozen=True)
class AttemptStory:
    """One attempt: `at_s` is seconds since the run began, `took_s` its length; `step` is the last one that any rank
    told of, `saved` that of the last checkpoint that it committed; `joined_s` and `running_s`: from its beginning until
    all processes were there, and until all ranks ran; `kept`: processes that were there from the one before."""

    epoch: int
    nodes: int
    at_s: float
    took_s: float
    running_s: float | None
    step: int | None
    saved: int | None
    root: Failure | None
    kept: int = 0
    joined_s: float | None = None

    @property
    def fault(self) -> tuple[str, str, str]:
        """What is the same where the same fault comes again: not the numbers in its text."""
        assert self.root is not None
        kind, title = self.root.kind, self.root.title.partition("\n")[0].partition(":")[0]
        where = "" if kind in OUTSIDE else self.root.where
        return kind, title if kind in ("exception", "exit", "signal") else "", where

    @property
    def cause(self) -> str:
        if self.root is None:
            return "it ended well"
        title = self.root.title.partition("\n")[0]
        if self.root.kind == "preempted":
            return f"{'the run' if self.root.rank is None else f'rank {self.root.rank}'} {title}"
        return title if self.root.rank is None else f"rank {self.root.rank} failed: {title}"

    def line(self) -> str:
        """`attempt 1: 4 nodes, 12.3 s, to step 37 (saved: 30): rank 1 failed: killed by SIGKILL`"""
        saved = f" (saved: {self.saved})" if self.saved is not None else ""
        step = f", to step {self.step}" if self.step is not None else ", no step told"
        nodes = f"{self.nodes} node{'s' if self.nodes != 1 else ''}{f' ({self.kept} kept)' if self.kept else ''}"
        return f"attempt {self.epoch + 1}: {nodes}, {self.took_s:.1f} s{step}{saved}: {self.cause}"

    def as_dict(self) -> dict[str, Any]:
        root = None if self.root is None else {k: getattr(self.root, k) for k in ("rank", "kind", "title", "where")}
        return {
            "epoch": self.epoch,
            "nodes": self.nodes,
            "kept": self.kept,
            "at_s": round(self.at_s, 3),
            "took_s": round(self.took_s, 3),
            "joined_s": self.joined_s,
            "running_s": self.running_s,
            "step": self.step,
            "saved": self.saved,
            "root_cause": root,
        }


@dataclass(frozen=True)
class Again:
    """Another attempt, after `delay_s`."""

    delay_s: float
    text: str


@dataclass(frozen=True)
class Over:
    """No further attempt: `text` says why, if there is anything to say; `exit_code` None: that of the attempt."""

    text: str = ""
    exit_code: int | None = None


@dataclass
class Restarts:
    """At most `limit` of them count."""

    limit: int
    stories: list[AttemptStory] = field(default_factory=list)
    counted: int = 0  # restarts so far
    without_progress: int = 0  # attempts in a row, the last one included

    def after(self, story: AttemptStory, ends: bool = False) -> Again | Over:
        """Takes in the story of an attempt that has ended. `ends`: the whole run was told to end, or has no time
        left."""
        before = self.stories[-1] if self.stories else None
        self.stories.append(story)
        root = story.root
        if root is None or root.kind == "interrupt" or ends or not self.limit:
            return Over()
        progress = before is None or self._progress(before, story)
        self.without_progress = 0 if progress else self.without_progress + 1
        if root.kind == "preempted":
            why = "there are more nodes" if root.rank is None else f"rank {root.rank} was preempted"
            return Again(0.0, f"{why}; another attempt begins, and does not count")
        same = self._same(story)
        if same >= (REPEATS_OUTSIDE if root.kind in OUTSIDE else REPEATS):
            where = "before the first step" if story.step is None else f"at step {story.step}"
            return Over(
                f"the same fault has come {same} times without progress, {where}, so it is not retried: {story.cause}"
            )
        if self.counted == self.limit:
            return Over(f"no restarts are left (--max-restarts {self.limit})", EXIT_RESTARTS)
        self.counted += 1
        n = self.without_progress
        delay_s = min(BACKOFF_S * 2 ** (n - 1), LONGEST_BACKOFF_S) if n else 0.0
        return Again(
            delay_s, f"restart {self.counted} of at most {self.limit}, {f'in {delay_s:g} s' if n else 'at once'}"
        )

    def _progress(self, before: AttemptStory, story: AttemptStory) -> bool:
        saved = max((s.saved for s in self.stories[:-1] if s.saved is not None), default=-1)
        return (story.saved is not None and story.saved > saved) or _step(story) > _step(before)

    def _same(self, story: AttemptStory) -> int:
        """How many attempts in a row, with the last, have met its fault at its step (of which ranks may be one ahead of
        each other), without a later checkpoint."""
        same = 1
        for i in range(len(self.stories) - 1, 0, -1):
            here, before = self.stories[i], self.stories[i - 1]
            saved = max((s.saved for s in self.stories[:i] if s.saved is not None), default=-1)
            if before.root is None or before.fault != story.fault or (here.saved is not None and here.saved > saved):
                break
            if abs(_step(here) - _step(before)) > (story.fault[0] not in OUTSIDE):
                break
            same += 1
        return same


def _step(story: AttemptStory) -> int:
    return -1 if story.step is None else story.step
