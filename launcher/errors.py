"""Errors of launching. Those that a caller may catch survive pickling; `exit_code` is what `launcher` exits with."""

from __future__ import annotations

from typing import Any

EXIT_USAGE, EXIT_INFEASIBLE, EXIT_TIMEOUT, EXIT_INTERRUPTED, EXIT_TERMINATED = 2, 69, 124, 130, 143


class UsageError(ValueError):
    """The command line, an environment variable or an argument of `launch` cannot be meant as written."""

    exit_code = EXIT_USAGE


class Infeasible(RuntimeError):
    """More nodes were asked for than the machine or the cluster can hold."""

    exit_code = EXIT_INFEASIBLE


class LaunchError(RuntimeError):
    """A launched run failed. `report` is the text the launcher prints: root cause first, then its consequences.

    `exit_code` follows the launcher's table, `rank` is the first failing rank (None for a time-out or an interrupt),
    and `details` is the content of `report.json`.
    """

    def __init__(
        self, report: str, exit_code: int = 1, rank: int | None = None, details: dict[str, Any] | None = None
    ) -> None:
        super().__init__(report)
        self.report, self.exit_code, self.rank, self.details = report, exit_code, rank, details or {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.report, self.exit_code, self.rank, self.details)


class LaunchAborted(BaseException):
    """Raised in a worker's main thread because the run is over: another rank failed, or the driver is gone.

    Not an `Exception`, so that a training loop's `except Exception: continue` cannot keep a dead run alive.
    """


class LaunchInterrupted(LaunchAborted, KeyboardInterrupt):
    """The run was interrupted by Ctrl-C at the launcher."""


class PlanMismatch(RuntimeError):
    """The ranks run different programs: their n-th communication plans differ.
    The text shows both, with source lines."""


class PlanTimeout(TimeoutError):
    """The other ranks did not come to a point, where this one waited for them, within COLLECTIVE_TIMEOUT_S."""


class ProtocolError(ValueError):
    """A control message that is not of the agreed form."""
