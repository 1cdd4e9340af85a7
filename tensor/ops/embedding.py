"""Rows of a table by number, alone or in bags. The gradient is a scatter-add of the rows that were read."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from manygrad.tensor.gradient import CustomGrad
from manygrad.tensor.ops.checking import checked
from manygrad.tensor.uop import Ops, UOp

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


def embedding(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Tensor:  # fmt: skip
    """input (*) of row numbers, weight (V, D) -> (*, D).

    Row `padding_idx` gets no gradient; rows whose norm is above `max_norm` are first scaled down to it in `weight`
    itself; with `scale_grad_by_freq` a row's gradient is divided by how often it was read. `sparse` has no meaning
    here.
    """
    _check("embedding", input, weight)
    input = checked(input, "embedding: row", weight.shape[0], weight)
    if max_norm is not None:
        _limit_rows(input, weight, max_norm, norm_type)
    rows = weight[input]
    if scale_grad_by_freq:
        flat = input.reshape(-1)
        times = weight[:, 0].detach().zeros_like().scatter_add(0, flat, flat.ones_like().cast(weight.dtype))
        rows = _divided_gradient(rows, times[input].unsqueeze(-1))
    return rows if padding_idx is None else _without_gradient(rows, input, _row(padding_idx, weight))


def _check(name: str, index: Tensor, weight: Tensor) -> None:
    if weight.ndim != 2:
        raise ValueError(f"{name}: weight is a table (rows, columns), not of shape {weight.shape}")
    if not index.dtype.is_int:
        raise TypeError(f"{name}: row numbers are integers, not {index.dtype.name}; cast with .long() first")


def _row(padding_idx: int, weight: Tensor) -> int:
    if not -weight.shape[0] <= padding_idx < weight.shape[0]:
        raise ValueError(f"padding_idx {padding_idx} is no row of a table with {weight.shape[0]} rows")
    return padding_idx % weight.shape[0]


def _without_gradient(rows: Tensor, index: Tensor, padding_idx: int) -> Tensor:
    return index.eq(padding_idx).unsqueeze(-1)._where(rows.detach(), rows)


def _divided_gradient(rows: Tensor, times: Tensor) -> Tensor:
    """`rows`, whose gradient is divided by `times`."""
    custom = CustomGrad("divided_gradient", (), lambda g, rows, times: (g / times, None))
    return rows._new(UOp(Ops.CUSTOM, rows.dtype, (rows.uop, rows.uop, times.uop), custom))


def _limit_rows(index: Tensor, weight: Tensor, max_norm: float, norm_type: float) -> None:
    """Rows of `weight` that `index` names become max_norm long at most."""
    w, flat = weight.detach(), index.reshape(-1)
    used = w[:, 0].zeros_like().scatter_add(0, flat, flat.ones_like().cast(w.dtype)) > 0
    size = w.abs().amax(1) if norm_type == math.inf else (w.abs() ** norm_type).sum(1) ** (1 / norm_type)
    factor = (used & (size > max_norm))._where(max_norm / (size + 1e-7), 1.0)
    weight.assign(w * factor.unsqueeze(1))


def embedding_bag(
    input: Tensor, weight: Tensor, offsets: Tensor | None = None, max_norm: float | None = None, norm_type: float = 2.0,
    scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False,
    per_sample_weights: Tensor | None = None, include_last_offset: bool = False, padding_idx: int | None = None,
) -> Tensor:  # fmt: skip
    """The sum, mean or max of rows, a bag each: input (B, N), or (all,)
    with bag b from offsets[b] to the next -> (B, D).

    Rows `padding_idx` do not count; an empty bag is 0.
    """
    _check("embedding_bag", input, weight)
    if mode not in ("sum", "mean", "max"):
        raise ValueError(f'embedding_bag: mode is "sum", "mean" or "max", not {mode!r}')
    if per_sample_weights is not None and (mode != "sum" or per_sample_weights.shape != input.shape):
        raise ValueError(
            f'embedding_bag: per_sample_weights need mode "sum" and the shape of the input {input.shape}, got {mode!r} '
            f"and {per_sample_weights.shape}"
        )
    if (input.ndim == 2) == (offsets is not None) or input.ndim not in (1, 2):
        raise ValueError(
            "embedding_bag: an input (B, N) has no offsets, one of shape (N,) needs them; "
            f"got input {input.shape} and offsets {'None' if offsets is None else offsets.shape}"
        )
    rows = embedding(input, weight, None, max_norm, norm_type, scale_grad_by_freq)
    counted = None if padding_idx is None else input.ne(_row(padding_idx, weight))
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if offsets is None:
        return _reduced(rows, counted, mode)
    starts = offsets[:-1] if include_last_offset else offsets
    bag = (starts.unsqueeze(1) <= input.arange(input.shape[0])).sum(0) - 1  # of each row
    if mode == "max":
        mine = bag.eq(input.arange(starts.shape[0]).unsqueeze(1))
        return _reduced(rows.unsqueeze(0), mine if counted is None else mine & counted, mode)
    zeros = weight[:1].detach().zeros_like()._broadcast((starts.shape[0], weight.shape[1]))
    total = zeros.scatter_add(
        0, bag.unsqueeze(1)._broadcast(rows.shape), rows if counted is None else counted.unsqueeze(1)._where(rows, 0.0)
    )
    if mode == "sum":
        return total
    ones = rows[:, :1].detach().ones_like() if counted is None else counted.unsqueeze(1).cast(rows.dtype)
    return total / zeros[:, :1].scatter_add(0, bag.unsqueeze(1), ones).maximum(1)


def _reduced(rows: Tensor, counted: Tensor | None, mode: str) -> Tensor:
    """(B, N, D) over N, where `counted` (B, N) holds."""
    some: Any = None if counted is None else counted.unsqueeze(-1)
    if rows.shape[1] == 0:
        total = rows.sum(1)
        return total if counted is None else total._broadcast((counted.shape[0], rows.shape[2]))
    if mode == "max":
        return rows.amax(1) if some is None else some.any(1)._where(some._where(rows, -math.inf).amax(1), 0.0)
    total = rows.sum(1) if some is None else some._where(rows, 0.0).sum(1)
    if mode == "sum":
        return total
    return total * (1 / rows.shape[1]) if some is None else total / some.cast(rows.dtype).sum(1).maximum(1)
