"""What a script can change in its process outside of its own objects: noted before it runs, put back after it.

A worker that survives a failure runs the script again in the same process, and must find there what a new one would
give. Kernels, schedules and installed packages stay.

| what | after the script |
|---|---|
| exit handlers that it registered | are called |
| processes that it started | are killed |
| its modules (those of no installed package) | are forgotten, and imported anew |
| functions and classes that it replaced in modules that were there before | are what they were |
| environment, folder, `sys`, signal handlers, timers, logging, context variables | are what they were |
| warnings' filters, sockets' time-out, how processes start (`multiprocessing`), resource limits | are what they were |
| locale, time zone, settings of `gc`, `sys`, `threading`, of NumPy's printing (`process_settings.py`) | the same |
| numbers and texts of the standard library's modules (`tempfile.tempdir`), additions to `builtins` | the same |
| niceness, processors, scheduling, blocked signals, umask, the files of descriptors 0 to 2 | the same |
| what the system does not give back: lower niceness, user, session, hard limits | the process is not used again |
| random states of Python, NumPy and manygrad | are those of a process that has drawn nothing |
| threads, open files | where one is left the process is not used again |
"""

from __future__ import annotations

import atexit
import contextvars
import gc
import importlib
import logging
import multiprocessing
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
import traceback
import types
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from manygrad.runtime.current import current
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.environment import REGISTRY

from .channel import is_user_file
from .janitor import collect_children, end_descendants
from .process_settings import ProcessSettings

THREADS_S = 1.0  # how long threads may take to end after the script
# names of `sys` that scripts set; lists are copied
SYS = ("argv", "path", "meta_path", "path_hooks", "stdin", "stdout", "stderr", "excepthook", "unraisablehook",
       "displayhook", "breakpointhook", "dont_write_bytecode")  # fmt: skip
LIMITS = {getattr(resource, n): n for n in dir(resource) if n.startswith("RLIMIT_")}
CHECKPOINTS = "manygrad.checkpoint."
LAST_ERROR = ("last_exc", "last_type", "last_value", "last_traceback")


class ProcessState:
    """As it is now, before the script. `supervisor` is the process whose other descendants are the script's.

    Large: all that is put back.
    """

    def __init__(self, supervisor: int) -> None:
        self.supervisor = supervisor
        weakref.finalize(self, int)  # (the first of a process registers an exit handler that is of them all)
        self.exit_handlers: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
        self._register, self._unregister = atexit.register, atexit.unregister
        atexit.register, atexit.unregister = self._registering, self._unregistering  # type: ignore[assignment]
        self.context = contextvars.copy_context()
        self.modules = dict(sys.modules)
        self.owners = [(owner, _functions(owner)) for owner in _owners(self.modules)]
        self.knobs = {name: v.common for name, v in REGISTRY.items()}
        self.types = dtypes.default_float, dtypes.default_int
        self.environ, self.folder, self.mask = dict(os.environ), os.getcwd(), os.umask(0o22)
        os.umask(self.mask)
        self.sys = {n: _copied(getattr(sys, n)) for n in SYS}
        self.recursion = sys.getrecursionlimit()
        self.signals = {s: h for s in signal.valid_signals() if (h := signal.getsignal(s)) is not None}
        self.logging = {name: _of_logger(x) for name, x in _loggers().items()}
        self.filters, self.socket_s = [*warnings.filters], socket.getdefaulttimeout()
        self.start_method = multiprocessing.get_start_method(allow_none=True)
        self.settings = ProcessSettings()
        self.limits = {limit: resource.getrlimit(limit) for limit in LIMITS}
        self.threads, self.files = {*threading.enumerate()}, _open_files()

    def run(self, work: Callable[..., Any], *args: Any) -> Any:
        """`work(*args)`, which runs the script, with the context variables of before."""
        self.exit_handlers.clear()
        return self.context.copy().run(work, *args)

    def restore(self) -> str:
        """Put all back. Returns why this process is not to be used again, or nothing."""
        sys.settrace(None)
        sys.setprofile(None)
        self._threads_left(daemon=False)  # as at the end of a process
        self._call_exit_handlers()
        end_descendants(of=self.supervisor)
        collect_children()
        self._restore_names()
        self._restore_logging()
        self._restore_defaults()
        fixed = self.settings.restore()
        left = current().start_anew()
        for n in LAST_ERROR:
            vars(sys).pop(n, None)
        random.seed()
        np.random.seed()
        gc.enable()
        gc.collect()
        if left := left or self._threads_left():
            return f"its threads still run: {', '.join(left)}"
        if fixed:
            return f"what the script has set cannot be what it was: {', '.join(fixed)}"
        if limits := [name for n, name in LIMITS.items() if resource.getrlimit(n) != self.limits[n]]:
            return f"its limits cannot be what they were: {', '.join(limits)}"
        if files := sorted(_open_files() - self.files):
            return f"its files are still open: {', '.join(files)}"
        return ""

    def _registering(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """An exit handler is the script's if its own lines, or its Checkpointer, register it; installed packages have
        some that end what is the process's."""
        caller = sys._getframe(1)
        if is_user_file(caller.f_code.co_filename) or caller.f_globals.get("__name__", "").startswith(CHECKPOINTS):
            self.exit_handlers.append((function, args, kwargs))
        return self._register(function, *args, **kwargs)

    def _unregistering(self, function: Callable[..., Any]) -> None:
        self.exit_handlers = [h for h in self.exit_handlers if h[0] != function]
        self._unregister(function)

    def _call_exit_handlers(self) -> None:
        while self.exit_handlers:
            function, args, kwargs = self.exit_handlers.pop()
            self._unregister(function)
            try:
                function(*args, **kwargs)
            except BaseException:  # any: it is told, as at the end of a process, and ends nothing
                sys.stderr.write(f"the exit handler {function!r} has failed:\n{traceback.format_exc()}")

    def _restore_names(self) -> None:
        for s in (sys.stdout, sys.stderr):
            s.flush()
        for name in [n for n in sys.modules if n not in self.modules and not _stays(n)]:
            del sys.modules[name]
        sys.modules.update(self.modules)
        importlib.invalidate_caches()
        for owner, found in self.owners:
            now = vars(owner)
            for name, value in found.items():
                if now.get(name) is not value:
                    setattr(owner, name, value)
            for name in _functions(owner).keys() - found.keys() if isinstance(owner, type) else ():
                delattr(owner, name)  # (which had been inherited)
        for name, value in self.knobs.items():
            REGISTRY[name].common = value
        dtypes.default_float, dtypes.default_int = self.types
        for name, value in self.sys.items():
            setattr(sys, name, _copied(value))
        sys.setrecursionlimit(self.recursion)
        os.environ.clear()
        os.environ.update(self.environ)
        os.chdir(self.folder)
        os.umask(self.mask)
        for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)
        for number, handler in self.signals.items():
            if signal.getsignal(number) != handler:
                signal.signal(number, handler)

    def _restore_logging(self) -> None:
        logging.captureWarnings(False)
        logging.disable(logging.NOTSET)
        fresh: tuple[Any, ...] = (logging.NOTSET, True, False, [], [])
        for name, x in _loggers().items():
            level, x.propagate, x.disabled, filters, handlers = self.logging.get(name, fresh)
            x.setLevel(level)
            x.filters[:] = filters
            for handler in [h for h in x.handlers if h not in handlers]:
                x.removeHandler(handler)
                handler.close()
            x.handlers[:] = handlers

    def _restore_defaults(self) -> None:
        """Defaults of Python's modules, and limits of the process."""
        warnings.filters[:] = self.filters  # type: ignore[index]
        socket.setdefaulttimeout(self.socket_s)
        multiprocessing.set_start_method(self.start_method, force=True)
        for limit, found in self.limits.items():
            with suppress(OSError, ValueError):  # (a hard one that was lowered cannot be raised again)
                resource.setrlimit(limit, found)

    def _threads_left(self, daemon: bool = True) -> list[str]:
        """Names of threads that do not end, without or with the daemons among them. pyzmq's collector of memory is the
        process's."""
        until = time.monotonic() + THREADS_S
        while True:
            found = [t for t in threading.enumerate() if t not in self.threads and (daemon or not t.daemon)]
            left = [t.name for t in found if not _is_of_process(t)]
            if not left or time.monotonic() > until:
                return left
            time.sleep(0.01)


