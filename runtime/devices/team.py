"""The native thread team of a process: persistent threads that share the parallel loop of a kernel.

Written in LLVM IR over libc's pthread_create and the futex system call, so it needs no C compiler and no Python thread.
A job is (function, buffers, variables, total, grain). Each thread has a share of the indices, the same part of every job of a size, so that
what it has in its caches from one kernel serves it in the next; it takes pieces of `grain` indices of it from an atomic counter, and
then of the shares of the others, which may have begun late.
`chain` is the function of a job whose indices are blocks: for each it runs a table of kernels one after the other, on pointers of the
thread's own to memory behind its scratch memory. `graph` runs a table of jobs and, where it is given room for them, notes the time before each and after the last (25 ns each).

Protocol. The caller fills in the job, sets `ctl` to OPEN and adds one to `seq`. A worker that sees a new `seq` adds
itself to `ctl`'s low half if the job is still open, works, and takes itself off. The caller works too, then closes the
job and waits for those inside only: a worker that the system does not run right now holds nobody up. Idle workers spin
shortly, then sleep on `seq` (`wake` has them spin again: a job is about to come); so does the caller, on the low half of `ctl`, until the last one inside wakes it. When the team is busy (another Python thread runs a kernel), the caller works alone.

A worker's scratch memory begins with the index up to which it has run the kernel in this job, 0 before: a kernel packs nothing anew for
a part of the loop that goes on where what this thread has packed is still right.

After a fork the child has no threads: `Team` starts over there. Without Linux's futex there are no workers.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
import threading
from typing import Any

import numpy as np

from manygrad.runtime.codegen.lowered import SCRATCH_BYTES
from manygrad.tensor.environment import THREADS

MAX_THREADS = 256
SPINS = 4000  # of an idle worker before it sleeps, of one pause instruction each: a few dozen microseconds
CHAIN_BYTES = 16 << 20  # of a thread: block number, pointers and temporaries of a chain, behind its scratch memory
AWAIT_SPINS = 1000  # of the caller before it sleeps until the last worker is out (which may need this very core)

_FUTEX = {"x86_64": 202, "aarch64": 98}
_CLOCK = {"linux": 1, "darwin": 8}  # the clock of time.perf_counter


def team_ir() -> str:
    """The team's module."""
    arch = platform.machine()
    pause_declare, pause = {
        "x86_64": ("declare void @llvm.x86.sse2.pause()", "call void @llvm.x86.sse2.pause()"),
        "aarch64": ("declare void @llvm.aarch64.hint(i32)", "call void @llvm.aarch64.hint(i32 1)"),
    }.get(arch, ("", "fence seq_cst"))
    return f"""
@fn = global ptr null, align 128
@buffers = global ptr null
@variables = global ptr null
@parts = global i64 1
@grain = global i64 1
@shares = global [{MAX_THREADS + 1} x [16 x i64]] zeroinitializer, align 128
@ctl = global i64 0, align 128
@seq = global i32 0, align 128
@sleepers = global i32 0, align 128
@busy = global i32 0, align 128
@limit = global i32 0
@waiting = global i32 0, align 128
@scratches = global [{MAX_THREADS} x ptr] zeroinitializer, align 128
{pause_declare}
declare i64 @syscall(i64, ...)
declare i32 @pthread_create(ptr, ptr, ptr, ptr)
declare i32 @clock_gettime(i32, ptr)

define internal void @work(ptr %scratch, i32 %id) {{
entry:
  %fn = load ptr, ptr @fn
  %buffers = load ptr, ptr @buffers
  %variables = load ptr, ptr @variables
  %parts = load i64, ptr @parts
  %grain = load i64, ptr @grain
  %own = zext i32 %id to i64
  store i64 0, ptr %scratch
  br label %share
share:
  %k = phi i64 [ 0, %entry ], [ %k1, %other ]
  %sum = add i64 %own, %k
  %number = urem i64 %sum, %parts
  %next = getelementptr [{MAX_THREADS + 1} x [16 x i64]], ptr @shares, i64 0, i64 %number, i64 0
  %limit_at = getelementptr i64, ptr %next, i64 1
  %limit = load i64, ptr %limit_at
  br label %take
take:
  %begin = atomicrmw add ptr %next, i64 %grain monotonic
  %some = icmp slt i64 %begin, %limit
  br i1 %some, label %run, label %other
run:
  %far = add i64 %begin, %grain
  %over = icmp slt i64 %far, %limit
  %end = select i1 %over, i64 %far, i64 %limit
  call void %fn(ptr %buffers, ptr %variables, i64 %begin, i64 %end, ptr %scratch)
  store i64 %end, ptr %scratch
  br label %take
other:
  %k1 = add i64 %k, 1
  %more = icmp slt i64 %k1, %parts
  br i1 %more, label %share, label %done
done:
  ret void
}}

define internal ptr @worker(ptr %argument) {{
entry:
  %id = ptrtoint ptr %argument to i32
  %at = getelementptr [{MAX_THREADS} x ptr], ptr @scratches, i64 0, i32 %id
  %first = load atomic i32, ptr @seq acquire, align 4
  %before = sub i32 %first, 1
  br label %wait
wait:
  %last = phi i32 [ %before, %entry ], [ %new, %again ]
  br label %spin
spin:
  %n = phi i32 [ 0, %wait ], [ %n1, %paused ]
  %now = load atomic i32, ptr @seq acquire, align 4
  %changed = icmp ne i32 %now, %last
  br i1 %changed, label %awake, label %spin2
spin2:
  {pause}
  %n1 = add i32 %n, 1
  %tired = icmp sgt i32 %n1, {SPINS}
  br i1 %tired, label %sleep, label %paused
paused:
  br label %spin
sleep:
  %s0 = atomicrmw add ptr @sleepers, i32 1 seq_cst
  %r = call i64 (i64, ...) @syscall(i64 {_FUTEX.get(arch, 0)}, ptr @seq, i32 128, i32 %last, ptr null)
  %s1 = atomicrmw sub ptr @sleepers, i32 1 seq_cst
  %after = load atomic i32, ptr @seq acquire, align 4
  %woken = icmp ne i32 %after, %last
  br i1 %woken, label %awake, label %sleep
awake:
  %new = load atomic i32, ptr @seq acquire, align 4
  %limit = load atomic i32, ptr @limit monotonic, align 4
  %mine = icmp slt i32 %id, %limit
  br i1 %mine, label %join, label %again
join:
  %c = load atomic i64, ptr @ctl acquire, align 8
  br label %try
try:
  %old = phi i64 [ %c, %join ], [ %seen, %retry ]
  %open = and i64 %old, 4294967296
  %is_open = icmp ne i64 %open, 0
  br i1 %is_open, label %enter, label %again
enter:
  %plus = add i64 %old, 1
  %pair = cmpxchg ptr @ctl, i64 %old, i64 %plus acq_rel acquire
  %seen = extractvalue {{i64, i1}} %pair, 0
  %ok = extractvalue {{i64, i1}} %pair, 1
  br i1 %ok, label %inside, label %retry
retry:
  br label %try
inside:
  %scratch = load ptr, ptr %at
  %share = add i32 %id, 1
  call void @work(ptr %scratch, i32 %share)
  %before_me = atomicrmw sub ptr @ctl, i64 1 seq_cst
  %last_one = icmp eq i64 %before_me, 1
  br i1 %last_one, label %tell, label %again
tell:
  %waits = load atomic i32, ptr @waiting seq_cst, align 4
  %asleep = icmp ne i32 %waits, 0
  br i1 %asleep, label %call, label %again
call:
  %told = call i64 (i64, ...) @syscall(i64 {_FUTEX.get(arch, 0)}, ptr @ctl, i32 129, i32 1)
  br label %again
again:
  br label %wait
}}

define void @team_run(ptr %fn, ptr %buffers, ptr %variables, i64 %total, i64 %grain, ptr %scratch) {{
entry:
  %limit = load atomic i32, ptr @limit monotonic, align 4
  %alone = icmp eq i32 %limit, 0
  %small = icmp sle i64 %total, %grain
  %direct = or i1 %alone, %small
  br i1 %direct, label %self, label %lock
lock:
  %pair = cmpxchg ptr @busy, i32 0, i32 1 acquire monotonic
  %got = extractvalue {{i32, i1}} %pair, 1
  br i1 %got, label %publish, label %self
self:
  store i64 0, ptr %scratch
  call void %fn(ptr %buffers, ptr %variables, i64 0, i64 %total, ptr %scratch)
  ret void
publish:
  store ptr %fn, ptr @fn
  store ptr %buffers, ptr @buffers
  store ptr %variables, ptr @variables
  store i64 %grain, ptr @grain
  %others = zext i32 %limit to i64
  %parts = add i64 %others, 1
  store i64 %parts, ptr @parts
  br label %cut
cut:
  %i = phi i64 [ 0, %publish ], [ %i1, %cut ]
  %from = phi i64 [ 0, %publish ], [ %to, %cut ]
  %i1 = add i64 %i, 1
  %upto = mul i64 %total, %i1
  %to = udiv i64 %upto, %parts
  %next = getelementptr [{MAX_THREADS + 1} x [16 x i64]], ptr @shares, i64 0, i64 %i, i64 0
  store i64 %from, ptr %next
  %limit_at = getelementptr i64, ptr %next, i64 1
  store i64 %to, ptr %limit_at
  %cutting = icmp slt i64 %i1, %parts
  br i1 %cutting, label %cut, label %open
open:
  store atomic i64 4294967296, ptr @ctl release, align 8
  call void @team_wake()
  call void @work(ptr %scratch, i32 0)
  %closing = atomicrmw and ptr @ctl, i64 4294967295 acq_rel
  br label %await
await:
  %n = phi i32 [ 0, %open ], [ %n1, %more ]
  %c = load atomic i64, ptr @ctl acquire, align 8
  %empty = icmp eq i64 %c, 0
  br i1 %empty, label %finish, label %pause
pause:
  {pause}
  %n1 = add i32 %n, 1
  %long = icmp sgt i32 %n1, {AWAIT_SPINS}
  br i1 %long, label %block, label %more
block:
  store atomic i32 1, ptr @waiting seq_cst, align 4
  %inside = load atomic i32, ptr @ctl seq_cst, align 4
  %still = icmp ne i32 %inside, 0
  br i1 %still, label %doze, label %more
doze:
  %d = call i64 (i64, ...) @syscall(i64 {_FUTEX.get(arch, 0)}, ptr @ctl, i32 128, i32 %inside, ptr null)
  br label %more
more:
  br label %await
finish:
  store atomic i32 0, ptr @waiting seq_cst, align 4
  store atomic i32 0, ptr @busy release, align 4
  ret void
}}

define void @team_chain(ptr %plan, ptr %none, i64 %begin, i64 %end, ptr %scratch) {{
entry:
  %p1 = getelementptr i64, ptr %plan, i64 1
  %p2 = getelementptr i64, ptr %plan, i64 2
  %kernels = load i64, ptr %plan
  %moves = load i64, ptr %p1
  %words = load i64, ptr %p2
  %rows = getelementptr i64, ptr %plan, i64 3
  %room = mul i64 %kernels, 4
  %places = getelementptr i64, ptr %rows, i64 %room
  %tables = getelementptr i64, ptr %places, i64 %moves
  %block_at = getelementptr i8, ptr %scratch, i64 {SCRATCH_BYTES}
  %own = getelementptr i64, ptr %block_at, i64 1
  %base = ptrtoint ptr %block_at to i64
  br label %copy
copy:
  %i = phi i64 [ 0, %entry ], [ %i1, %copied ]
  %more_words = icmp slt i64 %i, %words
  br i1 %more_words, label %copied, label %move
copied:
  %from = getelementptr i64, ptr %tables, i64 %i
  %to = getelementptr i64, ptr %own, i64 %i
  %word = load i64, ptr %from
  store i64 %word, ptr %to
  %i1 = add i64 %i, 1
  br label %copy
move:
  %j = phi i64 [ 0, %copy ], [ %j1, %moved ]
  %more_moves = icmp slt i64 %j, %moves
  br i1 %more_moves, label %moved, label %blocks
moved:
  %place_at = getelementptr i64, ptr %places, i64 %j
  %place = load i64, ptr %place_at
  %pointer_at = getelementptr i64, ptr %own, i64 %place
  %offset = load i64, ptr %pointer_at
  %pointer = add i64 %offset, %base
  store i64 %pointer, ptr %pointer_at
  %j1 = add i64 %j, 1
  br label %move
blocks:
  %block = phi i64 [ %begin, %move ], [ %block1, %next ]
  %more_blocks = icmp slt i64 %block, %end
  br i1 %more_blocks, label %first, label %done
first:
  store i64 %block, ptr %block_at
  br label %kernel
kernel:
  %k = phi i64 [ 0, %first ], [ %k1, %run ]
  %more_kernels = icmp slt i64 %k, %kernels
  br i1 %more_kernels, label %run, label %next
run:
  %row_at = mul i64 %k, 4
  %row = getelementptr i64, ptr %rows, i64 %row_at
  %table_in = getelementptr i64, ptr %row, i64 1
  %totals_in = getelementptr i64, ptr %row, i64 2
  %pitch_in = getelementptr i64, ptr %row, i64 3
  %fn = load ptr, ptr %row
  %table_at = load i64, ptr %table_in
  %totals = load ptr, ptr %totals_in
  %pitch = load i64, ptr %pitch_in
  %skip = mul i64 %block, %pitch
  %total_at = getelementptr i8, ptr %totals, i64 %skip
  %total = load i64, ptr %total_at
  %buffers = getelementptr i64, ptr %own, i64 %table_at
  store i64 0, ptr %scratch
  call void %fn(ptr %buffers, ptr %block_at, i64 0, i64 %total, ptr %scratch)
  %k1 = add i64 %k, 1
  br label %kernel
next:
  %block1 = add i64 %block, 1
  br label %blocks
done:
  ret void
}}

define void @team_graph(ptr %calls, i64 %count, ptr %scratch, ptr %stamps) {{
entry:
  %timed = icmp ne ptr %stamps, null
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %i1, %run ]
  br i1 %timed, label %stamp, label %test
stamp:
  %now = getelementptr [2 x i64], ptr %stamps, i64 %i
  %told = call i32 @clock_gettime(i32 {_CLOCK.get(sys.platform, 1)}, ptr %now)
  br label %test
test:
  %some = icmp slt i64 %i, %count
  br i1 %some, label %run, label %done
run:
  %call = getelementptr [5 x i64], ptr %calls, i64 %i
  %p1 = getelementptr i64, ptr %call, i64 1
  %p2 = getelementptr i64, ptr %call, i64 2
  %p3 = getelementptr i64, ptr %call, i64 3
  %p4 = getelementptr i64, ptr %call, i64 4
  %fn = load ptr, ptr %call
  %buffers = load ptr, ptr %p1
  %variables = load ptr, ptr %p2
  %total = load i64, ptr %p3
  %grain = load i64, ptr %p4
  call void @team_run(ptr %fn, ptr %buffers, ptr %variables, i64 %total, i64 %grain, ptr %scratch)
  %i1 = add i64 %i, 1
  br label %loop
done:
  ret void
}}

define void @team_wake() {{
entry:
  %s = atomicrmw add ptr @seq, i32 1 seq_cst
  %sleeping = load atomic i32, ptr @sleepers seq_cst, align 4
  %any = icmp ne i32 %sleeping, 0
  br i1 %any, label %wake, label %done
wake:
  %r = call i64 (i64, ...) @syscall(i64 {_FUTEX.get(arch, 0)}, ptr @seq, i32 129, i32 2147483647)
  br label %done
done:
  ret void
}}

define i32 @team_start(i32 %from, i32 %to) {{
entry:
  %thread = alloca i64, align 8
  br label %test
test:
  %i = phi i32 [ %from, %entry ], [ %i1, %started ]
  %some = icmp slt i32 %i, %to
  br i1 %some, label %start, label %done
start:
  %wide = sext i32 %i to i64
  %argument = inttoptr i64 %wide to ptr
  %failed = call i32 @pthread_create(ptr %thread, ptr null, ptr @worker, ptr %argument)
  %bad = icmp ne i32 %failed, 0
  br i1 %bad, label %done, label %started
started:
  %i1 = add i32 %i, 1
  br label %test
done:
  ret i32 %i
}}

define void @team_limit(i32 %n) {{
  store atomic i32 %n, ptr @limit seq_cst, align 4
  ret void
}}

define void @team_scratch(i32 %id, ptr %memory) {{
  %at = getelementptr [{MAX_THREADS} x ptr], ptr @scratches, i64 0, i32 %id
  store ptr %memory, ptr %at
  ret void
}}

define void @team_reset() {{
  store atomic i32 0, ptr @limit seq_cst, align 4
  store atomic i32 0, ptr @busy seq_cst, align 4
  store atomic i32 0, ptr @sleepers seq_cst, align 4
  store atomic i32 0, ptr @waiting seq_cst, align 4
  store atomic i64 0, ptr @ctl seq_cst, align 8
  ret void
}}
"""


