"""A job: the one description that the command line and `launch()` both make and the driver takes."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

REAL_ENDPOINT = "manygrad.collectives.transport.endpoint:Endpoint"


@dataclass
class Job:
    """`kind` is "script", "module" or "function"; `target` its path or name. Times in seconds."""

    kind: str
    target: str
    args: list[str] = field(default_factory=list)
    payload: bytes = b""  # the pickled function and its arguments
    nodes: int = 1
    devices_per_node: int = 1
    device: str = ""  # kind of the workers' devices; "": as DEVICE says
    address: str = ""
    timeout_s: float | None = None
    start_timeout_s: float = 120.0
    grace_s: float = 2.0
    run_dir: str = ""
    port: int = 0
    show_stdout: str = "0"  # "0", "all", "1,3"
    carry: list[str] = field(default_factory=list)  # names of more environment variables for the workers
    plain_links: bool = False  # data between hosts is not encrypted
    endpoint: str = REAL_ENDPOINT
    quiet: bool = False
    clock_rate: float = 1.0  # seconds of the run's clock in one of the machine's (tests of long runs: more)
    id: str = field(default_factory=lambda: secrets.token_hex(6))

    @property
    def name(self) -> str:
        """Short name for the run directory: letters, digits, dots, dashes."""
        base = self.target.rstrip("/").rsplit("/", 1)[-1].removesuffix(".py")
        return "".join(c if c.isalnum() or c in "._-" else "_" for c in base)[:60] or self.kind
