"""BEAM: the search by itself, with made-up costs, and on the CPU device."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from math import inf
from pathlib import Path

import numpy as np
import pytest

from manygrad.runtime.codegen.analysis.describe import signature
from manygrad.runtime.codegen.opts import CacheRead, Opts, Parallel, Tile, Unroll
from manygrad.runtime.codegen.pipeline import prepare
from manygrad.runtime.codegen.search import beam_search
from manygrad.runtime.devices import get_device
from manygrad.runtime.devices.compile.diskcache import DiskCache
from manygrad.runtime.devices.cpu.bench import BENCH
from manygrad.runtime.devices.target import host_target
from manygrad.runtime.devices.tune import tune
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.environment import Context
from manygrad.tensor.uop.args import VarArg
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp
from tests.opencl import OPENCL
from tests.runtime.codegen.kernels import I, add, gemm, load, loop, mul, run, sink, store

# *** the search ***


def tiles(opts: Opts) -> tuple[int, int]:
    return tuple(next((o.values[1] for o in opts if o.values[0] == a), 1) for a in (0, 1))  # type: ignore[return-value]


def around(opts: Opts) -> list[Opts]:
    """One of two tiles, one larger or smaller."""
    a, b = tiles(opts)
    steps = [(a + 1, b), (a - 1, b), (a, b + 1), (a, b - 1)]
    return [(Tile(0, x), Tile(1, y)) for x, y in steps if x > 0 and y > 0]


def test_climbs_to_the_minimum_and_stops() -> None:
    asked: list[Opts] = []

    def measure(opts: Opts, best: float) -> float:
        asked.append(opts)
        a, b = tiles(opts)
        return 1.0 + abs(a - 6) + abs(b - 3)

    found = beam_search([()], around, measure, 1)
    assert tiles(found.fastest(1)[0]) == (6, 3) and found.best == 1.0
    assert len(asked) == len(set(asked)), "a list is measured once"
    assert found.rounds == 5 + 2 + 1  # one step a round, and one that finds nothing


def test_a_wider_beam_passes_a_hill() -> None:
    """(1, 1) -> (2, 1) is a dead end that looks better at first."""
    cost = {(1, 1): 10.0, (2, 1): 5.0, (1, 2): 6.0, (1, 3): 4.0, (1, 4): 1.0}

    def measure(opts: Opts, best: float) -> float:
        return cost.get(tiles(opts), inf)

    assert beam_search([()], around, measure, 1).best == 5.0
    assert beam_search([()], around, measure, 2).best == 1.0


def test_dropped_lists_are_never_best_and_the_best_is_told() -> None:
    bests: list[float] = []

    def measure(opts: Opts, best: float) -> float:
        bests.append(best)
        return inf if tiles(opts)[0] > 1 else 2.0

    found = beam_search([(), (Tile(0, 2),)], around, measure, 3)
    assert bests[:2] == [inf, 2.0] and found.best == 2.0
    assert all(tiles(o)[0] == 1 for o in found.fastest(100))


def test_no_time_means_the_starts() -> None:
    found = beam_search([(), (Tile(0, 2),)], around, lambda opts, best: 1.0, 4, limit_s=-1)
    assert len(found.seconds) == 2


# *** on the device ***

PRODUCT = gemm(40, 48, 50)


def data(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(s).astype(np.float32) for s in shapes]


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Checked kernels are not searched for."""
    monkeypatch.setenv("CHECK_OOB", "0")
    with Context(CHECK_OOB=0):
        yield


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A disk cache of its own, and few candidates."""
    monkeypatch.setattr(tune, "neighbours", lambda *args, real=tune.neighbours: real(*args)[::6])
    monkeypatch.setattr(tune, "SEARCH_LIMIT_S", 60.0)  # (on a busy machine a compiler of OpenCL takes seconds)
    monkeypatch.setattr(get_device("CPU").kernels, "kernels", {})
    return tmp_path


@pytest.mark.parametrize("kind", ["CPU", OPENCL])
def test_search_keeps_the_bits_and_the_winner(
    kind: str, quick: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(get_device(kind).kernels, "kernels", {})
    arrays = [np.zeros((40, 48), np.float32), *data((40, 50), (50, 48))]
    plain = run(PRODUCT, arrays, device=kind)[0]
    with Context(CACHE_DIR=str(quick), BEAM=2, DEBUG=1):
        got = run(PRODUCT, arrays, device=kind)[0]
        text = capsys.readouterr().out
        assert re.search(r"^beam r_40_48_50_\w+: round 1, \d+ tried", text, re.MULTILINE), text
        assert re.search(r"^beam r_40_48_50_\w+: [\d.]+ -> [\d.]+ us, \d+ tried.* in [\d.]+ s: \[", text, re.MULTILINE)
        np.testing.assert_array_equal(got, plain)
        (winner,) = [p for p in (quick / "beam").rglob("*") if p.is_file() and p.name != "lock"]
        assert json.loads(winner.read_bytes().split(b"\n", 1)[1][32:])
        searched = get_device(kind).compile(PRODUCT)
        get_device(kind).kernels.kernels.clear()  # as in the next process
        again = get_device(kind).compile(PRODUCT)
        assert again is not searched and again.opts == searched.opts
        assert "beam" not in capsys.readouterr().out, "the winner is on disk"
    assert get_device(kind).compile(PRODUCT) is not again, "BEAM is part of the key"


def test_a_damaged_winner_is_searched_again(quick: Path) -> None:
    with Context(CACHE_DIR=str(quick), BEAM=1):
        key = b"k" * 32
        sig = signature(prepare(PRODUCT, host_target().machine).ast)
        cache = DiskCache("beam")
        now = tune.WINNERS_VERSION
        assert tune._stored(key, sig) is None
        for version, opts in (
            (now, [["tile", 9, 4]]),
            (now, [["swizzle", 0, 4]]),
            (now - 1, [["tile", 0, 4]]),
            (now, 7),
        ):
            cache.put(key, json.dumps({"version": version, "opts": opts}).encode())
            assert tune._stored(key, sig) is None
        cache.put(key, json.dumps([["tile", 0, 4]]).encode())  # (the first version's form)
        assert tune._stored(key, sig) is None
        cache.put(key, json.dumps({"version": now, "opts": [["tile", 0, 4]]}).encode())
        assert tune._stored(key, sig) == (Tile(0, 4),)


def test_a_wrong_candidate_is_never_used(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowering that goes wrong for one kind of Opt: an error with DEBUG, a candidate less without."""
    real = tune.Search.right
    wrong: list[Opts] = []

    def right(self: tune.Search, opts: Opts) -> bool:
        if Unroll(2, 4) in opts:
            self.arrays[0][0] += 1  # as if the kernel had written that
        found = real(self, opts)
        wrong.extend([] if found else [opts])
        return found

    monkeypatch.setattr(tune.Search, "right", right)
    monkeypatch.setattr(tune, "neighbours", lambda *args: [(Parallel(1), Unroll(2, 4)), (Parallel(1),)])  # fmt: skip
    with Context(CACHE_DIR=str(quick), BEAM=1):
        chosen = tune.tuned(PRODUCT, BENCH)
        assert wrong and chosen is not None and Unroll(2, 4) not in chosen
    with Context(CACHE_DIR=str(quick), BEAM=2, DEBUG=1):  # (another key)
        with pytest.raises(
            tune.WrongKernelError, match=r"unroll\(2, 4\).* gives other numbers than under the heuristic's"
        ):
            tune.tuned(PRODUCT, BENCH)


