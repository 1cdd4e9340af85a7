"""The command line: where options may stand, what goes to the script, what is refused."""

from __future__ import annotations

from dataclasses import fields

import pytest

from manygrad.errors import UsageError
from manygrad.launcher.command_line import help_text, parse
from manygrad.launcher.options import OPTIONS, Options
from manygrad.tensor.environment import REGISTRY


@pytest.mark.parametrize(
    "argv, args, nodes",
    [
        (["train.py"], [], 0),
        (["--nodes", "4", "train.py"], [], 4),
        (["train.py", "--nodes", "4"], [], 4),
        (["train.py", "--nodes=4", "--lr", "0.1"], ["--lr", "0.1"], 4),
        (["train.py", "x", "--nodes", "2", "y", "--help"], ["x", "y", "--help"], 2),
        (["--nodes", "3", "train.py", "--", "--nodes", "9"], ["--nodes", "9"], 3),
        (["--nodes", "3", "--", "train.py", "--nodes", "9"], ["--nodes", "9"], 3),
        (["train.py", "-n", "4"], ["-n", "4"], 0),
    ],
)
def test_where_options_may_stand(argv: list[str], args: list[str], nodes: int) -> None:
    command = parse(argv, {})
    assert (command.kind, command.target, command.args, command.nodes) == ("script", "train.py", args, nodes)


def test_dashes_and_underscores_are_alike() -> None:
    for text in ("--devices-per-node", "--devices_per_node"):
        assert parse(["t.py", text, "3"], {}).devices_per_node == 3


def test_the_kind_of_device() -> None:
    assert parse(["t.py", "--device", "opencl"], {}).device == "OPENCL"
    assert parse(["t.py"], {"MANYGRAD_DEVICE": "PYTHON"}).device == "PYTHON"
    assert parse(["t.py"], {}).device == ""


def test_module() -> None:
    command = parse(["--nodes", "2", "-m", "pkg.train", "--timeout", "9", "-m", "x"], {})
    assert (command.kind, command.target, command.args, command.timeout_s) == (
        "module",
        "pkg.train",
        ["-m", "x"],
        9.0,
    )


def test_an_option_that_is_not_given_has_the_tables_default() -> None:
    job = parse(["t.py"], {"RAY_ADDRESS": "10.0.0.1:6379", "MANYGRAD_GRACE": ""})
    for o, f in zip(OPTIONS, fields(Options), strict=True):
        assert o.field == f.name and getattr(job, f.name) == (f.default if f.name != "address" else "10.0.0.1:6379")
    assert parse(["t.py", "--address", "auto"], {"RAY_ADDRESS": "10.0.0.1:6379"}).address == "auto"
    assert "(default 120)" in help_text() and "{" not in help_text()


def test_ranks_and_names_that_are_there() -> None:
    job = parse(["t.py", "--nodes", "2", "--log-ranks", "0,1", "--env", "A, B"], {"A": "1"})
    assert job.log_ranks == "0,1" and job.env == ("A", "B")  # (one that is not set may be so elsewhere)
    assert parse(["t.py", "--log-ranks", "all", "--nodes", "2"], {}).log_ranks == "all"


def test_environment_variables_are_defaults() -> None:
    environ = {"MANYGRAD_NODES": "4", "MANYGRAD_DEVICES_PER_NODE": "2", "MANYGRAD_TIMEOUT": "7.5"}
    job = parse(["t.py", "--nodes", "3"], environ)
    assert (job.nodes, job.devices_per_node, job.timeout_s) == (3, 2, 7.5)
    assert parse(["t.py"], environ).nodes == 4


def test_every_option_is_in_the_registry_and_in_the_help() -> None:
    for option in OPTIONS:
        # (workers read whether their links are plain)
        assert REGISTRY[option.env].travels == (option.name == "plain-links")
        assert f"--{option.name} {option.metavar}" in help_text()


