; Runs a table of jobs, one after the other: (function, buffers, variables, total, grain) each. Where there is room for
; them, notes the time before each and after the last, as timespecs of clock $CLOCK (25 ns each). `native/graph.py`
; makes the table. Needs team_run.ll.

declare i32 @clock_gettime(i32, ptr)

define void @team_graph(ptr %calls, i64 %count, ptr %scratch, ptr %stamps) {
entry:
  %timed = icmp ne ptr %stamps, null
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %i1, %run ]
  br i1 %timed, label %stamp, label %test
stamp:
  %now = getelementptr [2 x i64], ptr %stamps, i64 %i
  %told = call i32 @clock_gettime(i32 $CLOCK, ptr %now)
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
}
