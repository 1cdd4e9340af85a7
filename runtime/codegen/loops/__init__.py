"""The loop tree: a kernel's loops, tiles and reductions as immutable nodes, between the choice of Opts and the
instructions.

`build` makes it of an AST and a `LoopNest`, `spec` checks it, `show` prints it; `codegen/emit` walks it.
"""
