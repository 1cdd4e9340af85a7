"""Settings of a process that a script can change, each with how it is read and set: noted before the script, put back
after it (`process_state.py`).

The system has some of them for each thread, and a new thread gets those of the one that starts it: where the script has
changed the main thread's, the threads that have the same are changed back with it. What the system does not give back
(a lower niceness, another user) is told: then a new process takes the place of this one.
"""

from __future__ import annotations

import builtins
import csv
import faulthandler
import gc
import locale
import os
import signal
import sys
import threading
import time
import tracemalloc
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

OOM = "/proc/self/oom_score_adj"
STREAMS = (0, 1, 2)


class Setting(NamedTuple):
    """A setting of the process: `get()` and `put(value)`."""

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], object]


class ThreadSetting(NamedTuple):
    """A setting of a thread, by the system's number of it: `get(thread)` and `put(thread, value)`."""

    name: str
    get: Callable[[int], Any]
    put: Callable[[int, Any], object]


def _user() -> Any:
    return (os.getresuid(), os.getresgid(), os.getgroups()) if hasattr(os, "getresuid") else None


def _put_user(value: Any) -> None:
    users, groups, others = value
    os.setresuid(*users)  # first, for groups are set by root
    os.setresgid(*groups)
    os.setgroups(others)


def _put_callbacks(value: Any) -> None:
    gc.callbacks[:] = value


def _oom_score() -> str:
    try:
        with open(OOM) as f:
            return f.read()
    except OSError:
        return ""


def _put_oom_score(value: str) -> None:
    with open(OOM, "w") as f:
        f.write(value)


def _put_traceback_limit(value: Any) -> None:
    vars(sys).pop("tracebacklimit", None)
    if value is not None:
        sys.tracebacklimit = value


def _wakeup_fd() -> int:
    fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(fd)
    return fd


SETTINGS = (
    Setting("locale", lambda: locale.setlocale(locale.LC_ALL), lambda v: locale.setlocale(locale.LC_ALL, v)),
    Setting(
        "blocked signals",
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        lambda v: signal.pthread_sigmask(signal.SIG_SETMASK, v),
    ),
    Setting("wake-up descriptor", _wakeup_fd, signal.set_wakeup_fd),
    Setting("thresholds of garbage collections", gc.get_threshold, lambda v: gc.set_threshold(*v)),
    Setting("flags of garbage collections", gc.get_debug, gc.set_debug),
    Setting("callbacks of garbage collections", lambda: [*gc.callbacks], _put_callbacks),
    Setting("switch interval", sys.getswitchinterval, sys.setswitchinterval),
    Setting("digits of whole numbers", sys.get_int_max_str_digits, sys.set_int_max_str_digits),
    Setting("lines of tracebacks", lambda: vars(sys).get("tracebacklimit"), _put_traceback_limit),
    Setting("flags of dlopen", sys.getdlopenflags, sys.setdlopenflags),
    Setting("stack size of threads", threading.stack_size, threading.stack_size),
    Setting("faulthandler", faulthandler.is_enabled, lambda v: faulthandler.enable() if v else faulthandler.disable()),
    Setting("tracemalloc", tracemalloc.is_tracing, lambda v: tracemalloc.start() if v else tracemalloc.stop()),
    Setting("fields of csv", csv.field_size_limit, csv.field_size_limit),
    Setting("NumPy's print options", np.get_printoptions, lambda v: np.set_printoptions(**v)),
    Setting("user and groups", _user, _put_user),
    Setting("process group and session", lambda: (os.getpgrp(), os.getsid(0)), lambda v: os.setpgid(0, v[0])),
    Setting("score for the out-of-memory killer", _oom_score, _put_oom_score),
)
THREAD_SETTINGS = (
    ThreadSetting(
        "scheduling policy",
        lambda t: (os.sched_getscheduler(t), os.sched_getparam(t).sched_priority),
        lambda t, v: os.sched_setscheduler(t, v[0], os.sched_param(v[1])),
    ),
    ThreadSetting(
        "niceness",
        lambda t: os.getpriority(os.PRIO_PROCESS, t),
        lambda t, v: os.setpriority(os.PRIO_PROCESS, t, v),
    ),
    ThreadSetting("processors", os.sched_getaffinity, os.sched_setaffinity),
) if os.path.isdir("/proc/self/task") else ()  # fmt: skip


class ProcessSettings:
    """As they are now, before the script."""

    def __init__(self) -> None:
        self.values = [(s, s.get()) for s in SETTINGS]
        self.of_threads = [(s, _by_thread(s)) for s in THREAD_SETTINGS]
        self.builtins = vars(builtins).keys() | set()
        self.plain = [(m, _plain(m)) for n, m in [*sys.modules.items()] if _is_plain_module(n, m)]
        self.streams = {fd: (os.dup(fd), _file(fd)) for fd in STREAMS if _file(fd) is not None}

    def restore(self) -> list[str]:
        """Put all back; returns the names of those that cannot be."""
        threading.settrace(None)
        threading.setprofile(None)
        faulthandler.cancel_dump_traceback_later()
        time.tzset()  # (the environment says which zone)
        left = [s.name for s, value in self.values if not _put_back(s.get, s.put, value)]
        left += [s.name for s, values in self.of_threads if not _put_threads_back(s, values)]
        for module, values in self.plain:
            now = vars(module)
            for name, value in values.items():
                if name not in now or now[name] is not value:
                    setattr(module, name, value)
        for name in vars(builtins).keys() - self.builtins:
            delattr(builtins, name)
        for fd, (copy, file) in self.streams.items():
            if _file(fd) != file:
                os.dup2(copy, fd)
        return left


def _put_back(get: Callable[[], Any], put: Callable[[Any], object], value: Any) -> bool:
    """Whether it is what it was."""
    if get() == value:
        return True
    with suppress(OSError, ValueError, RuntimeError, AttributeError, locale.Error):
        put(value)
    return bool(get() == value)


def _put_threads_back(s: ThreadSetting, values: dict[int, Any]) -> bool:
    main = threading.main_thread().native_id or os.getpid()
    changed, whole = s.get(main), True
    for t in _threads():
        with suppress(ProcessLookupError):
            was = values.get(t, values[main] if s.get(t) == changed else s.get(t))
            whole &= _put_back(lambda t=t: s.get(t), lambda v, t=t: s.put(t, v), was)  # type: ignore[misc]
    return whole


def _by_thread(s: ThreadSetting) -> dict[int, Any]:
    found = {}
    for t in _threads():
        with suppress(ProcessLookupError):
            found[t] = s.get(t)
    return found


def _threads() -> list[int]:
    return [int(t) for t in os.listdir("/proc/self/task")]


def _is_plain_module(name: str, module: Any) -> bool:
    """Whether it is of the standard library, whose numbers and texts are settings (`tempfile.tempdir`)."""
    own = name != "sys" and isinstance(module, types.ModuleType)
    return own and name.partition(".")[0] in sys.stdlib_module_names


def _plain(module: Any) -> dict[str, Any]:
    """Public numbers, texts and Nones by name."""
    kinds = (bool, int, float, str, bytes, type(None))
    return {n: x for n, x in list(vars(module).items()) if not n.startswith("_") and type(x) in kinds}


def _file(fd: int) -> tuple[int, int] | None:
    """The file, pipe or terminal that a descriptor leads to; None: it is closed."""
    try:
        s = os.fstat(fd)
    except OSError:
        return None
    return s.st_dev, s.st_ino
