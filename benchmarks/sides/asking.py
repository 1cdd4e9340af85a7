"""Turns asked for through files in a folder that all ranks of a side see, wherever they run: `turn3` says how many
steps (none: the end), `turn3.0` is rank 0's answer."""

from __future__ import annotations

import os
import time
from pathlib import Path

LOOK_S = 0.05  # with few calls each time: many sides wait while one is measured
FORGOTTEN_S = 900.0  # without a turn: whoever asked for turns is gone


def asked(path: Path) -> int:
    """The number of steps in this file, once it is there; 0 if it will never be."""
    here, end = str(path), time.monotonic() + FORGOTTEN_S
    looks = 0
    while not os.path.exists(here):
        looks += 1
        if time.monotonic() > end or (looks % 20 == 0 and not path.parent.exists()):
            return 0
        time.sleep(LOOK_S)
    return int(path.read_text())


def put(path: Path, text: str) -> None:
    """Write a file that is there only when it is whole."""
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(text)
    part.rename(path)
