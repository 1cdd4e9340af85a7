"""What the schedule asks of a device."""

from __future__ import annotations

# kinds of thousands of threads: work is cut finely, and a block of rows at a time would leave most of them idle
WIDE_KINDS = frozenset({"CUDA"})


def is_wide(device: str | tuple[str, ...] | None) -> bool:
    return isinstance(device, str) and device.partition(":")[0] in WIDE_KINDS
