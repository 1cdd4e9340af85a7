"""Plain loops over workers."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(1024)
def is_followed(device: str | tuple[str, ...] | None, workers: int) -> bool:
    """Whether values on a device are a part of loops that are followed: this worker's own, or those of all."""
    names = (device,) if isinstance(device, str) else device or ()
    ranks = {d.partition("@")[2] for d in names}
    return not any(d.startswith("DISK") for d in names) and (ranks <= {""} or (len(ranks) == workers > 1))
