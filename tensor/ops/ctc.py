"""Connectionist temporal classification (Graves and others, 2006):
the likelihood of a label sequence over all alignments."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.ops.checking import checked

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor

NEVER = -1e30  # log of no probability; finite, so that differences of two are numbers


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """log_probs (T, N, C) or (T, C), targets (N, S) or all of them joined, lengths of each -> −log of the likelihood,
    per sequence (N,).

    The mean is of each loss divided by its target's length. T steps over (N, 2·S + 1) states.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction is "mean", "sum" or "none", not {reduction!r}')
    single = log_probs.ndim == 2
    lp = log_probs.unsqueeze(1) if single else log_probs
    if lp.ndim != 3 or not 0 <= blank < lp.shape[2]:
        raise ValueError(
            f"ctc_loss: log_probs has shape {log_probs.shape}, expected (T, N, C) or (T, C) with C above blank={blank}"
        )
    steps, batch, _ = lp.shape
    frames, lengths = (_lengths(lp, x) for x in (input_lengths, target_lengths))
    frames = checked(frames, "ctc_loss: input length", steps + 1, lp)
    if single and targets.ndim == 1:
        targets = targets.unsqueeze(0)
    elif targets.ndim == 1:
        targets = _rows(targets, target_lengths, batch)
    if targets.ndim != 2 or targets.shape[0] != batch or frames.shape != (batch,) or lengths.shape != (batch,):
        raise ValueError(
            f"ctc_loss: a batch of {batch} needs targets ({batch}, S) and {batch} lengths of each, got "
            f"{targets.shape}, {frames.shape}, {lengths.shape}"
        )
    size = targets.shape[1]
    lengths = checked(lengths, "ctc_loss: target length", size + 1, lp)
    labels = targets.cast(dtypes.int64)
    blanks = labels * 0 + blank
    states = (
        blanks.unsqueeze(-1)
        .cat(labels.unsqueeze(-1), dim=-1)
        .reshape(batch, 2 * size)
        .cat(labels._take(1, 0, 1) * 0 + blank if size else lp.arange(batch).reshape(batch, 1) * 0 + blank, dim=1)
    )
    count = 2 * size + 1
    emitted = lp._gather_along(2, states.unsqueeze(0)._broadcast((steps, batch, count)))
    place = lp.arange(count).unsqueeze(0)
    skips = states.ne(_moved(states, 2, -1)) & states.ne(blank) & (place >= 2)
    nothing = place.eq(0)._where(0.0, NEVER).cast(lp.dtype)  # (of no frames, only the empty sequence is made)
    alpha = (frames > 0).unsqueeze(1)._where((place < 2)._where(emitted[0], NEVER), nothing)
    for t in range(1, steps):
        stay = alpha.logaddexp(_moved(alpha, 1, NEVER))
        new = stay.logaddexp(skips._where(_moved(alpha, 2, NEVER), NEVER)) + emitted[t]
        alpha = (frames > t).unsqueeze(1)._where(new, alpha).clamp(min=NEVER).contiguous()
    ends = place.eq(2 * lengths.unsqueeze(1)) | place.eq(2 * lengths.unsqueeze(1) - 1)
    loss = -ends._where(alpha, NEVER).logsumexp(1)
    impossible = loss > -NEVER / 2
    loss = impossible._where(0.0 if zero_infinity else math.inf, loss)
    if reduction == "mean":
        return (loss / lengths.clamp(min=1)).mean()
    return loss.sum() if reduction == "sum" else loss.reshape(()) if single else loss


def _moved(x: Tensor, by: int, fill: float) -> Tensor:
    """(N, L): each row moved `by` places to the right."""
    n = x.shape[1]
    return x.pad(((0, 0), (by, 0)), value=fill)._take(1, 0, n)


def _lengths(like: Tensor, x: Any) -> Tensor:
    """Numbers, or a tensor of them, as a tensor (N,)."""
    if hasattr(x, "uop"):
        return x.reshape(-1).cast(dtypes.int64)
    numbers = [int(v) for v in (x if isinstance(x, (tuple, list)) else [x])]
    parts = [like.arange(1) + v for v in numbers]
    return parts[0].cat(*parts[1:])


def _rows(joined: Tensor, target_lengths: Any, batch: int) -> Tensor:
    """Targets one after another -> (N, S), each row as long as the longest; the lengths must be known now."""
    lengths = [int(v) for v in (target_lengths.tolist() if hasattr(target_lengths, "uop") else target_lengths)]
    if len(lengths) != batch or sum(lengths) != joined.shape[0]:
        raise ValueError(
            f"ctc_loss: the target lengths {lengths} do not add up to the {joined.shape[0]} joined targets of a batch "
            f"of {batch}"
        )
    size, at, rows = max(lengths), 0, []
    for n in lengths:
        rows.append(joined._take(0, at, at + n).pad(((0, size - n),)).unsqueeze(0))
        at += n
    return rows[0].cat(*rows[1:], dim=0)
