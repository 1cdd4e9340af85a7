"""The operators of `Tensor`, one concept a file; each is a mixin that builds UOps
through `Tensor._op` and `Tensor._new`."""
