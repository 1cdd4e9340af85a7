; Adds amounts to counters, rows of (address, amount, whether both are floats), made by
; `native/additions.py`. Needs words.ll.

define internal void @add_float(ptr %counter, double %amount) alwaysinline {
  %before = load double, ptr %counter
  %now = fadd double %before, %amount
  store double %now, ptr %counter
  ret void
}

define internal void @add_all(ptr %rows, i64 %count) {
entry:
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%i1, %next]
  %some = icmp slt i64 %i, %count
  br i1 %some, label %look, label %end
look:
  %row = getelementptr [$AMOUNT_WORDS x i64], ptr %rows, i64 %i
  %counter = call ptr @field(ptr %row, i64 0)
  %amount = call i64 @word(ptr %row, i64 1)
  %kind = call i64 @word(ptr %row, i64 2)
  %is_float = icmp ne i64 %kind, 0
  br i1 %is_float, label %float, label %whole
float:
  %bits = bitcast i64 %amount to double
  call void @add_float(ptr %counter, double %bits)
  br label %next
whole:
  %before = load i64, ptr %counter
  %now = add i64 %before, %amount
  store i64 %now, ptr %counter
  br label %next
next:
  %i1 = add i64 %i, 1
  br label %loop
end:
  ret void
}
