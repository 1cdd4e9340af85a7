; The state of the thread team, and the functions that change its size. Words that several threads write have a line of
; the cache to themselves (align 128: two of them, since processors fetch lines in pairs). Needs futex.ll.

; the job
@fn = global ptr null, align 128          ; void fn(ptr buffers, ptr variables, i64 begin, i64 end, ptr scratch)
@buffers = global ptr null
@variables = global ptr null
@parts = global i64 1                     ; threads that have a share of it
@grain = global i64 1                     ; indices taken at a time

; of each thread, the caller first: the next index of its share, and the end of it
@shares = global [$SHARES x [16 x i64]] zeroinitializer, align 128

; who is at work
@ctl = global i64 0, align 128            ; $OPEN while a job can be joined, plus how many workers are inside
@seq = global i32 0, align 128            ; counts the jobs; idle workers sleep on it
@sleepers = global i32 0, align 128       ; how many do
@busy = global i32 0, align 128           ; 1: a caller has the team
@limit = global i32 0                     ; workers that may join
@waiting = global i32 0, align 128        ; 1: the caller sleeps until the last worker is out
@scratches = global [$MAX_THREADS x ptr] zeroinitializer, align 128

; Idle workers spin again, a job has come or is about to.
define void @team_wake() {
entry:
  %s = atomicrmw add ptr @seq, i32 1 seq_cst
  %sleeping = load atomic i32, ptr @sleepers seq_cst, align 4
  %any = icmp ne i32 %sleeping, 0
  br i1 %any, label %wake, label %done
wake:
  call void @futex_wake(ptr @seq, i32 2147483647, i32 $PRIVATE)
  br label %done
done:
  ret void
}

; Starts workers %from, ..., %to - 1; gives the number of the first that could not be started, or %to.
declare i32 @pthread_create(ptr, ptr, ptr, ptr)

define i32 @team_start(i32 %from, i32 %to) {
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
}

; How many workers may join.
define void @team_limit(i32 %n) {
  store atomic i32 %n, ptr @limit seq_cst, align 4
  ret void
}

; A worker's scratch memory, before it is started.
define void @team_scratch(i32 %id, ptr %memory) {
  %at = getelementptr [$MAX_THREADS x ptr], ptr @scratches, i64 0, i32 %id
  store ptr %memory, ptr %at
  ret void
}

; After a fork: there are no workers.
define void @team_reset() {
  store atomic i32 0, ptr @limit seq_cst, align 4
  store atomic i32 0, ptr @busy seq_cst, align 4
  store atomic i32 0, ptr @sleepers seq_cst, align 4
  store atomic i32 0, ptr @waiting seq_cst, align 4
  store atomic i64 0, ptr @ctl seq_cst, align 8
  ret void
}
