"""Ctrl-C while the `launcher` command is still importing: one line and exit code 130, as later.

Imported first of all (`launcher/__init__.py`), and of effect in that command only. There is nothing to tidy up yet.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

INTERRUPTED = "launcher: SIGINT before the workers had started\nlauncher: exit code 130\n"


def is_command() -> bool:
    """Whether this process is `launcher ...` (beside its Python) or `python -m manygrad.launcher.cli ...`."""
    program = sys.argv[0] if sys.argv else ""
    if program == "-m":
        return "manygrad.launcher.cli" in sys.orig_argv
    return os.path.basename(program) == "launcher" and os.path.dirname(program) == os.path.dirname(sys.executable)


def leave(signum: int, frame: FrameType | None) -> None:
    try:
        os.write(2, b"\n" + INTERRUPTED.encode())
    finally:
        os._exit(130)


if is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, leave)
