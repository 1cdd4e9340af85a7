"""From LLVM IR to PTX, the assembly that NVIDIA's driver makes machine code of: by the LLVM that is in llvmlite,
without a toolkit."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import llvmlite.binding as llvm

TRIPLE = "nvptx64-nvidia-cuda"
LEAST_LLVM = 20  # earlier ones do not know the attributes and intrinsics of the printer
# the oldest PTX in which the printer's instructions are; drivers read that and all earlier ones
PTX_VERSION = {70: 63, 75: 63, 80: 70, 86: 71, 87: 74, 89: 78, 90: 80, 100: 86, 103: 88, 120: 87}
_lock = threading.RLock()


def features_of(arch: int) -> str:
    """LLVM's features for a compute capability, 90 for 9.0; of one that is not known, those of the last before it."""
    return f"+ptx{PTX_VERSION[known_arch(arch)]}"


def known_arch(arch: int) -> int:
    """The newest compute capability for which PTX is made that runs on `arch`."""
    return max(k for k in PTX_VERSION if k <= max(arch, 70))


@cache
def _target(arch: int) -> Any:
    if llvm.llvm_version_info[0] < LEAST_LLVM:
        raise RuntimeError(
            f"device CUDA needs LLVM {LEAST_LLVM} or later, this llvmlite has {llvm.llvm_version_info[0]}: "
            "pip install -U 'llvmlite>=0.45'"
        )
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple(TRIPLE)
    return target.create_target_machine(cpu=f"sm_{arch}", features=features_of(arch), opt=3)


def ptx_of(ir: str, arch: int) -> str:
    """The PTX of a kernel's IR for a compute capability. Vectors and tiles are explicit in the IR: nothing is unrolled
    or vectorized."""
    with _lock:
        machine = _target(known_arch(arch))
    context = llvm.create_context()
    module = llvm.parse_assembly(ir, context)
    module.triple, module.data_layout = TRIPLE, str(machine.target_data)
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_unrolling = options.loop_vectorization = False
    options.slp_vectorization = options.loop_interleaving = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return str(machine.emit_assembly(module))
