"""Collectives: ALLREDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL, BROADCAST become copies and reduces over chunks.

From what is wanted to what runs:

    collective = Collective("all_reduce", ranks=4, count=1000)     # program.py: what
    name = choose("all_reduce", nbytes=4000, ranks=4)              # cost.py: by which algorithm
    program = build(name, collective, only={0})                    # algorithms/: this worker's instructions
    body = lower(program, dtypes.float32, workers, devices)        # lower.py: its calls, kernels among them

The runtime runs the calls every step (`runtime/exchange/exchange.py`); transport/ moves the bytes.
"""

from manygrad.collectives.algorithms import ALGORITHMS, build
from manygrad.collectives.cost import choose
from manygrad.collectives.lower import lower
from manygrad.collectives.program import Collective, Program
from manygrad.errors import CollectiveAborted, CollectiveError, CollectiveTimeout, PeerLost, PlanMismatch

__all__ = [
    "ALGORITHMS",
    "Collective",
    "CollectiveAborted",
    "CollectiveError",
    "CollectiveTimeout",
    "PeerLost",
    "PlanMismatch",
    "Program",
    "build",
    "choose",
    "lower",
]
