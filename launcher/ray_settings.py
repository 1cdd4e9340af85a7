"""Ray's own settings: those of a run, and what no setting of it changes, while it starts or is attached to."""

from __future__ import annotations

import importlib
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

QUIET = {
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_enable_metrics_collection": "false",
    "RAY_worker_niceness": "0",  # the workers are the job, not something in its background
    # without its GCS Ray ends the processes that use it, the launcher too
    "RAY_gcs_rpc_server_reconnect_timeout_s": "1000000",
}
# Of a Ray that is ours. It would take the host's address instead of the one we give, and listen on all interfaces;
# in a world of one host it takes loopback.
OWN = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
# Processes that a Ray of ours has no use for: autoscaler, dashboard, and what sends logs to the driver. Each imports
# Ray, while on a busy machine the others give up waiting for each other.
_UNUSED = ("start_monitor", "start_api_server", "start_log_monitor")


def reread_settings() -> None:
    """Ray reads its environment variables once, when it is loaded; have it do so again."""
    import ray._raylet as raylet

    config, tokens = getattr(raylet, "Config", None), getattr(raylet, "AuthenticationTokenLoader", None)
    if config is not None and tokens is not None:
        config.initialize("")
        tokens.instance().reset_cache()


def reach(host: str, port: str) -> None:
    """Raises `OSError` if nothing answers there."""
    socket.create_connection((host, int(port)), timeout=5).close()


@contextmanager
def on_loopback(address: str) -> Iterator[None]:
    """Attach to where a Ray answers. Ray takes the host's address for 127.0.0.1, where a head that listens on loopback
    alone is not found, and waits for it for ever. Raises `ConnectionError` if nothing answers there."""
    from ray._private import ray_constants, services

    found = services.canonicalize_bootstrap_address_or_die(address)
    host, _, port = found.rpartition(":")
    try:
        reach(host.strip("[]"), port)
    except OSError as e:
        before = ray_constants.ENABLE_RAY_CLUSTER
        ray_constants.ENABLE_RAY_CLUSTER = False
        try:
            if services.canonicalize_bootstrap_address_or_die(address) == found:
                raise ConnectionError(f"nothing answers at {found} ({e})") from None
            yield
        finally:
            ray_constants.ENABLE_RAY_CLUSTER = before
    else:
        yield


@contextmanager
def tamed() -> Iterator[None]:
    """Ray's start with what no setting of it changes. A name that a version of Ray does not have is left alone."""
    with ExitStack() as stack:

        def put(module: str, name: str, make: Callable[[Any], Any], of: str = "") -> None:
            there: Any = importlib.import_module(f"ray._private.{module}")
            there = getattr(there, of, None) if of else there
            if hasattr(there, name):
                before = getattr(there, name)
                stack.callback(setattr, there, name, before)
                setattr(there, name, make(before))

        put("ray_constants", "ENABLE_RAY_CLUSTER", lambda before: False)  # as in OWN, if Ray was loaded before
        # else our command line, which may be no UTF-8
        put("utils", "get_entrypoint_name", lambda before: lambda: "launcher")
        put("node", "wait_for_persisted_port", _in_slices)
        for process in _UNUSED:
            put("node", process, lambda before: lambda self, **settings: None, of="Node")
        yield


def _in_slices(wait: Callable[..., int]) -> Callable[..., int]:
    """Ray waits half a minute for its GCS in one call that holds the interpreter: no signal, and no `Guard`,
    would get through."""

    def in_slices(*args: Any, timeout_ms: int = 30_000, **kwargs: Any) -> int:
        until = time.monotonic() + timeout_ms / 1000
        while True:
            try:
                return wait(*args, timeout_ms=100, **kwargs)
            except RuntimeError:  # (so it says that the time is over)
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)  # (it may have failed at once)

    return in_slices
