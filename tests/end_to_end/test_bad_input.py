"""Bad input gets a clear error and loses nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manygrad import Tensor
from manygrad.nn.state import safe_load, safe_save

SUM = "from manygrad import Tensor\nprint((Tensor.arange(1000).float() * 3 + 1).sum().item())\n"


def test_unknown_device(command: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"TPU.*CPU"):
        Tensor.ones(3, device="TPU:0").realize()
    (tmp_path / "sum.py").write_text(SUM)
    run = command("sum.py", DEVICE="TPU").wait()
    assert run.code == 1 and "TPU" in run.err and "CPU" in run.err.splitlines()[-1], run.err


def test_shapes_and_devices_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(4, 5\)"):
        Tensor.ones(2, 3) @ Tensor.ones(4, 5)
    with pytest.raises(ValueError, match=r"CPU:0.*CPU:1|CPU:1.*CPU:0"):
        (
            Tensor.ones(4, device="CPU:0").contiguous().realize()
            + Tensor.ones(4, device="CPU:1").contiguous().realize()
        ).realize()


def test_command_line(command: Callable[..., Any], tmp_path: Path) -> None:
    run = command("nowhere.py", "--nodes", "2").wait()
    assert run.code == 2 and "nowhere.py" in run.err, run.err
    (tmp_path / "sum.py").write_text(SUM)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = str(s.getsockname()[1])
        run = command("sum.py", "--nodes", "2", "--port", port).wait()
    assert run.code == 2 and port in run.err and "in use" in run.err, run.err
    run = command("sum.py", "--nodes", "5000").wait()
    assert run.code == 69 and "5000 nodes" in run.err, run.err


def test_a_corrupted_disk_cache_is_rebuilt(command: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "sum.py").write_text(SUM)
    folder = tmp_path / "cache"
    first = command("sum.py", CACHE_DIR=str(folder)).wait()
    assert first.code == 0 and first.out == "1499500.0\n", first.err
    files = [p for p in folder.rglob("*") if p.is_file()]
    whole = {p: p.read_bytes() for p in files}
    assert files
    for i, p in enumerate(files):
        p.write_bytes([b"", b"not a kernel" * 50, whole[p][:-7]][i % 3])
    again = command("sum.py", CACHE_DIR=str(folder)).wait()
    assert again.code == 0 and again.out == first.out, again.err
    assert {p: len(p.read_bytes()) for p in files} == {p: len(data) for p, data in whole.items()}


def test_truncated_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safe_save({"w": Tensor(np.arange(600, dtype=np.float32)), "b": Tensor([1.0])}, path)
    data = path.read_bytes()
    for size in (0, 5, 40, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"truncated|not a whole|malformed"):
            safe_load(path)
        assert os.path.getsize(path) == size
    path.write_bytes(data)
    assert safe_load(path)["w"].numpy()[599] == 599
