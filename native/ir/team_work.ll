; One thread's part of a job: pieces of @grain indices of its own share, then of the shares of the others, which may
; have begun late.

define internal void @work(ptr %scratch, i32 %id) {
entry:
  %fn = load ptr, ptr @fn
  %buffers = load ptr, ptr @buffers
  %variables = load ptr, ptr @variables
  %parts = load i64, ptr @parts
  %grain = load i64, ptr @grain
  %own = zext i32 %id to i64
  store i64 0, ptr %scratch               ; the index up to which this thread has run the kernel: nowhere yet
  br label %share
share:                                    ; the k-th share, counted from its own
  %k = phi i64 [ 0, %entry ], [ %k1, %other ]
  %sum = add i64 %own, %k
  %number = urem i64 %sum, %parts
  %next = getelementptr [$SHARES x [16 x i64]], ptr @shares, i64 0, i64 %number, i64 0
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
}
