"""The next token of a text, drawn from a model's logits.

    token = nn.sample(logits, temperature=0.8, top_k=40, top_p=0.95)

Everything is a graph over the logits, sharded or not. A parameter may be a number, which becomes a part of the kernels,
or a tensor, whose value a captured step reads anew at each call; a tensor of the logits' leading shape gives each row
its own. A token is drawn as the largest of logit + noise (Gumbel, "Statistical theory of extreme values", 1954), with
noise by the counter of `Tensor.rand`, hence the same token at any sharding.
"""

from __future__ import annotations

import math
from typing import Any

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.ops.random import philox
from manygrad.tensor.tensor import Tensor

DIGIT = 4  # bits of a threshold that one pass over the logits finds

Number = float | int | Tensor


def sample(
    logits: Tensor,
    *,
    temperature: Number = 1.0,
    top_k: Number | None = None,
    top_p: Number | None = None,
    min_p: Number | None = None,
    repetition_penalty: Number | None = None,
    history: Tensor | None = None,
    seed: int | Tensor | None = None,
    draw: Any = 0,
) -> Tensor:
    """logits (..., V) -> token numbers (...), int64. At temperature 0 the likeliest.

    Without a `seed` the numbers are the generator's next (`Tensor.manual_seed`). With one they follow from `seed` and
    from `draw`, which counts the tokens of a text (a number, a bound Variable or a tensor): the token of a row depends
    on nothing else that is drawn, nor on the rows beside it. The other arguments: `filter_logits`.
    """
    scores = filter_logits(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
                           repetition_penalty=repetition_penalty, history=history)  # fmt: skip
    if not isinstance(temperature, Tensor) and temperature == 0:
        return scores.argmax(-1)
    noise = _gumbel(logits, seed, draw)
    heat = _column("temperature", temperature, logits)
    return (scores + (heat > 0)._where(noise, 0.0) if isinstance(heat, Tensor) else scores + noise).argmax(-1)


def filter_logits(
    logits: Tensor,
    *,
    temperature: Number = 1.0,
    top_k: Number | None = None,
    top_p: Number | None = None,
    min_p: Number | None = None,
    repetition_penalty: Number | None = None,
    history: Tensor | None = None,
) -> Tensor:
    """logits (..., V) over the temperature, less their largest, −inf where a token may not be drawn. In this order:

    - `repetition_penalty` r: a token in `history` (..., n) has its logit divided by r if that is positive, multiplied
      by r if not (Keskar et al., CTRL, arXiv 1909.05858); negative numbers in `history` are no tokens. 1: none.
    - `temperature`: logits are divided by it; 0 leaves them as they are.
    - `top_k`: the k likeliest, and those as likely as the k-th. 0: all.
    - `top_p`: of these the fewest likeliest that have at least the share p of the probability. 1: all.
    - `min_p`: those with at least p times the probability of the likeliest. 0: all.
    """
    if logits.ndim == 0 or not logits.dtype.is_float:
        raise ValueError(f"sample: logits are floats (..., vocabulary), not {logits.dtype.name} {logits.shape}")
    x = logits.detach().cast(dtypes.float32)
    if (repetition_penalty is None) != (history is None):
        raise ValueError("sample: repetition_penalty and history belong together; give both or neither")
    if history is not None:
        penalty = _column("repetition_penalty", repetition_penalty, logits)
        x = _seen(history, x)._where((x > 0)._where(x / penalty, x * penalty), x)
    heat = _column("temperature", temperature, logits)
    x = x - x.amax(-1, keepdim=True)
    x = x / ((heat > 0)._where(heat, 1.0) if isinstance(heat, Tensor) else heat or 1.0)
    keys = x._keys()
    least: Tensor | None = None
    if top_k is not None:
        count = _column("top_k", top_k, logits)
        all_of = logits.shape[-1]
        count = ((count > 0) & (count < all_of))._where(count, all_of) if isinstance(count, Tensor) else count or all_of
        least = _threshold(keys, None, count)
    share = None if top_p is None else _column("top_p", top_p, logits)
    if isinstance(share, Tensor):
        share = (share < 1)._where(share, math.inf)
    if share is not None and (isinstance(share, Tensor) or share < 1):
        mass = x.exp() if least is None else (keys >= least)._where(x.exp(), 0.0)
        # 0 where no sum is as much: of a share of 1, or by rounding
        likeliest = _threshold(keys, mass, mass.sum(-1, keepdim=True) * share)
        least = likeliest if least is None else likeliest.maximum(least)
    kept = None if least is None else keys >= least
    if min_p is not None:
        share = _column("min_p", min_p, logits)
        floor = share.log() if isinstance(share, Tensor) else math.log(share) if share else -math.inf
        kept = x >= floor if kept is None else kept & (x >= floor)
    return x if kept is None else kept._where(x, -math.inf)


