; Waiting on a 32-bit word of memory by Linux's futex system call, number $FUTEX.
; %scope: $PRIVATE, the threads of this process; $SHARED, all processes that map the word.

declare i64 @syscall(i64, ...)

; Sleeps as long as the word is %value; until a wake-up, a signal, or the relative limit (a timespec; null: none).
define internal void @futex_wait(ptr %word, i32 %value, ptr %limit, i32 %scope) alwaysinline {
  %r = call i64 (i64, ...) @syscall(i64 $FUTEX, ptr %word, i32 %scope, i32 %value, ptr %limit, ptr null, i32 0)
  ret void
}

; Wakes at most %count of those that sleep on the word.
define internal void @futex_wake(ptr %word, i32 %count, i32 %scope) alwaysinline {
  %operation = or i32 %scope, 1
  %r = call i64 (i64, ...) @syscall(i64 $FUTEX, ptr %word, i32 %operation, i32 %count, ptr null, ptr null, i32 0)
  ret void
}