def test_what_does_not_compile_is_counted(
    quick: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune, "neighbours", lambda *args: [(CacheRead(1, 7),), (Tile(9, 7),)])
    with Context(CACHE_DIR=str(quick), BEAM=1, DEBUG=1):
        assert tune.tuned(PRODUCT, BENCH)
    assert re.search(r"4 tried \([^)]*1 failed", capsys.readouterr().out)


def test_buffers_cover_what_is_touched() -> None:
    n = UOp(Ops.DEFINE_VAR, dtypes.index, (), VarArg("n", 1, 30))
    i, j = loop(n, 0), loop(16, 1)
    at = load(2, i, dtypes.int64).cast(dtypes.index)
    inside = I(0).alu(Ops.CMPLT, j)
    value = load(1, add(mul(at, 16), j)).alu(Ops.ADD, load(3, add(mul(i, 16), j, -1), valid=inside))
    assert tune.extents(signature(sink(store(0, add(mul(i, 16), j), value, i, j)))) == {0: 480, 1: 16, 2: 30, 3: 479}
    backwards = sink(store(0, i, load(1, add(i, -1)), i))
    assert tune.extents(signature(backwards)) is None  # an index that may be negative: not run on made-up buffers
    far = sink(store(0, i, load(1, mul(i, 1 << 40), valid=i.alu(Ops.CMPLT, I(1))), i))
    assert tune.extents(signature(far)) is None