SYMBOLS: dict[str, Any] = {
    "team_run": ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p),
    "team_chain": ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 2, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p),
    "team_graph": ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p),
    "team_wake": ctypes.CFUNCTYPE(None),
    "team_start": ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32, ctypes.c_int32),
    "team_limit": ctypes.CFUNCTYPE(None, ctypes.c_int32),
    "team_scratch": ctypes.CFUNCTYPE(None, ctypes.c_int32, ctypes.c_void_p),
    "team_reset": ctypes.CFUNCTYPE(None),
}


class _Scratch(threading.local):
    """A calling thread's own scratch memory."""

    def __init__(self) -> None:
        self.memory, self.address = _aligned(SCRATCH_BYTES + CHAIN_BYTES)


def _aligned(nbytes: int) -> tuple[np.ndarray, int]:
    raw = np.empty(nbytes + 4096, dtype=np.uint8)
    return raw, (raw.ctypes.data + 4095) // 4096 * 4096


def wanted_threads() -> int:
    """THREADS, or the cores this process may use."""
    n = THREADS.value
    if n <= 0:
        n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(min(n, MAX_THREADS))


class Team:
    """`run` and `graph` of native code; starts and sizes the threads as THREADS says, on first use."""

    def __init__(self, link: Any) -> None:
        """`link(ir, names)` compiles the module and gives the symbols' addresses."""
        addresses = link(team_ir(), list(SYMBOLS))
        for name, prototype in SYMBOLS.items():
            setattr(self, name.removeprefix("team_"), prototype(addresses[name]))
        self.chain_address = addresses["team_chain"]
        self.native = sys.platform == "linux" and platform.machine() in _FUTEX
        self.lock = threading.Lock()
        self.local = _Scratch()
        self.memories: list[np.ndarray] = []
        self.started = 0
        self.threads = 1
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.after_fork)

    run: Any
    chain: Any
    graph: Any
    wake: Any
    start: Any
    limit: Any
    scratch: Any
    reset: Any

    def after_fork(self) -> None:
        self.lock = threading.Lock()
        self.reset()
        self.started, self.threads = 0, 1

    def ready(self) -> int:
        """Makes the team as large as THREADS says; gives this thread's scratch address."""
        wanted = wanted_threads()
        if wanted != self.threads:
            self.resize(wanted)
        return self.local.address

    def resize(self, threads: int) -> None:
        with self.lock:
            if not self.native:
                threads = 1
            if threads - 1 > self.started:
                for i in range(self.started, threads - 1):
                    memory, address = _aligned(SCRATCH_BYTES + CHAIN_BYTES)
                    self.memories.append(memory)
                    self.scratch(i, address)
                blocked = signal.pthread_sigmask(
                    signal.SIG_BLOCK, set(signal.Signals)
                )  # signals are for Python's threads
                try:
                    self.started = self.start(self.started, threads - 1)
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            self.limit(min(threads - 1, self.started))
            self.threads = wanted_threads() if not self.native else threads
