"""The command line of `launcher`: one table of options, read from arguments and from environment variables.

Options are understood before and after the script, with dashes or underscores, as `--nodes 4` or `--nodes=4`. What
follows the script and is not the launcher's goes to the script, and so does everything after `--`. But what reads like
one of the launcher's options (`--node 4`) and stands before `--` is an error that says which: as the script's it would
start one process without a word.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from manygrad.errors import UsageError
from manygrad.tensor.environment import REGISTRY

from .job import REAL_ENDPOINT, Job


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 1 << 16:
        raise ValueError("must be from 1 to 65536")
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


def _names(text: str) -> list[str]:
    return [n.strip() for n in text.split(",") if n.strip()]


@dataclass(frozen=True)
class Option:
    """One option `--name`; its environment variable is `MANYGRAD_NAME`. Without a `metavar` it takes no value."""

    name: str
    metavar: str
    parse: Callable[[str], Any]
    help: str

    @property
    def field(self) -> str:
        return self.name.replace("-", "_")

    @property
    def env(self) -> str:
        return f"MANYGRAD_{self.field.upper()}"


OPTIONS = (
    Option(
        "nodes", "N", _count, "number of workers, one a node; without it the script runs in this process, without Ray"
    ),
    Option("devices-per-node", "D", _count, "devices of each worker (default 1)"),
    Option(
        "device",
        "KIND",
        kind_of_device,
        "kind of the workers' devices and of new tensors, as DEVICE: CPU (default), OPENCL, PYTHON, NULL",
    ),
    Option(
        "address",
        "HOST:PORT",
        str,
        "attach to this Ray cluster ('auto': the one on this host); default: start one for this run, on this machine",
    ),
    Option("timeout", "S", _seconds, "stop the run after S seconds, exit code 124"),
    Option("start-timeout", "S", _seconds, "all workers must be up after S seconds (default 120)"),
    Option("grace", "S", _seconds, "after a failure, time for the other workers to stop by themselves (default 2)"),
    Option("run-dir", "DIR", str, "folder for logs and report.json (default runs/<date-time>-<script>)"),
    Option(
        "log-ranks",
        "RANKS",
        _ranks,
        "ranks whose stdout shows on the console: 'all' or a list like 0,3 (default 0; stderr always shows)",
    ),
    Option("env", "NAMES", _names, "more environment variables to carry to workers on other hosts, as A,B"),
    Option("port", "PORT", _port, "port of the control channel (default: chosen by the system)"),
    Option(
        "plain-links",
        "",
        _flag,
        "for trusted networks: data between hosts is not encrypted; connections are authenticated all the same",
    ),
)
_BY_NAME = {o.name: o for o in OPTIONS}
# what other launchers (torchrun, mpirun, accelerate) call the number of processes
_MEANT = dict.fromkeys(("nnodes", "num-nodes", "nproc-per-node", "num-processes", "np", "nprocs"), "nodes")


def _near(text: str) -> str:
    """The option whose name is all but this one, or none."""
    name = text.lower().replace("_", "-")
    # (0.8 is that of one letter of five)
    close = difflib.get_close_matches(name, _BY_NAME, 1, 0.81)
    return _MEANT.get(name) or (close[0] if close else "")


@dataclass
class Command:
    """A parsed command line. `nodes` is None for a run in this process; `kind` is "help", "script" or "module"."""

    kind: str
    target: str = ""
    args: list[str] | None = None
    nodes: int | None = None
    values: dict[str, Any] | None = None

    def job(self) -> Job:
        """The job for the driver."""
        v = self.values or {}
        return Job(
            self.kind,
            self.target,
            self.args or [],
            nodes=self.nodes or 1,
            devices_per_node=v.get("devices_per_node", 1),
            device=v.get("device", ""),
            address=v.get("address") or os.environ.get("RAY_ADDRESS", ""),
            timeout_s=v.get("timeout"),
            start_timeout_s=v.get("start_timeout", 120.0),
            grace_s=v.get("grace", 2.0),
            run_dir=v.get("run_dir", ""),
            port=v.get("port", 0),
            show_stdout=v.get("log_ranks", "0"),
            carry=v.get("env", []),
            plain_links=v.get("plain_links", False),
            endpoint=os.environ.get("MANYGRAD_ENDPOINT") or REAL_ENDPOINT,
            clock_rate=float(os.environ.get("MANYGRAD_CLOCK_RATE") or 1),
        )


def parse(argv: list[str], environ: dict[str, str]) -> Command:
    """The command line and the environment as a `Command`. Raises `UsageError`."""
    values: dict[str, Any] = {}
    for o in OPTIONS:
        if environ.get(o.env):
            values[o.field] = _value(o, environ[o.env], o.env)
    for variable in environ:
        if variable.startswith("MANYGRAD_") and variable not in REGISTRY:
            if near := _near(variable.removeprefix("MANYGRAD_")):
                raise UsageError(f"nothing reads {variable}; did you mean {_BY_NAME[near].env}?")
    kind, target, args, i = "script", "", list[str](), 0
    while i < len(argv):
        token = argv[i]
        i += 1
        if token == "--":
            if not target:
                if i >= len(argv):
                    break
                target, i = argv[i], i + 1
                args += argv[i:]
            else:
                args += argv[i:]
            break
        name, has_value, value = token.removeprefix("--").partition("=")
        option = _BY_NAME.get(name.replace("_", "-")) if token.startswith("--") else None
        if option is not None:
            if not has_value and not option.metavar:
                value = "1"
            elif not has_value:
                if i >= len(argv) or argv[i].startswith("--"):
                    raise UsageError(f"{token} needs a value: {token} {option.metavar}")
                value, i = argv[i], i + 1
            values[option.field] = _value(option, value, token.partition("=")[0])
        elif target:
            near = _near(name.lstrip("-")) if token.startswith("-") else ""
            if near:
                raise UsageError(
                    f"{token} is no option of the launcher; did you mean --{near}? An option of {target} with that "
                    f"name goes after `--`: launcher {target} -- {token}"
                )
            args.append(token)
        elif token in ("-h", "--help"):
            return Command("help")
        elif token == "-m":
            if i >= len(argv):
                raise UsageError("-m needs a module: launcher -m package.module")
            kind, target, i = "module", argv[i], i + 1
        elif token.startswith("-") and token != "-":
            close = difflib.get_close_matches(
                token.partition("=")[0].replace("_", "-"), [f"--{n}" for n in _BY_NAME], 1
            )
            raise UsageError(
                f"unknown option {token}"
                + (f"; did you mean {close[0]}?" if close else "; options of the script go after it")
            )
        else:
            target = token
    if not target:
        raise UsageError("no script given; usage: launcher SCRIPT [--nodes N] [options] [-- script args]")
    return Command(kind, target, args, values.pop("nodes", None), values)


def _value(option: Option, text: str, source: str) -> Any:
    try:
        return option.parse(text)
    except ValueError as e:
        reason = str(e) if str(e).startswith("must") else "must be a number"
        raise UsageError(f"{source} {text!r}: {reason}") from None


def help_text() -> str:
    """Text of `launcher --help`."""
    lines = [
        "usage: launcher SCRIPT [options] [-- script args]",
        "       launcher -m MODULE [options] [-- script args]",
        "",
        "Run a Python script on N workers, or without --nodes in this process.",
        "",
        "options, before or after the script:",
    ]
    width = max(len(o.name) + len(o.metavar) for o in OPTIONS) + 5
    lines += [f"  {f'--{o.name} {o.metavar}':<{width}} {o.help}" for o in OPTIONS]
    lines += [
        f"  {'-m MODULE':<{width}} run a module as `python -m` does",
        f"  {'-h, --help':<{width}} show this (before the script)",
        "",
        "Each option can be set by an environment variable: --run-dir is MANYGRAD_RUN_DIR, and so on.",
        "Other options after the script, and all after `--`, go to the script; what reads like one of these",
        "options (--node 4) is an error unless it stands after `--`.",
        "",
        "exit codes: 0 all ranks succeeded; else the first failing rank's own, 128+signal if it was killed;",
        "  2 usage, 69 more nodes than fit, 124 time-out, 130 Ctrl-C, 143 SIGTERM",
        "",
        "examples:",
        "  launcher train.py                          one process",
        "  launcher train.py --nodes 4 --epochs 3     four workers on this machine; --epochs goes to train.py",
        "  launcher train.py --nodes 4 --address auto four hosts of the running Ray cluster",
    ]
    return "\n".join(lines) + "\n"
