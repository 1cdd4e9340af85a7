; One job, as its caller sees it. Needs futex.ll and pause.

define void @team_run(ptr %fn, ptr %buffers, ptr %variables, i64 %total, i64 %grain, ptr %scratch) {
entry:
  %limit = load atomic i32, ptr @limit monotonic, align 4
  %alone = icmp eq i32 %limit, 0
  %small = icmp sle i64 %total, %grain
  %direct = or i1 %alone, %small
  br i1 %direct, label %self, label %lock
lock:
  %pair = cmpxchg ptr @busy, i32 0, i32 1 acquire monotonic
  %got = extractvalue {i32, i1} %pair, 1
  br i1 %got, label %publish, label %self

; without the team: the job is small, there are no workers, or another thread of Python has them
self:
  store i64 0, ptr %scratch
  call void %fn(ptr %buffers, ptr %variables, i64 0, i64 %total, ptr %scratch)
  ret void

; share i of n is total*i/n, ..., total*(i+1)/n
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
  %next = getelementptr [$SHARES x [16 x i64]], ptr @shares, i64 0, i64 %i, i64 0
  store i64 %from, ptr %next
  %limit_at = getelementptr i64, ptr %next, i64 1
  store i64 %to, ptr %limit_at
  %cutting = icmp slt i64 %i1, %parts
  br i1 %cutting, label %cut, label %open

; open, work, close
open:
  store atomic i64 $OPEN, ptr @ctl release, align 8
  call void @team_wake()
  call void @work(ptr %scratch, i32 0)
  %closing = atomicrmw and ptr @ctl, i64 $INSIDE acq_rel
  br label %await

; until those inside are out
await:
  %n = phi i32 [ 0, %open ], [ %n1, %more ]
  %c = load atomic i64, ptr @ctl acquire, align 8
  %empty = icmp eq i64 %c, 0
  br i1 %empty, label %finish, label %spin
spin:
  call void @pause()
  %n1 = add i32 %n, 1
  %long = icmp sgt i32 %n1, $AWAIT_SPINS
  br i1 %long, label %block, label %more
block:
  store atomic i32 1, ptr @waiting seq_cst, align 4
  %inside = load atomic i32, ptr @ctl seq_cst, align 4
  %still = icmp ne i32 %inside, 0
  br i1 %still, label %doze, label %more
doze:
  call void @futex_wait(ptr @ctl, i32 %inside, ptr null, i32 $PRIVATE)
  br label %more
more:
  br label %await
finish:
  store atomic i32 0, ptr @waiting seq_cst, align 4
  store atomic i32 0, ptr @busy release, align 4
  ret void
}
