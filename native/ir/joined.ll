; Graphs of kernels and collectives over shared memory, one after the other, as far as all goes well; `native/exchange.py`
; makes the tables and has their words. Needs exchange.ll and additions.ll.

; One more collective of all workers is entered, whose text has this number (`Communication.entered`).
define internal void @enter(ptr %all, i64 %text) {
  %entered = call ptr @field(ptr %all, i64 $ENTERED)
  %before = load i64, ptr %entered
  %times = lshr i64 %before, $TEXT_BITS
  %more = add i64 %times, 1
  %high = shl i64 %more, $TEXT_BITS
  %now = or i64 %high, %text
  store i64 %now, ptr %entered
  ret void
}

; The nanoseconds that a collective took, in seconds, to each of the counters.
define internal void @spend(ptr %all, i64 %nanoseconds) {
entry:
  %counters = call ptr @field(ptr %all, i64 $SPENT_IN)
  %whole = sitofp i64 %nanoseconds to double
  %seconds = fmul double %whole, 1.0e-9
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%i1, %loop]
  %counter = call ptr @field(ptr %counters, i64 %i)
  call void @add_float(ptr %counter, double %seconds)
  %i1 = add i64 %i, 1
  %more = icmp slt i64 %i1, $SPENT_COUNT
  br i1 %more, label %loop, label %end
end:
  ret void
}

; Whether all steps of a collective were carried out; how many were is in the word STOPPED.
define internal i1 @collective(ptr %all, ptr %row) {
entry:
  %text = call i64 @word(ptr %row, i64 $TEXT)
  %by_all = icmp sge i64 %text, 0
  br i1 %by_all, label %first, label %run
first:
  call void @enter(ptr %all, i64 %text)
  br label %run
run:
  %table = call ptr @field(ptr %row, i64 $TABLE)
  %counter = call ptr @field(ptr %row, i64 $COUNTER)
  %before = load i64, ptr %counter
  %runs = add i64 %before, 1
  store i64 %runs, ptr %counter
  %variables = call i64 @word(ptr %all, i64 $VARIABLES)
  %sequence = or i64 %runs, %variables
  call void @put(ptr %table, i64 $SEQUENCE, i64 %sequence)
  %scratch = call i64 @word(ptr %all, i64 $ALL_SCRATCH)
  call void @put(ptr %table, i64 $SCRATCH, i64 %scratch)
  %spins = call i64 @word(ptr %all, i64 $ALL_SPINS)
  call void @put(ptr %table, i64 $SPINS, i64 %spins)
  %limit = call i64 @word(ptr %all, i64 $ALL_LIMIT)
  call void @put(ptr %table, i64 $LIMIT, i64 %limit)
  %began = call i64 @nanoseconds()
  %done = call i64 @exchange(ptr %table)
  %ended = call i64 @nanoseconds()
  %took = sub i64 %ended, %began
  call void @spend(ptr %all, i64 %took)
  call void @put(ptr %all, i64 $STOPPED, i64 %done)
  %steps = call i64 @word(ptr %table, i64 $STEP_COUNT)
  %r = icmp eq i64 %done, %steps
  ret i1 %r
}

; From row AT on, until one of them stops early or the word at STOP is no longer 0; AT is then that row, or how many
; there are. STOPPED is -1 where the row has not begun.
define void @joined(ptr %all) {
entry:
  %rows = call ptr @field(ptr %all, i64 $ROWS)
  %row_count = call i64 @word(ptr %all, i64 $ROW_COUNT)
  %stop = call ptr @field(ptr %all, i64 $STOP)
  %first = call i64 @word(ptr %all, i64 $AT)
  br label %loop
loop:
  %i = phi i64 [%first, %entry], [%i1, %next]
  call void @put(ptr %all, i64 $AT, i64 %i)
  call void @put(ptr %all, i64 $STOPPED, i64 -1)
  %some = icmp slt i64 %i, %row_count
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
  br i1 %well, label %count, label %end
compute:
  %graph = call ptr @field(ptr %all, i64 $GRAPH)
  %table = call ptr @field(ptr %at, i64 $TABLE)
  %scratch = call ptr @field(ptr %all, i64 $ALL_SCRATCH)
  call void %graph(ptr %table, i64 %jobs, ptr %scratch, ptr null)
  br label %count
count:
  %additions = call ptr @field(ptr %at, i64 $ADDITIONS)
  %addition_count = call i64 @word(ptr %at, i64 $ADDITION_COUNT)
  call void @add_all(ptr %additions, i64 %addition_count)
  br label %next
next:
  %i1 = add i64 %i, 1
  br label %loop
end:
  ret void
}
