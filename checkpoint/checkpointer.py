"""`Checkpointer`: the checkpoints of a training loop."""

from __future__ import annotations

import atexit
import os
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import numpy as np

from manygrad.checkpoint.api import Folder, attempt, placed, read, taken, whole_step
from manygrad.checkpoint.copies import Copies
from manygrad.checkpoint.memory import SnapshotMemory
from manygrad.checkpoint.reader import REVISIONS, CheckpointReader, Saved, newest_first
from manygrad.checkpoint.replicas import check_replicas
from manygrad.checkpoint.store import location
from manygrad.checkpoint.tree import put
from manygrad.checkpoint.turns import turns_of
from manygrad.errors import CheckpointError, Preempted, ReplicasDiffer
from manygrad.runtime.agreement.agreement import values_may_differ
from manygrad.runtime.current import current
from manygrad.tensor.ops.random import get_rng_state, set_rng_state
from manygrad.tensor.tensor import Tensor
from manygrad.tensor.threads import ScopedThread, Threads

RNG = "rng"  # the random generator's place beside the user's state


class _RandomState:
    """The random generator as an object with a state."""

    def state_dict(self) -> dict[str, Any]:
        return {"state": get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_rng_state(state["state"])


class Checkpointer:
    """Saves `state` and the random generator every `every` steps into `folder` (or a URL of remote storage), and keeps
    the newest `keep`.

    `state`: a dict of what `checkpoint.save` takes. `asynchronous`: `step` returns when the state is copied in memory;
    a thread writes it. The next save waits for it, an error of it is raised at the next call, and the process ends
    after it. `check_every`: every so many steps, and before the step is saved, `check_replicas` compares the state's
    bits over all ranks. `memory_every`: where the launcher restarts workers, a copy of the state is kept in their
    memory (`copies.py`) at every save, and also every so many steps; 0: never. `on_error`: "raise" a CheckpointError
    where a save fails, or "warn" of it and go on. `folder` None: nothing is saved and every run begins at step 0.
    """

    def __init__(self, folder: Folder | None, state: dict[str, Any], *, every: int = 100, keep: int | None = 3,
                 asynchronous: bool = False, on_error: Literal["raise", "warn"] = "raise",
                 timeout_s: float | None = None, check_every: int | None = None,
                 memory_every: int | None = None):  # fmt: skip
        if any(n is not None and n < 1 for n in (every, keep, check_every)):
            raise ValueError(
                f"Checkpointer: every, keep and check_every are at least 1, not {every}, {keep} and {check_every}"
            )
        if memory_every is not None and memory_every < 0:
            raise ValueError(f"Checkpointer: memory_every is a number of steps, or 0 for no copies, not {memory_every}")
        if on_error not in ("raise", "warn"):
            raise ValueError(f'Checkpointer: on_error is "raise" or "warn", not {on_error!r}')
        if not isinstance(state, dict) or RNG in state:
            raise ValueError(
                f"Checkpointer: the state is a dict, without {RNG!r}, which is the random generator's place"
            )
        self.folder = None if folder is None else location(folder)
        self.state, self.every, self.keep = state, every, keep
        self.asynchronous, self.on_error, self.timeout_s = asynchronous, on_error, timeout_s
        self.check_every, self.memory_every = check_every, memory_every
        self._copies = Copies(self.folder or "")
        self._memory = SnapshotMemory()
        self._threads = Threads()
        self._thread: ScopedThread | None = None
        self._error: CheckpointError | None = None
        self._saved = -1  # the step of the last one that was committed
        if self.folder is not None:
            turns_of(current().communication).enter(self)
        if asynchronous:
            atexit.register(_finish, weakref.ref(self))  # the process ends after the save

    # *** saving ***

    def step(self, step: int) -> None:
        """`step` steps are done: saves if it is time. Every rank must call it. Where the launcher or a worker got
        SIGTERM, saves, and ends the script by `Preempted`, once all Checkpointers of a loop have done so."""
        step = whole_step(step)
        if self.check_every is not None and step % self.check_every == 0:
            try:
                check_replicas(self.state, step)
            except ReplicasDiffer:  # (so may what was copied since the last comparison)
                with suppress(CheckpointError):
                    self.finish()
                self._copies.forget()
                raise
        if self.folder is None:
            return
        hooks, turns = current().communication.hooks, turns_of(current().communication)
        if turns.begin(self):
            raise Preempted("; ".join(turns.told))
        ends = turns.ends or (hooks is not None and hooks.at_step(step))
        if ends or step % self.every == 0:
            self.save(step)
        elif self.memory_every and step % self.memory_every == 0:
            self._save(step, on_disk=False)
        if ends:
            self.finish()
            what = "is saved" if self._saved == step else "could not be saved"
            if turns.end(self, f"step {step} {what} in {self.folder}"):
                raise Preempted("; ".join(turns.told))

    def save(self, step: int) -> None:
        """Saves now. Every rank must call it."""
        self._save(whole_step(step), on_disk=True)

    def _save(self, step: int, on_disk: bool) -> None:
        """In memory first: a checkpoint on disk is never newer than the last whole copy, unless there is none of it."""
        in_memory = self.memory_every != 0 and self._copies.are_kept
        if self.folder is None or not (on_disk or in_memory):
            return
        self.finish()
        try:
            memory = self._memory if self.asynchronous or in_memory else None
            snapshot = taken({**self.state, RNG: _RandomState()}, step, memory)
            work: list[Callable[[], object]] = [self._copies.begin(snapshot)] if in_memory else []
            if on_disk:
                to = attempt(self.folder, self.keep, self.timeout_s)
                work += [partial(to.write, snapshot), partial(self._committed, step)]
            if self.asynchronous:
                self._thread = self._threads.start("manygrad-checkpoint", self._do, work)
            else:
                for part in work:
                    part()
        except CheckpointError as e:
            self._failed(e)

    def _do(self, work: list[Callable[[], object]]) -> None:
        try:
            for part in work:
                part()
        except CheckpointError as e:
            self._error = e
        except Exception as e:
            self._error = CheckpointError(f"saving into {self.folder} failed: {type(e).__name__}: {e}")
            self._error.__cause__ = e

    def _committed(self, step: int) -> None:
        """Tells the launcher, for which it is progress."""
        self._saved = step
        if current().world.rank == 0 and (hooks := current().communication.hooks) is not None:
            hooks.saved(step)

    def finish(self) -> None:
        """Waits for a save that is being written; an error of it is raised here."""
        if self._thread is not None:
            thread, self._thread = self._thread, None
            thread.join()
            thread.check()
        error, self._error = self._error, None
        if error is not None:
            self._failed(error)

    def _failed(self, error: CheckpointError) -> None:
        if self.on_error == "raise":
            raise error
        warnings.warn(f"{error}. The training goes on without this checkpoint", stacklevel=4)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.finish()

    # *** resuming ***

    def resume(self) -> int:
        """Loads the newest checkpoint that is whole, and returns how many steps it had done; 0 where there is none. It
        comes from the workers' memory where they have it. Every rank must call it. A damaged one is warned of, and the
        one before it taken. CheckpointError where all are damaged: a run that begins anew would remove them in time."""
        if self.folder is None:
            return 0
        self.finish()
        step = self._from_memory()
        step = self._from_disk() if step is None else step
        if (hooks := current().communication.hooks) is not None:
            hooks.resumed(step)
        if step:
            self._save(step, on_disk=False)  # (new workers have no copies, nor have their neighbours)
        return step

    def _from_memory(self) -> int | None:
        """None where nothing is there, or not the newest."""
        if not self._copies.are_kept or self.memory_every == 0 or (found := self._copies.newest()) is None:
            return None
        if not found.is_last and (saved := self.newest()) is not None and saved.done > found.step:
            return None
        reader = self._copies.reader(found)
        state = {**self.state, RNG: _RandomState()}
        loaded = read(reader, state)
        why = reader.fetch()
        if sum_over_ranks(bool(why)):
            warnings.warn(f"{why or f'{reader.folder} is damaged'}. A checkpoint on disk is taken", stacklevel=3)
            return None
        self._put(state, loaded)
        return found.step

    def _put(self, state: dict[str, Any], loaded: Any) -> None:
        put(state, placed(loaded))
        self.state.update({k: v for k, v in state.items() if k != RNG})

    def _from_disk(self) -> int:
        self._copies.forget()
        state = {**self.state, RNG: _RandomState()}
        before: Saved | None = None
        damaged: list[str] = []
        while (saved := self.newest(before)) is not None:
            loaded, why = None, ""
            try:
                loaded = read(CheckpointReader(saved.path), state)
            except CheckpointError as e:
                why = str(e)
            others = sum_over_ranks(bool(why))
            if not others:
                self._put(state, loaded)
                return saved.done
            damaged.append(why or f"{saved.path} cannot be read by {others} other ranks")
            warnings.warn(f"{damaged[-1]}. The checkpoint before it is taken", stacklevel=3)
            before = saved
        if damaged:
            raise CheckpointError(
                f"all {len(damaged)} checkpoints in {self.folder} are damaged; move them away to begin anew: "
                + "; ".join(damaged)
            )
        return 0

    def newest(self, before: Saved | None = None) -> Saved | None:
        """The newest checkpoint (before that one), as rank 0 sees it; every rank must call it."""
        self.finish()
        if self.folder is None:
            return None
        number, done, error = -1, 0, None
        if current().world.rank == 0:
            try:
                found = [s for s in newest_first(self.folder) if before is None or s.place < before.place]
                if found:
                    number, done = found[0].step * REVISIONS + found[0].revision, found[0].done
            except CheckpointError as e:
                number, error = -2, e
        number = sum_over_ranks(number if current().world.rank == 0 else 0)
        if number == -2:
            raise error or CheckpointError(f"rank 0 cannot look into {self.folder}; its own error says why")
        if number < 0:
            return None
        step, revision = divmod(number, REVISIONS)
        saved = Saved(step, revision, "", sum_over_ranks(done))
        return saved._replace(path=os.path.join(self.folder, saved.name))


def sum_over_ranks(value: int) -> int:
    """The sum of what each rank has of its own; every rank must call it."""
    world = current().world
    if world.size == 1:
        return value
    with values_may_differ():
        own = Tensor(np.full(len(world.devices), value, np.int64))
        return int(own.shard(world.devices, axis=0).sum().item()) // world.devices_per_node


def _finish(ref: weakref.ref[Checkpointer]) -> None:
    """At the process's end, after its threads."""
    if (checkpointer := ref()) is not None:
        checkpointer.finish()
