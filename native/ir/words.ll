; Tables of 64-bit words: numbers, and addresses as numbers.

define internal ptr @field(ptr %table, i64 %i) alwaysinline {
  %p = getelementptr i64, ptr %table, i64 %i
  %at = load i64, ptr %p
  %v = inttoptr i64 %at to ptr
  ret ptr %v
}

define internal i64 @word(ptr %table, i64 %i) alwaysinline {
  %p = getelementptr i64, ptr %table, i64 %i
  %v = load i64, ptr %p
  ret i64 %v
}

define internal void @put(ptr %table, i64 %i, i64 %v) alwaysinline {
  %p = getelementptr i64, ptr %table, i64 %i
  store i64 %v, ptr %p
  ret void
}
