"""The tree of errors: all that manygrad raises under a name of its own, for `except` and for reports.

    ManygradError
        UsageError                  a command line, an environment variable or an argument means nothing
        Infeasible                  more nodes than the machine or the cluster holds
        LaunchError                 a launched run failed; carries its report
        ProtocolError, WireError    bytes of another process that are no valid message
        ArenaFull                   the memory shared with other workers is used up
        CollectiveError             between workers
            CollectiveTimeout, PlanTimeout, CollectiveAborted, NoRank, PlanMismatch, ReplicasDiffer, PeerLost,
            TransportError
        LostValue                   a tensor has no value any more
        ProgramError                a collective's program is wrong: a bug of manygrad
        CheckpointError             a checkpoint was not saved, or cannot be loaded
            OtherRankFailed
        AnomalyError                NaN or infinity where it is looked for, a loss that goes up again and again
        NoOrder                     assignments and readers that wait for each other
        JitError                    a captured function was called with what it cannot take
        OutOfBoundsError            a kernel's access outside of its buffer (CHECK_OOB)
        WrongKernelError            an optimised kernel gave other numbers: a bug of manygrad
        NoOpenCLError               no OpenCL device
        NoCUDAError                 no GPU of NVIDIA's
        CUDAError                   a GPU, or its driver, did not do what it was asked to
    LaunchAborted                   (a BaseException) the run is over, this rank ends
        LaunchInterrupted           by Ctrl-C
        Preempted                   all ranks have saved, because one of them or the launcher got SIGTERM

Each is also of the built-in class that says most about it (ValueError, RuntimeError, TimeoutError, ...). Arguments that
a user got wrong are a plain ValueError, TypeError or IndexError. The named fields of an error are its attributes, and
survive pickling. This module imports nothing of the package.
"""

from __future__ import annotations

from typing import Any

EXIT_USAGE, EXIT_INFEASIBLE, EXIT_RESTARTS = 2, 69, 75
EXIT_TIMEOUT, EXIT_INTERRUPTED, EXIT_TERMINATED = 124, 130, 143


class ManygradError(Exception):
    """Base of the tree. An error is made of its text, or of named fields of which `message` makes the text; the fields
    are attributes."""

    def __init__(self, text: str | None = None, **fields: Any):
        self.fields = fields
        self.__dict__.update(fields)
        super().__init__(self.message() if text is None else text)

    def message(self) -> str:
        """The text, from the fields."""
        return ""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self.args[0]), self.fields)


def _rebuild(kind: type[ManygradError], text: str, fields: dict[str, Any]) -> ManygradError:
    return kind(text, **fields)


# --- launching


class UsageError(ManygradError, ValueError):
    """The command line, an environment variable or an argument of `launch` cannot be meant as written."""

    exit_code = EXIT_USAGE


class Infeasible(ManygradError, RuntimeError):
    """More nodes were asked for than the machine or the cluster can hold."""

    exit_code = EXIT_INFEASIBLE


class LaunchError(ManygradError, RuntimeError):
    """A launched run failed; the text is the launcher's report, root cause first, then its consequences.

    Fields: `exit_code` follows the launcher's table, `rank` is the first failing rank (None for a time-out or an
    interrupt), `details` is the content of `report.json`.
    """

    def __init__(
        self, report: str, exit_code: int = 1, rank: int | None = None, details: dict[str, Any] | None = None
    ) -> None:
        super().__init__(report, exit_code=exit_code, rank=rank, details=details or {})
        self.report, self.exit_code, self.rank, self.details = report, exit_code, rank, details or {}


class LaunchAborted(BaseException):
    """Raised in a worker's main thread because the run is over: another rank failed, or the driver is gone.

    Not an `Exception`, so that a training loop's `except Exception: continue` cannot keep a dead run alive.
    """


class LaunchInterrupted(LaunchAborted, KeyboardInterrupt):
    """The run was interrupted by Ctrl-C at the launcher."""


class Preempted(LaunchAborted):
    """Raised by a Checkpointer when all ranks have saved, because one of them, or the launcher, got SIGTERM."""


class ProtocolError(ManygradError, ValueError):
    """A control message that is not of the agreed form."""


# --- between workers