def test_adding_stores_are_left_alone(tmp_path: Path) -> None:
    i, j = loop(50, 0), loop(400, 1)
    at = load(2, i, dtypes.int64).cast(dtypes.index)
    for arg in ("add", None):
        ast = sink(store(0, add(mul(at, 400), j), load(1, add(mul(i, 400), j)), i, j, arg=arg))
        with Context(CACHE_DIR=str(tmp_path), BEAM=2):
            assert tune.tuned(ast, BENCH) is None


def test_in_place_and_symbolic(quick: Path) -> None:
    n = UOp(Ops.DEFINE_VAR, dtypes.index, (), VarArg("n", 1, 3000))
    i, j = loop(n, 0), loop(17, 1)
    at = add(mul(i, 17), j)
    ast = sink(store(0, at, load(0, at).alu(Ops.SUB, load(1, j).alu(Ops.MUL, load(2, at))), i, j))
    arrays = data((3000, 17), (17,), (3000, 17))
    with Context(CACHE_DIR=str(quick), BEAM=1):
        for rows in (3000, 1, 77):
            got, want = (run(ast, arrays, (rows,), d)[0] for d in ("CPU", "PYTHON"))
            np.testing.assert_allclose(got, want, rtol=1e-6)


SCRIPT = """
import numpy as np
from manygrad.runtime.devices.tune import tune
from manygrad.runtime.devices.cpu.bench import BENCH
from tests.runtime.codegen.kernels import gemm
tune.neighbours = lambda *args, real=tune.neighbours: real(*args)[::8]
print(tune.tuned(gemm(40, 48, 50), BENCH))
"""


def test_processes_share_one_search(tmp_path: Path) -> None:
    env = {
        **os.environ,
        "CACHE_DIR": str(tmp_path),
        "BEAM": "1",
        "DEBUG": "1",
        "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path]),
    }
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    texts = []
    for w in workers:
        out, err = w.communicate(timeout=120)
        assert w.returncode == 0, err
        texts.append(out)
    assert sum("round 1," in t for t in texts) == 1
    assert len({t.splitlines()[-1] for t in texts}) == 1


def test_the_lock_is_held_by_one(tmp_path: Path) -> None:
    with Context(CACHE_DIR=str(tmp_path)):
        cache = DiskCache("beam")
        with cache.lock(1.0) as first:
            assert first
            with cache.lock(0.05) as second:
                assert not second
        with cache.lock(1.0) as third:
            assert third
        with Context(CACHE=0), cache.lock(0.0) as fourth, cache.lock(0.0) as fifth:
            assert fourth and fifth


def test_a_split_search_may_change_the_sums(quick: Path) -> None:
    arrays = [np.zeros((40, 48), np.float32), *data((40, 50), (50, 48))]
    with Context(CACHE_DIR=str(quick), BEAM=1, BEAM_SPLIT=1):
        got = run(PRODUCT, arrays, device="CPU")[0]
    np.testing.assert_allclose(got, arrays[1] @ arrays[2], rtol=1e-4, atol=1e-4)
