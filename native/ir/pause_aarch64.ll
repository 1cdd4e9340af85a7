; One step of a loop that waits: `yield`.

declare void @llvm.aarch64.hint(i32)

define internal void @pause() alwaysinline {
  call void @llvm.aarch64.hint(i32 1)
  ret void
}
