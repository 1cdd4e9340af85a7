"""The launcher's options, one table: the fields of `Options`, each with its default, unit and help.

From it are made the command line (`command_line.py`), the environment variables (an option `--run-dir` is
MANYGRAD_RUN_DIR), the job (`job.py`) and the tables of the docs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from manygrad.tensor.environment import REGISTRY, EnvVar


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 1 << 16:
        raise ValueError("must be from 1 to 65536")
    return value


def _number(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 1 << 16:
        raise ValueError("must be from 0 to 65536")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError("must be a positive number of seconds")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value < 1 << 16:
        raise ValueError("must be from 0 to 65535")
    return value


def kind_of_device(text: str) -> str:
    from manygrad.runtime.devices import BACKENDS

    kinds = [k for k in BACKENDS if k != "DISK"]  # (which runs no kernels)
    if text.upper() not in kinds:
        raise ValueError(f"must be one of {', '.join(kinds)}")
    return text.upper()


def _ranks(text: str) -> str:
    if text != "all" and not all(p.strip().isdigit() for p in text.split(",")):
        raise ValueError("must be 'all' or ranks like 0,3")
    return text.replace(" ", "")


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("must be 0 or 1")
    return text == "1"


def _names(text: str) -> tuple[str, ...]:
    names = tuple(n.strip() for n in text.split(",") if n.strip())
    if odd := [n for n in names if re.fullmatch(r"[A-Za-z_]\w*", n) is None]:
        name, sets, _ = odd[0].partition("=")
        set_it = f"; it goes with the value that it has here: {odd[0]} launcher ... --env {name}" if sets else ""
        raise ValueError(f"must be names as A,B, {odd[0]!r} is none{set_it}")
    return names


def _option(default: Any, parse: Callable[[str], Any], metavar: str, unit: str, help: str) -> Any:
    """A field that is an option. Without a `metavar` it takes no value; the help's "{}" is its default."""
    return field(default=default, metadata={"parse": parse, "metavar": metavar, "unit": unit, "help": help})


@dataclass(kw_only=True)
class Options:
    """What the user may ask of the launcher; a field is also the name of the option, without its unit."""

    nodes: int = _option(
        0,
        _count,
        "N",
        "count",
        "number of workers, one a node; without it the script runs in this process, without Ray",
    )
    devices_per_node: int = _option(1, _count, "D", "count", "devices of each worker (default {})")
    device: str = _option(
        "",
        kind_of_device,
        "KIND",
        "name",
        "kind of the workers' devices and of new tensors, as DEVICE: CPU (default), CUDA, OPENCL, PYTHON, NULL",
    )
    address: str = _option(
        "",
        str,
        "HOST:PORT",
        "host:port",
        "attach to this Ray cluster ('auto': the one on this host); default: RAY_ADDRESS, else one started for this "
        "run, on this machine",
    )
    timeout_s: float | None = _option(None, _seconds, "S", "s", "stop the run after S seconds, exit code 124")
    start_timeout_s: float = _option(120.0, _seconds, "S", "s", "all workers must be up after S seconds (default {})")
    grace_s: float = _option(
        2.0, _seconds, "S", "s", "after a failure, time for the other workers to stop by themselves (default {})"
    )
    max_restarts: int = _option(
        0,
        _number,
        "N",
        "count",
        "after a failure begin again, at most N times: a script with a Checkpointer goes on at its last checkpoint "
        "(default {})",
    )
    min_nodes: int = _option(
        0, _count, "N", "count", "a restart may have as few nodes as that, where nodes were lost (default: --nodes)"
    )
    run_dir: str = _option(
        "", str, "DIR", "path", "folder for logs and report.json (default runs/<date-time>-<script>)"
    )
    log_ranks: str = _option(
        "0",
        _ranks,
        "RANKS",
        "ranks",
        "ranks whose stdout shows on the console: 'all' or a list like 0,3 (default {}; stderr always shows)",
    )
    env: tuple[str, ...] = _option(
        (),
        _names,
        "NAMES",
        "names",
        "names of more environment variables to carry to workers on other hosts, with the values that they have here, "
        "as A,B",
    )
    port: int = _option(0, _port, "PORT", "port", "port of the control channel (default: chosen by the system)")
    plain_links: bool = _option(
        False,
        _flag,
        "",
        "flag",
        "for trusted networks: data between hosts is not encrypted; connections are authenticated all the same",
    )


@dataclass(frozen=True)
class Option:
    """A row of the table: an option of the command line and its variable."""

    field: str
    parse: Callable[[str], Any]
    metavar: str
    unit: str
    help: str

    @property
    def name(self) -> str:
        return (self.field.removesuffix("_s") if self.unit == "s" else self.field).replace("_", "-")

    @property
    def env(self) -> str:
        return f"MANYGRAD_{self.name.replace('-', '_').upper()}"


def _row(name: str, default: Any, row: dict[str, Any]) -> Option:
    shown = f"{default:g}" if isinstance(default, float) else str(default)
    return Option(name, row["parse"], row["metavar"], row["unit"], row["help"].replace("{}", shown))


OPTIONS = tuple(_row(f.name, f.default, dict(f.metadata)) for f in fields(Options))
for _o in OPTIONS:
    if _o.env not in REGISTRY:  # (MANYGRAD_PLAIN_LINKS is read by the links, below)
        EnvVar(_o.env, "", _o.unit, f"launcher --{_o.name}: {_o.help}", travels=False)


def markdown() -> str:
    """The table of docs/launching.md."""
    rows = [f"| `--{o.name}{' ' * bool(o.metavar)}{o.metavar}` | `{o.env}` | {o.unit} | {o.help} |" for o in OPTIONS]
    return "\n".join(["| option | variable | unit | meaning |", "|---|---|---|---|", *rows])
