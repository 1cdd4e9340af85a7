"""The command line of `launcher`: the options (`options.py`), read from arguments and from environment variables.

Options are understood before and after the script, with dashes or underscores, as `--nodes 4` or `--nodes=4`. What
follows the script and is not the launcher's goes to the script, and so does everything after `--`. But what reads like
one of the launcher's options (`--node 4`) and stands before `--` is an error that says which: as the script's it would
start one process without a word.
"""

from __future__ import annotations

import difflib
from typing import Any

from manygrad.errors import UsageError
from manygrad.tensor.environment import REGISTRY

from .job import REAL_ENDPOINT, Job
from .options import OPTIONS, Option

_BY_NAME = {o.name: o for o in OPTIONS}
# what other launchers (torchrun, mpirun, accelerate) call the number of processes
_MEANT = dict.fromkeys(("nnodes", "num-nodes", "nproc-per-node", "num-processes", "np", "nprocs"), "nodes")


def _near(text: str) -> str:
    """The option whose name is all but this one, or none."""
    name = text.lower().replace("_", "-")
    # (0.8 is that of one letter of five)
    close = difflib.get_close_matches(name, _BY_NAME, 1, 0.81)
    return _MEANT.get(name) or (close[0] if close else "")


def parse(argv: list[str], environ: dict[str, str]) -> Job:
    """The command line and the environment as a job, whose kind is "help" where only that is asked for.
    Raises `UsageError`."""
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
            return Job("help")
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
    nodes, least = values.get("nodes", 0), values.get("min_nodes", 0)
    if not nodes and (least or values.get("max_restarts")):
        raise UsageError("--max-restarts and --min-nodes are of runs on workers: give --nodes, too")
    if least > nodes:
        raise UsageError(f"--min-nodes {least} is more than --nodes {nodes}")
    _check_ranks(values.get("log_ranks", ""), nodes)
    _check_names(values.get("env", ()), environ)
    values.setdefault("address", environ.get("RAY_ADDRESS", ""))
    endpoint, clock_rate = environ.get("MANYGRAD_ENDPOINT") or REAL_ENDPOINT, environ.get("MANYGRAD_CLOCK_RATE")
    return Job(kind, target, args, endpoint=endpoint, clock_rate=float(clock_rate or 1), **values)


def _check_ranks(ranks: str, nodes: int) -> None:
    """The ranks that are to be shown must be there."""
    if nodes and (beyond := [r for r in ranks.split(",") if r.isdigit() and int(r) >= nodes]):
        raise UsageError(f"--log-ranks {beyond[0]}: there is no such rank; --nodes {nodes} has 0 to {nodes - 1}")


def _check_names(names: tuple[str, ...], environ: dict[str, str]) -> None:
    """A variable that is not set is carried nowhere; where one with all but its name is, that is meant."""
    for name in names:
        if name not in environ:
            alike = [n for n in environ if n.lower() == name.lower()]
            near = alike or difflib.get_close_matches(name, environ, 1, 0.81)
            if near:
                raise UsageError(f"--env {name}: no such variable is set here; did you mean {near[0]}?")


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
        "       launcher status|stacks|stop RUN_DIR     of a run that goes on",
        "       launcher doctor [--device KIND]         what this host has, how fast it is, what is missing",
        "       launcher warm SCRIPT [options]          its first steps alone, for what they compile (LAST_STEP)",
        "       launcher replay FILE                    a step that a rank has saved (FAILED_STEPS)",
        "       launcher convert SRC DST [--help]       checkpoints of torch and Hugging Face into ours, and back",
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
        "  2 usage, 69 more nodes than fit, 75 no restarts are left, 124 time-out, 130 Ctrl-C, 143 SIGTERM",
        "",
        "examples:",
        "  launcher train.py                          one process",
        "  launcher train.py --nodes 4 --epochs 3     four workers on this machine; --epochs goes to train.py",
        "  launcher train.py --nodes 4 --address auto four hosts of the running Ray cluster",
    ]
    return "\n".join(lines) + "\n"