def _copied(x: Any) -> Any:
    return list(x) if isinstance(x, list) else x


def _owners(modules: dict[str, Any]) -> list[Any]:
    """Modules, and the classes of manygrad."""
    found = [m for m in modules.values() if isinstance(m, types.ModuleType) and m is not sys]
    own = [m for m in found if m.__name__.startswith("manygrad.")]
    return found + [c for m in own for c in vars(m).values() if isinstance(c, type) and c.__module__ == m.__name__]


def _functions(owner: Any) -> dict[str, Any]:
    """Functions and classes by name; descriptors of a class, too."""
    kinds = (property, classmethod, staticmethod)
    return {
        n: x for n, x in list(vars(owner).items()) if not n.startswith("__") and (callable(x) or isinstance(x, kinds))
    }


def _stays(name: str) -> bool:
    """Whether a module is of the standard library, of an installed package or of manygrad. One without a file is what
    its package is."""
    module, package = sys.modules[name], name.partition(".")[0]
    if files := [f for f in (getattr(module, "__file__", None), *getattr(module, "__path__", ())) if f]:
        return not any(map(is_user_file, files))
    if package != name and package in sys.modules:
        return _stays(package)
    return getattr(getattr(module, "__spec__", None), "origin", None) is not None


def _is_of_process(t: threading.Thread) -> bool:
    return isinstance(t, threading._DummyThread) or type(t).__module__.startswith("zmq.")


def _loggers() -> dict[str, logging.Logger]:
    named = {n: x for n, x in logging.root.manager.loggerDict.items() if isinstance(x, logging.Logger)}
    return {**named, "": logging.root}


def _of_logger(x: logging.Logger) -> tuple[int, bool, bool, list[Any], list[Any]]:
    return x.level, x.propagate, x.disabled, list(x.filters), list(x.handlers)


def _open_files() -> set[str]:
    """Paths of the files of disks that this process has open."""
    found = set()
    for fd in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            path = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if path.startswith("/") and not path.startswith(("/dev/", "/proc/", "/memfd:")):
            found.add(path)
    return found
