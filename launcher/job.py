"""A job: the one description that the command line and `launch()` both make and the driver takes."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from .options import Options

REAL_ENDPOINT = "manygrad.collectives.transport.endpoint:Endpoint"


@dataclass
class Job(Options):
    """What runs, beside the options it runs with.

    `kind` is "script", "module" or "function" ("help" of a command line that only asks for it); `target` its path or
    name. `nodes` is 0 where a script runs in the launcher's own process.
    """

    kind: str
    target: str = ""
    args: list[str] = field(default_factory=list)
    payload: bytes = b""  # the pickled function and its arguments
    endpoint: str = REAL_ENDPOINT
    quiet: bool = False
    clock_rate: float = 1.0  # seconds of the run's clock in one of the machine's (tests of long runs: more)
    id: str = field(default_factory=lambda: secrets.token_hex(6))

    @property
    def name(self) -> str:
        """Short name for the run directory: letters, digits, dots, dashes."""
        base = self.target.rstrip("/").rsplit("/", 1)[-1].removesuffix(".py")
        return "".join(c if c.isalnum() or c in "._-" else "_" for c in base)[:60] or self.kind
