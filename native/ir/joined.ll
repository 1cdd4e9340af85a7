; Graphs of kernels and collectives over shared memory, one after the other, as far as all goes well; `native/exchange.py`
; makes the tables and has their words. Needs exchange.ll.

; Whether all steps of a collective were carried out; how many were is in the word STOPPED.
define internal i1 @collective(ptr %all, ptr %row) {
  %run = call ptr @field(ptr %row, i64 $TABLE)
  %counter = call ptr @field(ptr %row, i64 $COUNTER)
  %before = load i64, ptr %counter
  %runs = add i64 %before, 1
  store i64 %runs, ptr %counter
  %variables = call i64 @word(ptr %all, i64 $VARIABLES)
  %sequence = or i64 %runs, %variables
  call void @put(ptr %run, i64 $SEQUENCE, i64 %sequence)
  %scratch = call i64 @word(ptr %all, i64 $ALL_SCRATCH)
  call void @put(ptr %run, i64 $SCRATCH, i64 %scratch)
  %spins = call i64 @word(ptr %all, i64 $ALL_SPINS)
  call void @put(ptr %run, i64 $SPINS, i64 %spins)
  %limit = call i64 @word(ptr %all, i64 $ALL_LIMIT)
  call void @put(ptr %run, i64 $LIMIT, i64 %limit)
  %began = call i64 @nanoseconds()
  %done = call i64 @exchange(ptr %run)
  %ended = call i64 @nanoseconds()
  %took = sub i64 %ended, %began
  %spent = call i64 @word(ptr %all, i64 $SPENT)
  %now = add i64 %spent, %took
  call void @put(ptr %all, i64 $SPENT, i64 %now)
  call void @put(ptr %all, i64 $STOPPED, i64 %done)
  %steps = call i64 @word(ptr %run, i64 $STEP_COUNT)
  %r = icmp eq i64 %done, %steps
  ret i1 %r
}

; From row AT on, until one of them stops early or the word at STOP is no longer 0; AT is then that row, or how many
; there are. STOPPED is -1 where the row has not begun.
define void @joined(ptr %all) {
entry:
  %rows = call ptr @field(ptr %all, i64 $ROWS)
  %count = call i64 @word(ptr %all, i64 $ROW_COUNT)
  %stop = call ptr @field(ptr %all, i64 $STOP)
  %first = call i64 @word(ptr %all, i64 $AT)
  br label %loop
loop:
  %i = phi i64 [%first, %entry], [%i1, %next]
  call void @put(ptr %all, i64 $AT, i64 %i)
  call void @put(ptr %all, i64 $STOPPED, i64 -1)
  %some = icmp slt i64 %i, %count
  br i1 %some, label %look, label %end
look:
  %told = load atomic i64, ptr %stop acquire, align 8
  %go = icmp eq i64 %told, 0
  br i1 %go, label %row, label %end
row:
  %at = getelementptr [$ROW_WORDS x i64], ptr %rows, i64 %i
  %jobs = call i64 @word(ptr %at, i64 $JOBS)
  %is_collective = icmp slt i64 %jobs, 0
  br i1 %is_collective, label %communicate, label %compute
communicate:
  %well = call i1 @collective(ptr %all, ptr %at)
  br i1 %well, label %next, label %end
compute:
  %graph = call ptr @field(ptr %all, i64 $GRAPH)
  %table = call ptr @field(ptr %at, i64 $TABLE)
  %scratch = call ptr @field(ptr %all, i64 $ALL_SCRATCH)
  call void %graph(ptr %table, i64 %jobs, ptr %scratch, ptr null)
  br label %next
next:
  %i1 = add i64 %i, 1
  br label %loop
end:
  ret void
}
