"""compile_together: the kernels of one LINEAR, so that none is made twice and processors do not wait.

Precondition: kernel ASTs, each once. Postcondition: all of them are loaded.

What is on disk is loaded first. Of the rest, this thread generates one kernel's code after the other, while others
have LLVM compile those before and load them (LLVM does not hold Python's lock: `native/emit_object.py`). They get
Python's lock back soon whenever a call of LLVM ends: SWITCH_S. Kernels that differ in nothing but their sizes may have
the same code, as copies do: that is compiled once.

Before a kernel is made it is claimed on disk: where another process of this host has the claim, the next kernel's turn
comes, and the other one's result is read at the end. Workers that start together from an empty cache so share the work.
A claim ends with its process, and nobody waits for one longer than CLAIM_WAIT_S: then the kernel is made here, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import copy_context
from functools import partial
from queue import Queue
from typing import Any, NamedTuple

from manygrad.native.processor import cores
from manygrad.runtime.codegen.pipeline import Prepared, prepare
from manygrad.runtime.devices.base import Kernel, KernelStore
from manygrad.runtime.devices.compile.compiled import Compiled
from manygrad.runtime.profile import profile
from manygrad.tensor.environment import BEAM
from manygrad.tensor.threads import Threads
from manygrad.tensor.uop.uop import UOp

Keep = Callable[[UOp, Kernel], None]
"""`(ast, kernel)`: puts it among the loaded kernels."""

CLAIM_WAIT_S = 30.0
POLL_S = 0.005
SWITCH_S = 2e-4
AHEAD = 4  # kernels whose code is generated and that wait for LLVM: few, so that other processes find some to claim
COMPILERS = 3  # threads at most: LLVM takes about twice as long as this thread


class Missing(NamedTuple):
    ast: UOp
    prepared: Prepared
    key: bytes


def build_together(compiled: Compiled[Any], asts: Sequence[UOp], loaded: KernelStore) -> None:
    """A Builder's `build_all`. What is searched for, or stands alone, is built by itself."""
    if len(asts) > 1 and not BEAM:
        compile_together(compiled, asts, loaded.keep)
    else:
        for ast in asts:
            loaded.get(ast)


def compile_together(compiled: Compiled[Any], asts: Iterable[UOp], keep: Keep) -> None:
    missing, store = [], compiled.store
    for ast in asts:
        prepared = prepare(ast, compiled.machine())
        key = compiled.key(prepared, ast)
        code = store.get(key)
        if code is None:
            missing.append(Missing(ast, prepared, key))
        else:
            keep(ast, compiled.load(prepared, ast, code))
    if not missing:
        return
    others: list[Missing] = []
    equal: list[tuple[Missing, bytes]] = []  # whose code another kernel of this call has, too
    made: dict[bytes, bytes | None] = {}  # digest of a text -> its code, when it is there
    with contextlib.ExitStack() as claims:
        with _switching(SWITCH_S), _behind(AHEAD) as llvm:
            for m in missing:
                claim = store.claim(m.key)
                if claim is None:
                    others.append(m)
                    continue
                with contextlib.ExitStack() as own:
                    own.enter_context(claim)
                    code = store.get(m.key)
                    if code is not None:  # made since we looked
                        keep(m.ast, compiled.load(m.prepared, m.ast, code))
                        continue
                    text = _text(compiled, m.prepared)
                    digest = hashlib.sha256(text.partition("\n")[2].encode()).digest()
                    if digest in made:
                        claims.enter_context(own.pop_all())
                        equal.append((m, digest))
                        continue
                    made[digest] = None
                    llvm(partial(copy_context().run, _build, compiled, keep, m, text, made, digest, own.pop_all()))
        for m, digest in equal:
            keep(m.ast, compiled.load(m.prepared, m.ast, compiled.make(m.prepared, m.key, "", made[digest])))
    for m in others:
        keep(m.ast, compiled.load(m.prepared, m.ast, _from_other(compiled, m)))


def _text(compiled: Compiled[Any], prepared: Prepared) -> str:
    start = time.perf_counter()
    text = compiled.text(prepared)
    if profile.active:
        opts = {"opts": list(map(repr, prepared.opts))}
        profile.record("compile", f"code of {prepared.name}", start, time.perf_counter(), opts)
    return text


@contextlib.contextmanager
def _behind(ahead: int) -> Iterator[Callable[[Callable[[], None]], None]]:
    """A function that has jobs done in threads, in order, while at most `ahead` wait. The first error ends it, here or
    at the end. Exit handlers and threads that outlive the script compile, too: by then Python does not
    import concurrent.futures any more, and some versions start no thread, so that jobs are done at once."""
    jobs: Queue[Callable[[], None] | None] = Queue(ahead)
    errors: list[BaseException] = []

    def work() -> None:
        while (job := jobs.get()) is not None:
            try:
                job()  # (also after an error: it holds a claim)
            except BaseException as e:
                errors.append(e)

    def give(job: Callable[[], None]) -> None:
        if not threads:
            job()
            return
        jobs.put(job)
        if errors:
            raise errors[0]

    threads = []
    try:
        for i in range(min(COMPILERS, cores())):
            threads.append(Threads().start(f"manygrad-llvm-{i}", work))
    except RuntimeError:
        pass
    try:
        yield give
    finally:
        for _ in threads:
            jobs.put(None)
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


@contextlib.contextmanager
def _switching(seconds: float) -> Iterator[None]:
    """How long a thread that waits for Python's lock lets another one run, at most."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(seconds, before))
    try:
        yield
    finally:
        if before > seconds:  # (else another thread that compiles is the one to set it back)
            sys.setswitchinterval(before)


def _build(
    compiled: Compiled[Any],
    keep: Keep,
    m: Missing,
    text: str,
    made: dict[bytes, bytes | None],
    digest: bytes,
    claim: contextlib.ExitStack,
) -> None:
    with claim:
        start = time.perf_counter()
        code = made[digest] = compiled.make(m.prepared, m.key, text)
        if profile.active:
            profile.record(profile.compile_track(), m.prepared.name, start, time.perf_counter(), {"bytes": len(code)})
    keep(m.ast, compiled.load(m.prepared, m.ast, code))


def _from_other(compiled: Compiled[Any], m: Missing) -> bytes:
    """The code that another process is making; made here once it gave up, or took too long."""
    deadline = time.monotonic() + CLAIM_WAIT_S
    while time.monotonic() < deadline:
        code = compiled.store.get(m.key)
        if code is not None:
            return code
        claim = compiled.store.claim(m.key)
        if claim is not None:
            with claim:
                return compiled.store.get(m.key) or compiled.make(m.prepared, m.key, compiled.text(m.prepared))
        time.sleep(POLL_S)
    return compiled.make(m.prepared, m.key, compiled.text(m.prepared))
