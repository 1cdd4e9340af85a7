"""manygrad: a distributed multi-node training runtime.

Write ordinary lazy-tensor code; `launcher train.py --nodes 4` runs it on four workers.
`manygrad.world` says which one this is.
"""

from manygrad.launcher.api import launch  # first of all: the launcher takes Ctrl-C from here on

# isort: split
from manygrad import autograd, errors, linalg, nn, special
from manygrad.runtime.agreement.agreement import values_may_differ
from manygrad.runtime.agreement.replicas import assert_equal, broadcast_
from manygrad.runtime.engine.realize import RealizeEngine
from manygrad.runtime.jit.tiny_jit import TinyJit
from manygrad.runtime.profile.counters import GlobalCounters
from manygrad.runtime.profile.profile import profile
from manygrad.runtime.profile.profile import profile_program as _profile_program
from manygrad.runtime.runtime import own as _own_runtime
from manygrad.tensor.anomaly import detect_anomaly
from manygrad.tensor.autocast import autocast
from manygrad.tensor.deferred.install import install as _put_calls_off
from manygrad.tensor.dtype import can_cast, dtypes, finfo, iinfo
from manygrad.tensor.dtype import promote as promote_types
from manygrad.tensor.engine import register as _register
from manygrad.tensor.environment import FAILED_STEPS as _FAILED_STEPS
from manygrad.tensor.environment import Context
from manygrad.tensor.function import function
from manygrad.tensor.grad_mode import enable_grad, is_grad_enabled, no_grad, set_grad_enabled
from manygrad.tensor.ops.broadcast import result_type
from manygrad.tensor.ops.random import get_rng_state, set_rng_state
from manygrad.tensor.precision import get_float32_matmul_precision, set_float32_matmul_precision
from manygrad.tensor.tensor import Tensor, Variable
from manygrad.tensor.time_loop import scan

_register(RealizeEngine())
_put_calls_off()
world = _own_runtime.world

_profile_program()
if _FAILED_STEPS.value:
    from manygrad.runtime.engine.failed_step import watch_this_process as _watch_this_process

    _watch_this_process()

__version__ = "0.1.0"
__all__ = [
    "Context",
    "GlobalCounters",
    "Tensor",
    "TinyJit",
    "Variable",
    "assert_equal",
    "autocast",
    "autograd",
    "broadcast_",
    "can_cast",
    "detect_anomaly",
    "dtypes",
    "enable_grad",
    "errors",
    "finfo",
    "function",
    "get_float32_matmul_precision",
    "get_rng_state",
    "iinfo",
    "is_grad_enabled",
    "launch",
    "linalg",
    "nn",
    "no_grad",
    "profile",
    "promote_types",
    "result_type",
    "scan",
    "set_float32_matmul_precision",
    "set_grad_enabled",
    "set_rng_state",
    "special",
    "values_may_differ",
    "world",
]