class CollectiveError(ManygradError, RuntimeError):
    """Base of all errors between workers. Each names the ranks, what was awaited and the next step."""


class CollectiveTimeout(CollectiveError):
    """A peer that is alive did not come to this point within COLLECTIVE_TIMEOUT_S.

    Fields: rank, peer, plan, sequence, waited_for, timeout_s, where (the plan's source line, or empty).
    """

    def message(self) -> str:
        f = self.fields
        where = f" [{f['where']}]" if f.get("where") else ""
        return (
            f"rank {f['rank']} waited {f['timeout_s']:g} s for {f['waited_for']} from rank {f['peer']} (plan "
            f"{f['plan']:#018x}, sequence {f['sequence']}){where}; rank {f['peer']} is alive but has not come to this "
            f"point. See what rank {f['peer']} is doing (its log, or py-spy dump); "
            f"if it only needs longer, raise COLLECTIVE_TIMEOUT_S (now {f['timeout_s']:g})"
        )


class PlanTimeout(CollectiveError, TimeoutError):
    """The other ranks did not come to a point, where this one waited for them, within COLLECTIVE_TIMEOUT_S."""


class CollectiveAborted(CollectiveError):
    """The run is over, so this rank communicates no more. Fields: rank, reason."""

    def message(self) -> str:
        return f"rank {self.fields['rank']}: communication was aborted: {self.fields['reason']}"


class NoRank(CollectiveAborted):
    """This process takes part in no collective any more: its rank has ended or has left its world, or it is a
    forked child of one. Fields: rank, reason."""

    def message(self) -> str:
        return f"this process does not communicate as rank {self.fields['rank']}: {self.fields['reason']}"


class PlanMismatch(CollectiveError):
    """The ranks run different programs, or hold different values where these must be alike.

    Fields: rank, difference (what each of two ranks has, with source lines).
    """

    def message(self) -> str:
        return str(self.fields["difference"])


class ReplicasDiffer(CollectiveError):
    """Ranks hold other bits of a tensor that all should hold alike (`checkpoint.check_replicas`): the text names the
    tensor, the rank and the step."""


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


class WireError(ManygradError, ValueError):
    """Bytes from a peer that are no valid message of this protocol (see `collectives/transport/wire.py`)."""


class ArenaFull(ManygradError, MemoryError):
    """The shared-memory arena has no free block of the size asked for."""


class ProgramError(ManygradError, ValueError):
    """A collective program that does not keep its promise (see `collectives/checker.py`)."""


# --- checkpoints


class CheckpointError(ManygradError, RuntimeError):
    """A checkpoint was not saved, or cannot be loaded; the text names the path and what to do next."""


class OtherRankFailed(CheckpointError):
    """A checkpoint was not saved because another rank has failed, or did not come. Field: peer (the rank that did not
    come, or -1)."""


# --- scheduling and running


class LostValue(ManygradError, RuntimeError):
    """A tensor has no value any more: an assignment has failed, its worker has left its world, or this is a fork."""


class AnomalyError(ManygradError, FloatingPointError):
    """A kernel has made NaN or infinity (`detect_anomaly`), or a loss has gone up again and again (`SpikeGuard`)."""


class NoOrder(ManygradError, RuntimeError):
    """Calls that wait for each other (see `schedule/order/order_items.py`)."""


class JitError(ManygradError, RuntimeError):
    """A captured or traced function was asked for what it cannot do: inputs that do not fit what was captured, a step
    that would do something else now, a value that is not there yet."""


class OutOfBoundsError(ManygradError, IndexError):
    """A kernel's load or store lies outside of its buffer; it was not made, and the kernel's outputs are incomplete."""


class WrongKernelError(ManygradError, RuntimeError):
    """A legal list of Opts gave other numbers than the heuristic's: a bug in the compiler (raised with DEBUG >= 1)."""


class NoOpenCLError(ManygradError, RuntimeError):
    """There is no OpenCL device to use here; the text says what to install."""


class NoCUDAError(ManygradError, RuntimeError):
    """There is no GPU of NVIDIA's to use here; the text says what to install."""


class CUDAError(ManygradError, RuntimeError):
    """A GPU, or its driver, did not do what it was asked to; after a fault of a kernel it answers nothing more to this
    process."""
