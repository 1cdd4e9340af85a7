"""OpenCL C with every access checked against the size of its buffer (CHECK_OOB=1): what `bounds.py` is for LLVM IR.

A work item that finds an access outside goes on without it, as others may wait for it at a barrier: it reads 0.

before:  const float4 v7 = vload4(0, p1 + i);
after:   const float v3 = (inside(i, s1 / 4, 1, 1, record) ? p1[i] : 0); ... and so for each lane
"""

from __future__ import annotations

from manygrad.runtime.codegen.lowered import Inst, Low, LoweredProgram
from manygrad.runtime.codegen.render.opencl.printer import OpenCLPrinter, OpenCLTarget
from manygrad.runtime.codegen.render.opencl.text import Value, memory_type
from manygrad.runtime.devices.compile.bounds import LOCAL, SHARED

# (a function of its own: a call for each lane is slow enough to compile)
INSIDE = """__attribute__((noinline))
static int inside(long i, long size, int access, int slot, __global long* record) {
  if (i >= 0 && i < size) return 1;
  if (atomic_cmpxchg((volatile __global int*)record, 0, access) == 0) {
    record[1] = slot; record[2] = i; record[3] = size;
  }
  return 0;
}"""


class CheckedOpenCLPrinter(OpenCLPrinter):
    def more_arguments(self) -> list[str]:
        self.helpers["inside"] = INSIDE
        return [*(f"const long s{i}" for i in range(self.program.slots)), "__global long* record"]

    def load(self, x: Inst) -> Value:
        guard = x.src[2] if len(x.src) == 3 else None
        lanes = list[str]()
        for i in range(x.lanes):
            inside, element = self.checked(x, guard, i, 1)
            lanes.append(self.valued(x.dtype, 1, f"({inside} ? {element} : ({memory_type(x.dtype)})(0))"))
        return self.joined(x.dtype, lanes)

    def store(self, x: Inst) -> None:
        value, guard = x.src[2], x.src[3] if len(x.src) == 4 else None
        for i in range(value.lanes):
            inside, element = self.checked(x, guard, i, 2)
            self.line(f"if ({inside}) {element} = {self.stored(value.dtype, 1, self.lane(value, i))};")

    def checked(self, x: Inst, guard: Inst | None, i: int, access: int) -> tuple[str, str]:
        """(condition, element) of lane `i`."""
        pointer, offset = x.src[0], x.src[1]
        at, more = (self.lane(offset, i), x.arg) if offset.lanes > 1 else (self.names[offset][0], x.arg + i)
        index = self.let("long", f"{at} + {more}")
        own, size = self.program, pointer.dtype.itemsize
        slot, elements = {
            Low.PARAM: (pointer.arg, f"s{pointer.arg} / {size}"),
            Low.SCRATCH: (LOCAL, f"{(own.scratch_bytes - pointer.arg) // size}"),
            Low.SHARED: (SHARED, f"{(own.shared_bytes - pointer.arg) // size}"),
        }[pointer.op]  # type: ignore[index]
        inside = f"inside({index}, {elements}, {access}, {slot}, record)"
        if guard is not None:
            inside = f"({self.names[guard][0] if guard.lanes == 1 else self.lane(guard, i)} && {inside})"
        return inside, f"{self.names[pointer][0]}[{index}]"


def render_checked(program: LoweredProgram, target: OpenCLTarget) -> str:
    """The OpenCL C of a program that checks its accesses."""
    return CheckedOpenCLPrinter(program, target).run()