@pytest.mark.parametrize(
    "argv, environ, words",
    [
        ([], {}, "no script"),
        (["--nodes", "4"], {}, "no script"),
        (["--node", "4", "t.py"], {}, "did you mean --nodes?"),
        (["--wat", "t.py"], {}, "unknown option --wat"),
        (["t.py", "--nodes"], {}, "--nodes needs a value"),
        (["t.py", "--nodes", "0"], {}, "--nodes '0': must be from 1"),
        (["t.py", "--nodes", "-2"], {}, "must be from 1"),
        (["t.py", "--nodes", "four"], {}, "must be a number"),
        (["t.py", "--timeout", "0"], {}, "positive number of seconds"),
        (["t.py", "--port", "70000"], {}, "must be from 0 to 65535"),
        (["t.py", "--log-ranks", "a"], {}, "must be 'all'"),
        (
            ["t.py", "--nodes", "2", "--log-ranks", "0,5"],
            {},
            "--log-ranks 5: there is no such rank; --nodes 2 has 0 to 1",
        ),
        (["t.py"], {"MANYGRAD_NODES": "2", "MANYGRAD_LOG_RANKS": "2"}, "--log-ranks 2: there is no such rank"),
        (
            ["t.py", "--env", "A=b"],
            {},
            "'A=b' is none; it goes with the value that it has here: A=b launcher ... --env A",
        ),
        (["t.py", "--env", "A B"], {}, "--env 'A B': must be names as A,B, 'A B' is none"),
        (
            ["t.py", "--env", "WANDB_KEY"],
            {"WANDB_KEYS": "x"},
            "--env WANDB_KEY: no such variable is set here; did you mean",
        ),
        (["t.py"], {"MANYGRAD_ENV": "x,http_proxy", "HTTP_PROXY": "x"}, "did you mean HTTP_PROXY?"),
        (["t.py"], {"MANYGRAD_NODES": "x"}, "MANYGRAD_NODES 'x'"),
        (["t.py", "--device", "GPU"], {}, "--device 'GPU': must be one of CPU, CUDA, OPENCL, PYTHON, NULL"),
        (["t.py", "--device", "DISK"], {}, "must be one of CPU"),
        (["-m"], {}, "-m needs a module"),
        (["t.py", "--run-dir", "--nodes", "4"], {}, "--run-dir needs a value: --run-dir DIR"),
        (["t.py"], {"MANYGRAD_NODE": "4"}, "nothing reads MANYGRAD_NODE; did you mean MANYGRAD_NODES?"),
    ],
)
def test_what_is_refused(argv: list[str], environ: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError) as e:
        parse(argv, environ)
    assert words in str(e.value) and e.value.exit_code == 2


@pytest.mark.parametrize("token, meant", [
    ("--node", "nodes"), ("--node=4", "nodes"), ("-nodes", "nodes"), ("--Nodes", "nodes"), ("--nnodes", "nodes"),
    ("--nproc_per_node=4", "nodes"), ("--num-processes", "nodes"), ("-np", "nodes"),
    ("--device-per-node", "devices-per-node"),
    ("--devices_per_nodes", "devices-per-node"), ("--time-out", "timeout"), ("--adress", "address"),
    ("--log-rank", "log-ranks"), ("--rundir", "run-dir"), ("--plain-link", "plain-links"),
    ("--start_time_out", "start-timeout"),
])  # fmt: skip
def test_what_reads_like_an_option_is_not_the_scripts_unless_it_says_so(token: str, meant: str) -> None:
    """`launcher first.py --node 4` ran one process, and the script, which reads no arguments, never told."""
    with pytest.raises(UsageError, match=rf"is no option of the launcher; did you mean --{meant}\? .* after `--`"):
        parse(["t.py", token, "4"], {})
    assert parse(["t.py", "--", token, "4"], {}).args == [token, "4"]


@pytest.mark.parametrize("token", [
    "--epochs", "--lr", "--batch-size", "--model", "--modes", "--seed", "--workers", "--num-workers", "--steps",
    "--start", "--log", "--time", "--report", "--notes", "--path", "-n", "-p", "--eval", "--save-dir", "--resume", "-v",
])  # fmt: skip
def test_common_options_of_scripts_stay_theirs(token: str) -> None:
    assert parse(["t.py", token, "4"], {}).args == [token, "4"]
