"""What a group copies while it computes."""

from __future__ import annotations

from manygrad.runtime.codegen.choose.facts import Facts
from manygrad.runtime.codegen.opts import CopyAhead, Opts, WarpMatrix, legal, loop_nest
from manygrad.runtime.codegen.opts.cache_shared import CacheShared, shared_bytes
from manygrad.runtime.codegen.opts.copy_ahead import RINGS
from manygrad.runtime.codegen.opts.opt import chosen
from manygrad.runtime.codegen.opts.warp_matrix import fragments_bytes


def copy_ahead(facts: Facts, opts: Opts) -> Opts:
    """The blocks of a product that come next are on their way to shared memory while the group multiplies one, as many
    as fit there, where the machine has such copies and they are of whole addresses: no registers hold them, and a block
    has one barrier instead of two."""
    along = chosen(opts, WarpMatrix) or chosen(opts, CacheShared)
    if along is None or not facts.machine.copies_ahead:
        return opts
    for blocks in RINGS:
        found = (*opts, CopyAhead(along.axis, blocks))
        if legal(facts.sig, found) is None:
            nest = loop_nest(facts.sig, found)
            if shared_bytes(facts.sig, nest) + fragments_bytes(facts.sig, nest) <= facts.machine.shared_bytes:
                return found
    return opts
