"""The traces of all ranks as one file: PROFILE=1 has each rank write its own into the run's folder."""

from __future__ import annotations

import json
import os
import re
from typing import Any

OF_A_RANK = re.compile(r"profile\.rank\d+\.json")
LIMIT_NBYTES = 1 << 29  # of all together; more would not be shown by a browser, and takes too much memory to join


def join(folder: str) -> str | None:
    """Writes `profile.json` beside the ranks' files and gives its path; None where there are less than two of them in
    this folder (other hosts have theirs), or they are too large. Raises OSError, ValueError."""
    paths = sorted(os.path.join(folder, name) for name in os.listdir(folder) if OF_A_RANK.fullmatch(name))
    if len(paths) < 2 or sum(map(os.path.getsize, paths)) > LIMIT_NBYTES:
        return None
    events: list[Any] = []
    for path in paths:
        with open(path, encoding="utf-8") as f:
            events += json.load(f)["traceEvents"]
    whole = os.path.join(folder, "profile.json")
    new = f"{whole}.new"
    try:
        with open(new, "w", encoding="utf-8") as f:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, f)
        os.replace(new, whole)
    except BaseException:
        if os.path.exists(new):
            os.unlink(new)
        raise
    return whole
