"""All that a rank's supervisor and its worker are told: one line of JSON on their standard input, then the payload.

Stands alone (standard library): the supervisor is up without importing the runtime.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from typing import IO, Any


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """One rank of one run. Times in seconds.

    The driver makes it; the agent and the supervisor, through whom it goes, each fill in what the next one needs.

    Large: all that one process tells another at its start.
    """

    # who
    rank: int
    size: int
    local_rank: int
    local_size: int
    devices_per_node: int
    job: str
    epoch: int
    # whom it talks to
    control: str  # address of the launcher's channel
    curve: dict[str, str]  # keys of that channel: server, public, secret
    bind_host: str  # own address, for the other ranks
    endpoint: str  # module:class of the transport
    # what it runs
    kind: str  # "script", "module" or "function"
    target: str
    args: list[str]
    sys_path: list[str]
    # in what surroundings
    cwd: str
    environ: dict[str, str] | None  # the launcher's own, where it is of this machine
    env: dict[str, str]  # on top of them
    user_set: list[str]  # variables of a worker's share of cores that the user has set
    sweep: bool  # whether the supervisor sweeps its host
    scratch: str  # folder for results, where launcher and worker share a machine
    # for how long
    start_timeout_s: float
    silent_s: float
    clock_rate: float
    restarts: bool  # whether another epoch may follow, for which a process that survives this one is ready
    # filled in on the way
    payload_nbytes: int = 0
    result_fd: int = -1  # where the pickled result goes
    agent_pid: int = 0  # the worker ends with this process

    def line(self, **filled: Any) -> bytes:
        """As it is sent, with more fields filled in."""
        return json.dumps(asdict(replace(self, **filled))).encode() + b"\n"


def read_spec() -> tuple[WorkerSpec, bytes] | None:
    """The spec and the payload from standard input, which is /dev/null afterwards; None if nothing came."""
    raw = os.fdopen(0, "rb", closefd=False)
    if not (line := raw.readline()):
        return None
    spec = WorkerSpec(**json.loads(line))
    payload = read_all(raw, spec.payload_nbytes)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    return spec, payload


def read_all(raw: IO[bytes], nbytes: int) -> bytes:
    """Exactly so many bytes. Raises EOFError where there are fewer."""
    data = raw.read(nbytes)
    if len(data) != nbytes:
        raise EOFError(f"{len(data)} of {nbytes} bytes of the payload have come; the launcher has ended")
    return data
