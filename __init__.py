"""manygrad: a distributed multi-node training runtime.

Write ordinary lazy-tensor code; `launcher train.py --nodes 4` runs it on four workers. `manygrad.world` says which one this is.
"""

from manygrad.launcher.api import launch
from manygrad.multi.world import world
from manygrad.runtime.counters import GlobalCounters
from manygrad.runtime.engine import RealizeEngine
from manygrad.runtime.jit import TinyJit
from manygrad.tensor import nn
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.engine import holder as _holder
from manygrad.tensor.environment import Context
from manygrad.tensor.tensor import Tensor, Variable

_holder.current = RealizeEngine()

__version__ = "0.1.0"
__all__ = ["Context", "GlobalCounters", "Tensor", "TinyJit", "Variable", "dtypes", "launch", "nn", "world"]
