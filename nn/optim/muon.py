"""Muon: momentum, orthogonalised matrix by matrix (Jordan et al., 2024)."""

from __future__ import annotations

import math

from manygrad.nn.optim.checking import check_count, check_number
from manygrad.nn.optim.flat import Flat, ParamGroup
from manygrad.nn.optim.optimizer import Optimizer, Params
from manygrad.tensor.tensor import Tensor

Coefficients = tuple[float, float, float]


class Muon(Optimizer):
    """w ← (1 − lr·weight_decay)·w − lr'·O(v), v a moving average of g and O the nearest orthogonal matrix, by
    `ns_steps` Newton–Schulz iterations. Only for matrices; other parameters want AdamW. Matrices of one shape are
    iterated together, in float32.
    """

    states = ("momentum_buffer",)

    def __init__(self, params: Params, lr: float = 0.001, weight_decay: float = 0.1, momentum: float = 0.95,
                 nesterov: bool = True, ns_coefficients: Coefficients = (3.4445, -4.775, 2.0315), eps: float = 1e-7,
                 ns_steps: int = 5, adjust_lr_fn: str | None = None):  # fmt: skip
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
                                  "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps,
                                  "adjust_lr_fn": adjust_lr_fn})  # fmt: skip

    def check(self, group: ParamGroup) -> None:
        super().check(group)
        check_count("Muon", "ns_steps", group["ns_steps"])
        for i, c in enumerate(group["ns_coefficients"]):
            check_number("Muon", f"ns_coefficients[{i}]", c, -math.inf)
        if len(group["ns_coefficients"]) != 3:
            raise ValueError(f"Muon: ns_coefficients are three numbers, got {group['ns_coefficients']!r}")
        wrong = [p.shape for p in group["params"] if p.ndim != 2]
        if wrong:
            raise ValueError(f"Muon trains matrices only, not {wrong[0]}; give the other parameters to AdamW")
        if group["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
            raise ValueError(
                f'Muon: adjust_lr_fn is None, "original" or "match_rms_adamw", not {group["adjust_lr_fn"]!r}'
            )

    def update(self, f: Flat, w: Tensor, g: Tensor, s: dict[str, Tensor]) -> None:
        v, b = s["momentum_buffer"], f["momentum"]
        v.assign(v * b + g * (1 - b))
        step = g * (1 - b) + v * b if f.group["nesterov"] else v
        matrices = f.split(step.contiguous())
        done: dict[int, Tensor] = {}
        for shape in dict.fromkeys(p.shape for p in f.params):
            at = [i for i, p in enumerate(f.params) if p.shape == shape]
            stack = (
                matrices[at[0]].stack(*(matrices[i] for i in at[1:])) if len(at) > 1 else matrices[at[0]].unsqueeze(0)
            )
            out = orthogonalized(stack, f.group["ns_coefficients"], f.group["ns_steps"], f.group["eps"]) * _scale(
                shape, f.group["adjust_lr_fn"]
            )
            done.update(zip(at, (out[k] for k in range(len(at)))))
        f.flat.assign(w * (1 - f["lr"] * f["weight_decay"]) - f.join([done[i] for i in range(len(f.params))]) * f["lr"])


def orthogonalized(x: Tensor, coefficients: Coefficients, steps: int, eps: float) -> Tensor:
    """(k, m, n): all singular values pushed towards 1 by X ← a X + (b A + c A²) X, A = X Xᵀ, over the shorter side."""
    a, b, c = coefficients
    tall = x.shape[1] > x.shape[2]
    x = x.transpose(1, 2) if tall else x
    x = (x / x.square().sum((1, 2), keepdim=True).sqrt().maximum(eps)).contiguous()
    for _ in range(steps):
        gram = x.matmul(x.transpose(1, 2)).contiguous()
        x = (x * a + (gram * b + gram.matmul(gram) * c).contiguous().matmul(x)).contiguous()
    return x.transpose(1, 2) if tall else x


def _scale(shape: tuple[int, ...], rule: str | None) -> float:
    rows, columns = shape
    return 0.2 * math.sqrt(max(rows, columns)) if rule == "match_rms_adamw" else math.sqrt(max(1, rows / columns))
