; One step of a loop that waits, on a processor that has no instruction for it.

define internal void @pause() alwaysinline {
  fence seq_cst
  ret void
}
