"""Checkpoints of a training: its logical tensors and values, on any number of devices and workers.

    checkpoints = Checkpointer("checkpoints", {"model": model, "optimizer": optimizer}, every=100)
    for step in range(checkpoints.resume(), 1000):
        ...
        checkpoints.step(step + 1)

A save is a pipeline: `tree.py` takes the state apart, `layout.py` says which rank writes which part of each tensor,
`memory.py` copies these parts, `writer.py` writes and commits them (`remote_writer.py` to remote storage), `pruning.py`
removes older ones. Loading goes the other way, through `reader.py`. `copies.py` keeps them in the workers' memory, too,
for the next attempt.
"""

from manygrad.checkpoint.api import load, save
from manygrad.checkpoint.checkpointer import Checkpointer
from manygrad.checkpoint.convert import convert
from manygrad.checkpoint.replicas import check_replicas
from manygrad.checkpoint.spikes import SpikeGuard
from manygrad.errors import CheckpointError

__all__ = ["CheckpointError", "Checkpointer", "SpikeGuard", "check_replicas", "convert", "load", "save"]
