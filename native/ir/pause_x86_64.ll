; One step of a loop that waits: tells the core that it may slow down, or give its units to its other thread.

declare void @llvm.x86.sse2.pause()

define internal void @pause() alwaysinline {
  call void @llvm.x86.sse2.pause()
  ret void
}
