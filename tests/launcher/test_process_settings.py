"""What the system does not give back is told by name."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, tempfile, threading
from manygrad.launcher.process_settings import ProcessSettings

stays = threading.Event()
before = ProcessSettings()
niceness, processors = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0)
os.nice(1)
os.sched_setaffinity(0, {min(processors)})
tempfile.tempdir = "/mine"
thread = threading.Thread(target=stays.wait, daemon=True)
thread.start()
{fault}
print(before.restore(), tempfile.tempdir)
of_thread = [os.getpriority(os.PRIO_PROCESS, thread.native_id), os.sched_getaffinity(thread.native_id)]
print(os.getpriority(os.PRIO_PROCESS, 0) - niceness, of_thread[0] - niceness, of_thread[1] == processors, flush=True)
os._exit(0)
"""


def told(fault: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT.replace("{fault}", fault)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(os.getuid() != 0, reason="a process without privilege does not get a lower niceness")
def test_a_thread_that_the_script_has_started_is_changed_back_too() -> None:
    assert told("") == ["[] None", "0 0 True"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_without_privilege_a_niceness_stays() -> None:
    """Nor does the user come back."""
    assert told("os.setresuid(65534, 65534, 65534)") == ["['user and groups', 'niceness'] None", "1 1 True"]


def test_a_session_stays() -> None:
    """(The first process of a group cannot begin a session.)"""
    pid = "if os.getpgrp() != os.getpid(): os.setsid()"
    first, _ = told(pid)
    assert "process group and session" in first
