"""The one registry of environment variables.

Every knob is declared here once: name, default, unit, meaning, and whether `launcher` carries it to the workers.
`docs/environment.md` is generated from this table (`python -m manygrad.tensor.environment`), and a test holds it true.
A variable's value is read from the process environment once, at import, and can be overridden for a block of code with
`Context(DEBUG=2)`, in the thread (or asyncio task) that does so.
"""

from __future__ import annotations

import os
from contextlib import ContextDecorator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


@dataclass
class EnvVar:
    """One knob. `value`, of this thread, is an `int`, `float` or `str`, by the type of `default`."""

    name: str
    default: int | float | str
    unit: str
    meaning: str
    travels: bool = True

    def __post_init__(self) -> None:
        self.common: Any = self._parse(os.environ.get(self.name))  # to all threads, but where a Context overrides it
        if self.name in REGISTRY:
            raise AssertionError(f"environment variable {self.name} declared twice")
        REGISTRY[self.name] = self

    def _parse(self, text: str | None) -> int | float | str:
        if text is None or text == "":
            return self.default
        try:
            return type(self.default)(text)
        except ValueError:
            kind = type(self.default).__name__
            raise ValueError(
                f"{self.name}={text!r} is not a valid {kind} (default {self.default!r}): {self.meaning}"
            ) from None

    @property
    def value(self) -> Any:
        overrides = _overridden()
        return self.common if overrides is None else overrides.get(self.name, self.common)

    def __bool__(self) -> bool:
        overrides = _overridden()
        return bool(self.common if overrides is None else overrides.get(self.name, self.common))

    def __int__(self) -> int:
        return int(self.value)

    def __ge__(self, other: float) -> bool:
        overrides = _overridden()
        return bool((self.common if overrides is None else overrides.get(self.name, self.common)) >= other)


REGISTRY: dict[str, EnvVar] = {}
overridden: ContextVar[dict[str, Any] | None] = ContextVar("environment", default=None)  # by Contexts, by name
_overridden = overridden.get

DEBUG = EnvVar(
    "DEBUG",
    0,
    "level",
    "1: what is compiled and planned; 2: one line a kernel with time, GFLOPS, GB/s; 3: "
    "kernel graphs and their optimisations; 4: generated code, which decision gave which Opt, and why "
    "values are stored between kernels; 5: every pass and loop tree; 6: the graph before the first pass, and what "
    "each pass changes in it",
)
SPEC = EnvVar("SPEC", 0, "flag", "verify the graph against the stage's spec after every pass")
TRACK_MATCH_STATS = EnvVar(
    "TRACK_MATCH_STATS",
    0,
    "flag",
    "keep every rewrite of every pass (pass, rule, node before and after, the user's line) in "
    "`manygrad.tensor.uop.track.records`; with DEBUG=5 each kernel's are printed",
)
SCACHE = EnvVar("SCACHE", 1, "flag", "keep schedules under the structural key of their graph")
CACHE = EnvVar("CACHE", 1, "flag", "keep compiled kernels on disk")
CACHE_DIR = EnvVar(
    "CACHE_DIR", os.path.join(os.path.expanduser("~"), ".cache", "manygrad"), "path", "folder of the disk cache"
)
CACHE_MB = EnvVar("CACHE_MB", 512, "MiB", "upper bound of the disk cache; the least recently used entries go first")
PROFILE = EnvVar(
    "PROFILE",
    "",
    "path",
    "write a Chrome trace of the program at its end: 1: profile.json here (with the launcher: in the run's folder); "
    "else a .json file, or a folder; one file a rank",
)
JIT = EnvVar(
    "JIT",
    1,
    "level",
    "0: TinyJit calls the function every time; 1: replay captured calls; 2: replay without native graph batching",
)
JIT_CHECK = EnvVar(
    "JIT_CHECK",
    1,
    "flag",
    "the function of a TinyJit is followed again in its 3rd, 10th, 100th, 1000th, ... call, without running, and an "
    "error says where it would not do what was captured",
)
FOLLOW = EnvVar(
    "FOLLOW",
    1,
    "flag",
    "calls of a loop that were made in this order before are put off and replayed as one; 0: each is made at once",
)
DEVICE = EnvVar("DEVICE", "CPU", "name", "default device of new tensors")
OPENCL_DEVICE = EnvVar(
    "OPENCL_DEVICE", 0, "number", "the OpenCL device that OPENCL:i run on, in the order of `clinfo -l`, from 0"
)
CUDA_DEVICE = EnvVar(
    "CUDA_DEVICE",
    0,
    "number",
    "the GPU that CUDA:0 is, in the driver's order, from 0; CUDA:1 is the next one, after the last comes the first "
    "(the launcher adds what the workers before it on its host have)",
)
THREADS = EnvVar(
    "THREADS",
    0,
    "count",
    "threads of the native CPU team; 0: the cores this process may use (the launcher sets a worker's share)",
)
NOOPT = EnvVar("NOOPT", 0, "flag", "lower kernels without loop optimisation")
CHECK_OOB = EnvVar(
    "CHECK_OOB",
    0,
    "flag",
    "kernels of CPU, CUDA and OPENCL check the index of every load and store; one outside of its buffer is not made, "
    "and is an error",
)
BEAM = EnvVar(
    "BEAM",
    0,
    "count",
    "search the optimisations of each kernel (of CPU, CUDA, OPENCL) by measuring, this many kept a round; winners stay "
    "on disk. 0: the heuristic's alone",
)
FLOAT32_PARTS = EnvVar(
    "FLOAT32_PARTS",
    1,
    "flag",
    "products of float32 on a matrix unit (AMX), each number as the sum of three of bfloat16, as exact as float32; "
    "0: by FMAs alone",
)
FLOAT32_MATMUL_PRECISION = EnvVar(
    "FLOAT32_MATMUL_PRECISION",
    "highest",
    "name",
    "of products of float32: highest; high, medium: their factors may be rounded to tf32 (10 bits after the point), "
    "where a GPU multiplies those faster (`set_float32_matmul_precision`)",
)
BEAM_SPLIT = EnvVar(
    "BEAM_SPLIT",
    0,
    "flag",
    "BEAM may also change how a reduction is split into partial sums, and with that the last bits of a result",
)
VALIDATE_WITH_CPU = EnvVar(
    "VALIDATE_WITH_CPU", 0, "flag", "run every kernel a second time on the PYTHON device and compare the outputs"
)
DETECT_ANOMALY = EnvVar(
    "DETECT_ANOMALY",
    0,
    "level",
    "look at what each kernel writes, and raise AnomalyError where it makes NaN (1), or infinity from finite numbers, "
    "too (2); see `detect_anomaly`",
)
LAST_STEP = EnvVar(
    "LAST_STEP",
    0,
    "steps",
    "the program ends, without an error, before the step of an optimiser or call of a TinyJit after so many; 0: never "
    "(`launcher warm`)",
)
FAILED_STEPS = EnvVar(
    "FAILED_STEPS",
    "",
    "path",
    "a folder where a rank that fails saves its last step's inputs and graphs, for `launcher replay FILE`; implies "
    "JIT=0 and FOLLOW=0",
)
COLLECTIVE = EnvVar(
    "COLLECTIVE", "", "name", "force a collective algorithm (naive, ring, direct, ...); empty: the cost model chooses"
)
SUM_BLOCKS = EnvVar(
    "SUM_BLOCKS",
    8,
    "blocks",
    "in which a sum over a cut dim is taken, by global position: the numbers are the same on every count of devices "
    "that is this over a power of two, and on one device; 24 for 3, 6 and 12 devices",
)
COLLECTIVE_TIMEOUT_S = EnvVar(
    "COLLECTIVE_TIMEOUT_S",
    300.0,
    "s",
    "deadline of one wait for a peer inside a collective, counted from the last sign of progress",
)
KERNEL_TIMEOUT_S = EnvVar(
    "KERNEL_TIMEOUT_S",
    300.0,
    "s",
    "deadline of one wait for a GPU, counted from the last sign that it gets on",
)
RECONNECT_TIMEOUT_S = EnvVar(
    "RECONNECT_TIMEOUT_S",
    5.0,
    "s",
    "how long the host of a worker may be unreachable (over ZeroMQ) before that worker counts as lost",
)
TRANSPORT = EnvVar(
    "TRANSPORT",
    "",
    "name",
    "force a transport between workers (shm, zmq); empty: shared memory where a peer's arena can be attached, "
    "else ZeroMQ",
)
SEED = EnvVar("SEED", 0, "number", "seed of the random generator before the first manual_seed")

