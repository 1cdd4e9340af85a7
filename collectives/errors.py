"""Errors of communication. Each names the ranks, what was awaited and the next step; all survive pickling."""

from __future__ import annotations

from typing import Any


class CollectiveError(RuntimeError):
    """Base of all errors between workers. The keyword arguments are kept as attributes and pickled with the error."""

    def __init__(self, **fields: Any):
        self.fields = fields
        self.__dict__.update(fields)
        super().__init__(self.message())

    def message(self) -> str:
        raise NotImplementedError

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.fields)


def _rebuild(kind: type[CollectiveError], fields: dict[str, Any]) -> CollectiveError:
    return kind(**fields)


class CollectiveTimeout(CollectiveError):
    """Fields: rank, peer, plan, sequence, waited_for, timeout_s, where (the plan's source line, or empty)."""

    def message(self) -> str:
        f = self.fields
        where = f" [{f['where']}]" if f.get("where") else ""
        return (
            f"rank {f['rank']} waited {f['timeout_s']:g} s for {f['waited_for']} from rank {f['peer']} (plan "
            f"{f['plan']:#018x}, sequence {f['sequence']}){where}; rank {f['peer']} is alive but has not come to this "
            f"point. See what rank {f['peer']} is doing (its log, or py-spy dump); "
            f"if it only needs longer, raise COLLECTIVE_TIMEOUT_S (now {f['timeout_s']:g})"
        )


class CollectiveAborted(CollectiveError):
    """Fields: rank, reason."""

    def message(self) -> str:
        return f"rank {self.fields['rank']}: communication was aborted: {self.fields['reason']}"


class NoRank(CollectiveAborted):
    """This process takes part in no collective any more: its rank has ended, or it is a forked child of one. Fields:
    rank, reason."""

    def message(self) -> str:
        return f"this process does not communicate as rank {self.fields['rank']}: {self.fields['reason']}"


class PlanMismatch(CollectiveError):
    """Ranks run different programs. Fields: rank, peer, mine, theirs (descriptions of what each one runs)."""

    def message(self) -> str:
        f = self.fields
        return (
            f"ranks {f['rank']} and {f['peer']} run different programs:\n  rank {f['rank']}: {f['mine']}\n"
            f"  rank {f['peer']}: {f['theirs']}\nEvery rank must make the same tensors in the same order; "
            "look for a branch on the rank, or for data of another length, at these lines"
        )


class PeerLost(CollectiveError):
    """A peer's process ended, or its connection broke. Fields: rank, peer, waited_for, evidence."""

    def message(self) -> str:
        f = self.fields
        return (
            f"rank {f['rank']} lost rank {f['peer']} while waiting for {f['waited_for']}: {f['evidence']}. "
            f"The cause is in rank {f['peer']}'s log"
        )


class TransportError(CollectiveError):
    """A transport that was asked for cannot be used. Fields: rank, peer, problem, remedy."""

    def message(self) -> str:
        f = self.fields
        return f"rank {f['rank']} to rank {f['peer']}: {f['problem']}. {f['remedy']}"


class WireError(ValueError):
    """Bytes from a peer that are no valid message of this protocol (see `transport/wire.py`)."""


class ProgramError(ValueError):
    """A collective program that does not keep its promise (see `checker.py`)."""


class ArenaFull(MemoryError):
    """The shared-memory arena has no free block of the size asked for."""
