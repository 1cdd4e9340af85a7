"""Writes the generated pages: docs/architecture.md (with the IR of every stage), docs/environment.md, docs/ops.md,
docs/opts.md and docs/loops.md.

python docs/generate.py           # writes them
python docs/generate.py --check   # exit code 1 if they are not up to date
"""

from __future__ import annotations

import os
import sys

import loops
import numpy as np
import op_table
import opts

from manygrad import Tensor
from manygrad.schedule import create_linear_with_vars, number_buffers
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.environment import markdown_table
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.passes import observers
from manygrad.tensor.uop.show import show

HERE = os.path.dirname(os.path.abspath(__file__))

PROGRAM = """devices = ("CPU:0", "CPU:1")
x = Tensor(rows).shard(devices, axis=0)  # (4, 3): two rows on each device
w = Tensor(weights).shard(devices)  # (3, 1): a copy on each
w.requires_grad = True
loss = (x @ w).relu().sum()
loss.backward()
w.assign(w - w.grad * 0.1)
w.realize()
"""


def graphs() -> tuple[str, dict[str, str], UOp]:
    """(tensor graph, graph after each pass, LINEAR) of PROGRAM."""
    devices = ("CPU:0", "CPU:1")
    x = Tensor(np.ones((4, 3), np.float32)).shard(devices, axis=0).contiguous().realize()
    w = Tensor(np.ones((3, 1), np.float32)).shard(devices).contiguous().realize()
    w.requires_grad = True
    (x @ w).relu().sum().backward()
    assert w.grad is not None
    w.assign(w - w.grad * 0.1)
    sink = UOp(Ops.SINK, dtypes.void, (w.uop,))
    passes: dict[str, str] = {}

    def observe(stage: str, name: str, graph: UOp) -> None:
        passes[name] = show(graph)

    observers.append(observe)
    try:
        linear = create_linear_with_vars(sink).linear
    finally:
        observers.remove(observe)
    return show(number_buffers(sink)[0]), passes, linear


def argument(u: UOp) -> str:
    if u.op is Ops.VIEW:
        return f"{argument(u.src[0])}[{u.arg.offset}:]"
    return (
        f"temp{-u.arg.uid}"
        if u.op is Ops.BUFFER
        else f"buffer{u.src[0].arg.uid}.part{u.arg}"
        if u.op is Ops.MSELECT
        else f"buffer{u.arg.uid}"
    )


def linear_text(linear: UOp) -> str:
    lines = []
    for i, call in enumerate(linear.src):
        what = call.src[0]
        args = ", ".join(map(argument, call.src[1:]))
        name = "kernel" if what.op is Ops.SINK else what.op.name.lower()
        lines.append(f"{i}: {name}({args})")
    plan = linear.arg
    lines += [f"pool {i}: {p.nbytes} bytes on {p.device}" for i, p in enumerate(plan.pools)]
    lines += [f"temp{-b.uid}: {b.nbytes} bytes at {b.offset} of pool {b.pool}" for b in plan.buffers]
    return "\n".join(lines)


def architecture() -> str:
    with open(os.path.join(HERE, "architecture.template.md"), encoding="utf-8") as f:
        text = f.read()
    tensor, passes, linear = graphs()
    kernel = next(c.src[0] for c in linear.src if c.src[0].op is Ops.SINK)
    parts = {"program": PROGRAM.rstrip(), "tensor graph": tensor, "linear": linear_text(linear), "kernel": show(kernel)}
    parts |= {f"pass {name}": graph for name, graph in passes.items()}
    for name, value in parts.items():
        text = text.replace("{{" + name + "}}", value)
    assert "{{" not in text, text[text.index("{{") :][:60]
    return text


def pages() -> dict[str, str]:
    return {
        "architecture.md": architecture(),
        "environment.md": markdown_table(),
        "ops.md": op_table.markdown(),
        "opts.md": opts.page(),
        "loops.md": loops.page(),
    }


def main() -> int:
    stale = []
    for name, text in pages().items():
        path = os.path.join(HERE, name)
        old = open(path, encoding="utf-8").read() if os.path.exists(path) else ""
        if old != text:
            stale.append(name)
            if "--check" not in sys.argv:
                with open(path, "w", encoding="utf-8") as f:
                    f.write(text)
    if "--check" in sys.argv and stale:
        print(f"not up to date: {', '.join(stale)}; run python docs/generate.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
