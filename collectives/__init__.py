"""Collectives: ALLREDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL, BROADCAST become copies and reduces over chunks.

From what is wanted to what runs:

    collective = Collective("all_reduce", ranks=4, count=1000)     # program.py: what
    name = choose("all_reduce", nbytes=4000, ranks=4)              # cost.py: by which algorithm
    program = build(name, collective, only={0})                    # algorithms/: this worker's instructions
    prepared = prepare(program, "float32", ...)                    # execute.py: flat form, made once a plan
    prepared.run({0: {"in": addr, "out": addr}}, sequence)         # every step; transport/ moves the bytes
"""

from manygrad.collectives.algorithms import ALGORITHMS, build
from manygrad.collectives.cost import choose
from manygrad.collectives.errors import CollectiveAborted, CollectiveError, CollectiveTimeout, PeerLost, PlanMismatch
from manygrad.collectives.execute import Prepared, prepare, run_program
from manygrad.collectives.program import Collective, Program

__all__ = [
    "ALGORITHMS",
    "Collective",
    "CollectiveAborted",
    "CollectiveError",
    "CollectiveTimeout",
    "PeerLost",
    "PlanMismatch",
    "Prepared",
    "Program",
    "build",
    "choose",
    "prepare",
    "run_program",
]
