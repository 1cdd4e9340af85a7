"""Settings of every test: graphs are verified after each pass,
kernels compiled here are kept apart from the user's cache.

Environment variables are read when the package is imported, and travel to the workers that tests start; so they are set
before anything else. A value given on the command line (`SPEC=0 pytest`) stays.
"""

from __future__ import annotations

import atexit
import gc
import inspect
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

assert not any(m.partition(".")[0] == "manygrad" for m in sys.modules), "manygrad was imported before tests/conftest.py"

os.environ.setdefault("SPEC", "1")
if "CACHE_DIR" not in os.environ:
    os.environ["CACHE_DIR"] = tempfile.mkdtemp(prefix="manygrad-tests-")
    atexit.register(shutil.rmtree, os.environ["CACHE_DIR"], ignore_errors=True)
    os.environ.setdefault("POCL_CACHE_DIR", os.path.join(os.environ["CACHE_DIR"], "pocl"))  # an OpenCL driver's own

gc.set_threshold(10_000, 20, 20)  # (looking for cycles again and again among nodes that live on was 10 % of the time)

import numpy as np  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("manygrad", deadline=None, derandomize=True, database=None, print_blob=False)
settings.load_profile("manygrad")


# tests that start processes of their own, which have deadlines: never two of them at once
STARTS_PROCESSES = (
    *("benchmarks", "collectives/test_endpoint", "collectives/test_going_on", "collectives/test_random"),
    *("collectives/test_reconnect", "chaos", "cuda/test_cuda_runs", "checkpoint/test_", "launcher"),
    *("end_to_end/test_", "end_to_end/llm/test_embed", "end_to_end/llm/test_generate", "end_to_end/llm/test_serve"),
    *("multi/test_groups", "runtime/test_", "test_"),
)
# nothing begins shortly before the end that takes minutes
LONGEST = (
    *("endurance", "tensor/test_ops", "nn/test_every_layer", "fuzz", "cuda", "runtime/devices/test_conformance"),
    *("end_to_end/llm", "tensor/test_aliasing"),
)


def pytest_configure(config: pytest.Config) -> None:
    """pytest-xdist gives out groups in the order in which `pytest_collection_modifyitems` leaves the tests."""
    config.option.loadscopereorder = False


@pytest.hookimpl(tryfirst=True)  # xdist reads the marks in this hook, too
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under `pytest -n 2 --dist loadgroup` a file's tests run in one process, those that start processes all in the
    same one: that takes longest, so they begin first, and what takes minutes after them."""
    if not hasattr(config, "workerinput"):
        return  # this is no process of pytest-xdist's
    tests = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        file = item.path.relative_to(tests).as_posix()
        starts = file.startswith(STARTS_PROCESSES) or "command" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("processes" if starts else file))
        if starts:
            return 0
        return next((n for n, begin in enumerate(LONGEST, 1) if file.startswith(begin)), len(LONGEST) + 1)

    items.sort(key=place)


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Without Python's garbage collector: what dies, dies by reference counts, and nothing of the tests before is left
    to die meanwhile (and a graph of 200,000 nodes is built three times as fast)."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """What counts the process's memory may meet the end of something of an earlier test, in a thread of its own, say:
    such a test has three tries. (What leaks, leaks in each of them.)"""
    if "no_collection" not in pyfuncitem.fixturenames:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    for tries_left in (2, 1, 0):
        try:
            pyfuncitem.obj(**arguments)
            break
        except AssertionError:
            if not tries_left:
                raise
            gc.collect()
    return True


@pytest.fixture(autouse=True)
def numbers_of_its_own(request: pytest.FixtureRequest) -> None:
    """What a test draws from its module's RNG does not depend on the tests before it: it is the same alone, in another
    order, and in one of several processes."""
    rng = getattr(getattr(request, "module", None), "RNG", None)
    if isinstance(rng, np.random.Generator):
        rng.bit_generator.state = np.random.default_rng(crc32(request.node.nodeid.encode())).bit_generator.state


@pytest.fixture(autouse=True)
def leaves_nothing_pending() -> Iterator[None]:
    """A test's assignments do not run inside the next test, nor do its loops go on in it (no call of it is replayed).
    Training mode and the generator start the same.

    (The generator forgets the devices that were drawn on: each draw and each seed would write the counters of all of
    them, and what follows dozens of devices took five times as long.)"""
    from manygrad import Tensor
    from manygrad.tensor.deferred.thread import forget_traces
    from manygrad.tensor.ops.random import forget_draws
    from manygrad.tensor.tensor import PENDING

    forget_traces()
    forget_draws()
    Tensor.training = None
    yield
    for t in list(PENDING):
        PENDING.discard(t)
