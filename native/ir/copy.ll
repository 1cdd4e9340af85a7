; memcpy that writes past the caches: whole lines are not read before they are written, and nothing else is put out of the
; caches. For more than these hold.

declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)

define internal void @line(ptr %to, ptr %from, i64 %offset) alwaysinline {
  %a = getelementptr i8, ptr %from, i64 %offset
  %b = getelementptr i8, ptr %to, i64 %offset
  %v = load <8 x i64>, ptr %a, align 1
  store <8 x i64> %v, ptr %b, align 64, !nontemporal !{i32 1}
  ret void
}

define void @copy_past_caches(ptr %to, ptr %from, i64 %nbytes) {
entry:
  %at = ptrtoint ptr %to to i64
  %back = sub i64 0, %at
  %wanted = and i64 %back, 63
  %fits = icmp ult i64 %wanted, %nbytes
  %head = select i1 %fits, i64 %wanted, i64 %nbytes
  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %from, i64 %head, i1 0)
  %to1 = getelementptr i8, ptr %to, i64 %head
  %from1 = getelementptr i8, ptr %from, i64 %head
  %rest = sub i64 %nbytes, %head
  %whole = and i64 %rest, -256
  %some = icmp sgt i64 %whole, 0
  br i1 %some, label %loop, label %tail
loop:
  %i = phi i64 [0, %entry], [%i1, %loop]
  %i64 = add i64 %i, 64
  %i128 = add i64 %i, 128
  %i192 = add i64 %i, 192
  call void @line(ptr %to1, ptr %from1, i64 %i)
  call void @line(ptr %to1, ptr %from1, i64 %i64)
  call void @line(ptr %to1, ptr %from1, i64 %i128)
  call void @line(ptr %to1, ptr %from1, i64 %i192)
  %i1 = add i64 %i, 256
  %more = icmp slt i64 %i1, %whole
  br i1 %more, label %loop, label %tail
tail:
  %to2 = getelementptr i8, ptr %to1, i64 %whole
  %from2 = getelementptr i8, ptr %from1, i64 %whole
  %left = sub i64 %rest, %whole
  call void @llvm.memcpy.p0.p0.i64(ptr %to2, ptr %from2, i64 %left, i1 0)
  fence seq_cst                       ; what is stored past the caches is not ordered otherwise
  ret void
}