RANGES = {  # of the parameters: least, most
    "temperature": (0.0, math.inf), "top_k": (0, math.inf), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, math.inf),
}  # fmt: skip


def _column(name: str, value: Any, logits: Tensor) -> Any:
    """A parameter beside logits (..., V): a number as it is, a tensor as () or (..., 1)."""
    if isinstance(value, Tensor):
        if value.shape not in ((), logits.shape[:-1]):
            raise ValueError(
                f"sample: {name} has shape {value.shape}; one number (), or one a row {logits.shape[:-1]}, is expected"
            )
        return value.unsqueeze(-1) if value.ndim else value
    least, most = RANGES[name]
    positive = name in ("top_p", "repetition_penalty")
    if not least <= value <= most or (positive and value == 0):
        more = "; it is more than 0" if positive else ""
        raise ValueError(f"sample: {name} = {value} lies outside {least}..{most}{more}")
    return value


def _seen(history: Tensor, x: Tensor) -> Tensor:
    """(..., n) token numbers -> (..., V), whether each is among them."""
    size = x.shape[-1]
    if not history.dtype.is_int or history.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"sample: history is integers {(*x.shape[:-1], 'n')}, not {history.dtype.name} {history.shape}"
        )
    at = (history < 0)._where(size, history).cast(dtypes.int64)  # what is no token falls behind the last
    found = history.zeros(*x.shape[:-1], size + 1, dtype=dtypes.int32).to(history.device)
    return found.scatter(-1, at, at.ones_like().cast(dtypes.int32))[..., :size] > 0


def _threshold(keys: Tensor, weight: Tensor | None, need: Any) -> Tensor:
    """(..., 1): the largest key t for which the weights (ones if None) of keys ≥ t sum to `need`.

    Bits of t from the highest, `DIGIT` at a time: all values of a digit are tried in one pass over the keys. No sort;
    a float sum whose terms grow does not shrink, so the tried sums are in order.
    """
    least = keys[..., :1] * 0
    for shift in range(32 - DIGIT, -1, -DIGIT):
        digits = keys.arange(1, 1 << DIGIT).cast(dtypes.uint32)
        tried = (least + (digits << shift)).contiguous()
        above = keys.unsqueeze(-2) >= tried.unsqueeze(-1)
        held = (above.cast(dtypes.int32) if weight is None else above._where(weight.unsqueeze(-2), 0.0)).sum(-1)
        digit = (held >= need).cast(dtypes.uint32).sum(-1, keepdim=True)
        least = (least + (digit.cast(dtypes.uint32) << shift)).contiguous()
    return least


def _gumbel(logits: Tensor, seed: Any, draw: Any) -> Tensor:
    """Noise of the logits' shape: −log E for E from the exponential distribution."""
    if seed is None:
        bits = Tensor._random_bits(logits.numel(), logits.device).reshape(logits.shape)
    else:
        index = logits.arange(logits.shape[-1]).cast(dtypes.uint32)
        bits = philox(index, philox(_word(draw, logits), _word(seed, logits))[0])[0]._broadcast(logits.shape)
    # near 0, where the race is won, float32 has all 32 bits
    uniform = ((bits.cast(dtypes.float32) + 0.5) * 2.0**-32).minimum(1 - 2.0**-24)
    return -(-(-uniform).log1p()).log()


def _word(value: Any, logits: Tensor) -> Tensor:
    """A number as uint32: (1,), or one a row (..., 1)."""
    if not isinstance(value, Tensor):
        if isinstance(value, int):
            value &= 0xFFFFFFFF
        return (logits.arange(1) * 0 + value).cast(dtypes.uint32)
    if value.shape not in ((), logits.shape[:-1]):
        raise ValueError(f"sample: seed and draw are numbers, or one a row {logits.shape[:-1]}, not {value.shape}")
    return value.cast(dtypes.uint32).reshape(*value.shape, 1)
