; Sequence words in memory that processes share (`native/sequence.py` has the protocol). Needs futex.ll, clock.ll and pause.

declare i32 @sched_yield()

; Sets the word, and rings the bell of who waits for it; the system call only if that one sleeps for just this %code, or
; for any (-1).
define void @publish(ptr %word, i32 %value, ptr %bell, ptr %interest, i32 %code) {
  store atomic i32 %value, ptr %word release, align 4
  %old = atomicrmw add ptr %bell, i32 1 seq_cst
  fence seq_cst
  %want = load atomic i32, ptr %interest seq_cst, align 4
  %mine = icmp eq i32 %want, %code
  %any = icmp eq i32 %want, -1
  %wake = or i1 %mine, %any
  br i1 %wake, label %call, label %end
call:
  call void @futex_wake(ptr %bell, i32 2147483647, i32 $SHARED)
  br label %end
end:
  ret void
}

define i32 @load(ptr %word) {
  %v = load atomic i32, ptr %word acquire, align 4
  ret i32 %v
}

; Whether the word has come to %target: (word - target) >= 0, a signed difference, so that it may wrap.
define internal i1 @reached(ptr %word, i32 %target) alwaysinline {
  %v = load atomic i32, ptr %word acquire, align 4
  %distance = sub i32 %v, %target
  %ok = icmp sge i32 %distance, 0
  ret i1 %ok
}

; 0 once the word has come to %target; 1 after a wake-up, or the time limit, without it.
define i32 @wait(ptr %word, i32 %target, ptr %bell, ptr %interest, i32 %code, i64 %spins, ptr %limit) {
entry:
  br label %spin
spin:
  %i = phi i64 [0, %entry], [%i2, %again]
  %ok = call i1 @reached(ptr %word, i32 %target)
  br i1 %ok, label %done, label %again
again:
  call void @pause()
  %i2 = add i64 %i, 1
  %more = icmp slt i64 %i2, %spins
  br i1 %more, label %spin, label %yield
yield:                                        ; another process may need this core to get there
  %j = phi i64 [0, %again], [%j2, %lasted]
  %some = icmp slt i64 %j, $YIELDS
  br i1 %some, label %yielded, label %announce
yielded:
  %before = call i64 @nanoseconds()
  %told = call i32 @sched_yield()
  %after = call i64 @nanoseconds()
  %j2 = add i64 %j, 1
  %ok4 = call i1 @reached(ptr %word, i32 %target)
  br i1 %ok4, label %done, label %lasted
lasted:                                       ; who computes here keeps the core: who sleeps is woken sooner
  %took = sub i64 %after, %before
  %short = icmp slt i64 %took, $YIELD_NS
  br i1 %short, label %yield, label %announce
announce:                                     ; the interest is told before the bell and the word are read once more:
  store atomic i32 %code, ptr %interest seq_cst, align 4
  %seen = load atomic i32, ptr %bell seq_cst, align 4
  fence seq_cst
  %ok2 = call i1 @reached(ptr %word, i32 %target)
  br i1 %ok2, label %awake, label %sleep
sleep:                                        ; a bell rung since then keeps this from sleeping
  call void @futex_wait(ptr %bell, i32 %seen, ptr %limit, i32 $SHARED)
  %ok3 = call i1 @reached(ptr %word, i32 %target)
  br i1 %ok3, label %awake, label %notyet
awake:
  store atomic i32 0, ptr %interest release, align 4
  br label %done
notyet:
  store atomic i32 0, ptr %interest release, align 4
  ret i32 1
done:
  ret i32 0
}