# launcher; its other options are declared in `launcher/options.py`
MANYGRAD_PLAIN_LINKS = EnvVar(
    "MANYGRAD_PLAIN_LINKS",
    0,
    "flag",
    "launcher --plain-links: data between hosts travels unencrypted, for networks that are trusted; connections are "
    "authenticated all the same",
)
MANYGRAD_ENDPOINT = EnvVar(
    "MANYGRAD_ENDPOINT",
    "",
    "name",
    "module:class that stands in for the transport's endpoint (tests of the launcher)",
    travels=False,
)
MANYGRAD_CLOCK_RATE = EnvVar(
    "MANYGRAD_CLOCK_RATE",
    "",
    "factor",
    "so many times as fast run the clocks of launcher, supervisors and control channels (tests of long runs)",
    travels=False,
)
HEARTBEAT_TIMEOUT_S = EnvVar(
    "HEARTBEAT_TIMEOUT_S",
    60.0,
    "s",
    "a worker that the launcher has not heard from for so long has failed; and so has a launcher that the workers have "
    "not",
    travels=False,
)


if FAILED_STEPS.common:  # calls that are replayed would not be noted
    JIT.common = FOLLOW.common = 0


class Context(ContextDecorator):
    """Overrides environment variables for a block: `with Context(DEBUG=2): ...`."""

    def __init__(self, **overrides: int | float | str):
        unknown = sorted(set(overrides) - set(REGISTRY))
        if unknown:
            raise ValueError(f"unknown environment variables {unknown}; known: {sorted(REGISTRY)}")
        self.overrides = overrides
        self.saved: list[dict[str, Any] | None] = []

    def _recreate_cm(self) -> Context:
        """Context of a decorated function, for each call."""
        return Context(**self.overrides)

    def __enter__(self) -> Context:
        before = overridden.get()
        self.saved.append(before)
        values = {**(before or {}), **self.overrides}
        # (what is as without a Context overrides nothing: a loop inside is replayed)
        overridden.set({k: v for k, v in values.items() if v != REGISTRY[k].common} or None)
        return self

    def __exit__(self, *exc: object) -> None:
        overridden.set(self.saved.pop())


def markdown_table() -> str:
    """The table of `docs/environment.md`."""
    rows = [
        "# Environment variables",
        "",
        "Generated by `python -m manygrad.tensor.environment`; do not edit by hand.",
        "",
    ]
    rows += ["| name | default | unit | travels to workers | meaning |", "|---|---|---|---|---|"]
    for v in sorted(REGISTRY.values(), key=lambda v: v.name):
        default = str(v.default).replace(os.path.expanduser("~"), "~") or "(empty)"
        rows.append(f"| `{v.name}` | `{default}` | {v.unit} | {'yes' if v.travels else 'no'} | {v.meaning} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(markdown_table(), end="")
