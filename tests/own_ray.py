"""A Ray of the tests' own, as in a user's Ray job, with a token of its own; `manygrad.launch` uses it and leaves it
running."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def own_ray(cpus: int) -> Iterator[Any]:
    folder = tempfile.mkdtemp(prefix="mgtest-", dir="/tmp")
    token = Path(folder, "token")
    token.write_text("0123456789abcdef" * 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        patch.delenv("RAY_ADDRESS", raising=False)
        import ray

        from manygrad.launcher.ray_settings import reread_settings

        reread_settings()
        options = {"include_dashboard": False, "log_to_driver": False, "configure_logging": False}
        ray.init(address="local", num_cpus=cpus, object_store_memory=80 << 20, _temp_dir=folder, **options)
        yield ray
        ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
