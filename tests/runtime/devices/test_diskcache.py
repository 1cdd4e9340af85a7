"""The disk cache: damage, bounds, many processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from manygrad.runtime.devices import get_device
from manygrad.runtime.devices.compile.diskcache import DiskCache
from manygrad.tensor.environment import Context
from manygrad.tensor.uop.ops import Ops
from tests.runtime.codegen.kernels import elementwise, f32, run


def key(n: int) -> bytes:
    return bytes([n % 256]) * 31 + bytes([n // 256])


def test_round_trip_and_switch(tmp_path: Path) -> None:
    cache = DiskCache("test")
    with Context(CACHE_DIR=str(tmp_path)):
        assert cache.get(key(1)) is None
        cache.put(key(1), b"value")
        assert cache.get(key(1)) == b"value"
        with Context(CACHE=0):
            assert cache.get(key(1)) is None


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "grow"])
def test_damage_is_seen_and_repaired(tmp_path: Path, damage: str, capfd: pytest.CaptureFixture[str]) -> None:
    ast = elementwise(lambda a: a.alu(Ops.MUL, a), [f32], 40)
    x = np.arange(40, dtype=np.float32)
    run(ast, [np.zeros(40, np.float32), x], device="CPU")  # (the process's first kernel has the thread team compiled)
    with Context(CACHE_DIR=str(tmp_path), DEBUG=1):
        for attempt in range(3):
            get_device("CPU").kernels.kernels.clear()
            assert (run(ast, [np.zeros(40, np.float32), x], device="CPU")[0] == x * x).all()
            (file,) = [p for p in tmp_path.rglob("*") if p.is_file()]
            text = capfd.readouterr().out
            assert ("compiled" in text) == (attempt < 2) and ("is damaged" in text) == (attempt == 1)
            if attempt == 0:
                data = file.read_bytes()
                changed = bytearray(data)
                changed[len(data) // 2] ^= 1
                file.write_bytes({"flip": bytes(changed), "cut": data[:100], "empty": b"", "grow": data + b"x"}[damage])


def test_bounded_by_least_recent_use(tmp_path: Path) -> None:
    cache = DiskCache("test")
    cache.writes = 0  # sweeps by itself only after 32
    with Context(CACHE_DIR=str(tmp_path), CACHE_MB=1):
        for n in range(20):
            cache.put(key(n), bytes(100_000))
            old = time.time() - 10_000 + n
            os.utime(cache.path(key(n)), (old, old))
        assert cache.get(key(0)) is not None  # used: now the most recent
        cache.sweep()
        total = sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file())
        assert total <= 1 << 20
        assert cache.get(key(0)) is not None and cache.get(key(1)) is None and cache.get(key(19)) is not None


def test_unwritable_folder_is_no_error(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with Context(CACHE_DIR=str(blocker / "below")):
        cache = DiskCache("test")
        cache.put(key(1), b"x")
        assert cache.get(key(1)) is None


SCRIPT = """
import numpy as np, sys
from manygrad.tensor.uop.ops import Ops
from tests.runtime.codegen.kernels import elementwise, f32, run
from manygrad.tensor.uop.uop import UOp
x = np.arange(30, dtype=np.float32)
for n in range(6):
    got = run(elementwise(lambda a: a.alu(Ops.ADD, UOp.const(f32, n)), [f32], 30), [x * 0, x], device="CPU")[0]
    assert (got == x + n).all()
"""


def test_many_processes(tmp_path: Path) -> None:
    """Processes that start at once are all right and leave whole entries (six kernels and the thread team);
    the next one compiles nothing."""
    environment = {**os.environ, "CACHE_DIR": str(tmp_path), "DEBUG": "1", "CACHE": "1"}
    start = [sys.executable, "-c", SCRIPT]
    running = [
        subprocess.Popen(start, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for process in running:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert len(files) == 7 and not any(p.name.startswith(".new-") for p in files)
    again = subprocess.run(start, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert "compiled" not in again.stdout and "damaged" not in again.stdout
