; A worker thread, for ever: waits for a new @seq, joins the job if it is still open, works, leaves. Needs futex.ll and
; pause.

define internal ptr @worker(ptr %argument) {
entry:
  %id = ptrtoint ptr %argument to i32
  %at = getelementptr [$MAX_THREADS x ptr], ptr @scratches, i64 0, i32 %id
  %first = load atomic i32, ptr @seq acquire, align 4
  %before = sub i32 %first, 1
  br label %wait

; idle
wait:
  %last = phi i32 [ %before, %entry ], [ %new, %again ]
  br label %spin
spin:
  %n = phi i32 [ 0, %wait ], [ %n1, %paused ]
  %now = load atomic i32, ptr @seq acquire, align 4
  %changed = icmp ne i32 %now, %last
  br i1 %changed, label %awake, label %spin2
spin2:
  call void @pause()
  %n1 = add i32 %n, 1
  %tired = icmp sgt i32 %n1, $SPINS
  br i1 %tired, label %sleep, label %paused
paused:
  br label %spin
sleep:
  %s0 = atomicrmw add ptr @sleepers, i32 1 seq_cst
  call void @futex_wait(ptr @seq, i32 %last, ptr null, i32 $PRIVATE)
  %s1 = atomicrmw sub ptr @sleepers, i32 1 seq_cst
  %after = load atomic i32, ptr @seq acquire, align 4
  %woken = icmp ne i32 %after, %last
  br i1 %woken, label %awake, label %sleep

; a job has come
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
  %open = and i64 %old, $OPEN
  %is_open = icmp ne i64 %open, 0
  br i1 %is_open, label %enter, label %again
enter:
  %plus = add i64 %old, 1
  %pair = cmpxchg ptr @ctl, i64 %old, i64 %plus acq_rel acquire
  %seen = extractvalue {i64, i1} %pair, 0
  %ok = extractvalue {i64, i1} %pair, 1
  br i1 %ok, label %inside, label %retry
retry:
  br label %try
inside:
  %scratch = load ptr, ptr %at
  %share = add i32 %id, 1
  call void @work(ptr %scratch, i32 %share)

; out; the last one wakes the caller
  %before_me = atomicrmw sub ptr @ctl, i64 1 seq_cst
  %last_one = icmp eq i64 %before_me, 1
  br i1 %last_one, label %tell, label %again
tell:
  %waits = load atomic i32, ptr @waiting seq_cst, align 4
  %asleep = icmp ne i32 %waits, 0
  br i1 %asleep, label %call, label %again
call:
  call void @futex_wake(ptr @ctl, i32 1, i32 $PRIVATE)
  br label %again
again:
  br label %wait
}
