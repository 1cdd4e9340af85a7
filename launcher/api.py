"""`manygrad.launch`: run a function on N workers and get its results, from a script, a notebook or a Ray job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from manygrad.errors import LaunchError

from .job import REAL_ENDPOINT, Job


def launch(
    fn: Callable[..., Any],
    *args: Any,
    nodes: int = 1,
    devices_per_node: int = 1,
    device: str = "",
    timeout: float | None = None,
    address: str = "",
    run_dir: str = "",
    max_restarts: int = 0,
    min_nodes: int = 0,
    endpoint: str = REAL_ENDPOINT,
    **kwargs: Any,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` once on each of `nodes` workers, as rank 0, 1, ...; returns the results by rank.

    `fn` may be a closure or a notebook's function (cloudpickle). A Ray that this process already uses is used and left
    running; else one is started for the call (or attached to at `address`). `timeout` in seconds; `device` is the kind
    of the workers' devices ("CUDA"; "": as DEVICE says). After a failure it is called anew, at most `max_restarts`
    times, on as few as `min_nodes` workers (0: `nodes`) where nodes were lost. Raises `LaunchError` with the failure
    report if a rank fails, `Infeasible` if the nodes do not fit, `ValueError` for bad arguments.
    """
    from . import pickled
    from .driver import run
    from .options import kind_of_device

    if not callable(fn):
        raise TypeError(f"launch: fn must be a function, got {type(fn).__name__}")
    for name, value in (("nodes", nodes), ("devices_per_node", devices_per_node)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"launch: {name} must be a positive int, got {value!r}")
    for name, value, most in (("max_restarts", max_restarts, 1 << 16), ("min_nodes", min_nodes, nodes)):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
            raise ValueError(f"launch: {name} must be an int from 0 to {most}, got {value!r}")
    try:
        device = kind_of_device(device) if device else ""
    except ValueError as e:
        raise ValueError(f"launch: device {e}, got {device!r}") from None
    if timeout is not None and not timeout > 0:
        raise ValueError(f"launch: timeout must be a positive number of seconds, got {timeout!r}")
    try:
        payload = pickled.dumps((fn, args, kwargs))
    except Exception as e:
        raise TypeError(
            f"launch: the function or its arguments cannot be pickled: {e}; create such objects inside the function"
        ) from e
    job = Job(
        "function",
        getattr(fn, "__name__", type(fn).__name__),
        payload=payload,
        nodes=nodes,
        devices_per_node=devices_per_node,
        device=device,
        timeout_s=timeout,
        address=address,
        run_dir=run_dir,
        max_restarts=max_restarts,
        min_nodes=min_nodes,
        endpoint=endpoint,
    )
    outcome = run(job)
    if outcome.exit_code == 130:
        raise KeyboardInterrupt(outcome.report)
    if outcome.exit_code:
        raise LaunchError(outcome.report, outcome.exit_code, outcome.rank, outcome.details)
    return [pickled.loads(r) for r in outcome.results]
