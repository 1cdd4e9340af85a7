"""Samples into a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from manygrad.tensor.tensor import Tensor


def default_collate(samples: Sequence[Any]) -> Any:
    """Arrays are stacked along a new first dim, numbers become arrays (int64, float64, bool), text stays a list;
    tuples, lists and dicts of them are collated part by part. What has to be equal and is not gives a ValueError."""
    first = samples[0]
    if isinstance(first, Tensor):
        realize(samples)  # all at once: one by one each costs a schedule of its own
        samples = [s.numpy() for s in samples]
        first = samples[0]
    if any(isinstance(s, (np.ndarray, np.generic)) for s in samples):
        shapes = {np.shape(s) for s in samples}
        if len(shapes) > 1:
            raise ValueError(
                f"the samples of a batch have the shapes {sorted(shapes)}; make them equal, "
                "or give a collate_fn (pad_sequence)"
            )
        return np.stack([np.asarray(s) for s in samples])
    if isinstance(first, (bool, int, float)):
        kinds = {type(s) for s in samples}
        if not kinds <= {bool, int, float}:
            raise ValueError(f"the samples of a batch are {sorted(k.__name__ for k in kinds)}; make them all numbers")
        return np.array(samples, dtype=np.float64 if float in kinds else np.int64 if int in kinds else np.bool_)
    if isinstance(first, dict):
        if any(s.keys() != first.keys() for s in samples):
            raise ValueError(
                f"the samples of a batch have the keys {sorted({tuple(s) for s in samples})}; all need the same"
            )
        return {k: default_collate([s[k] for s in samples]) for k in first}
    if isinstance(first, (tuple, list)):
        if any(len(s) != len(first) for s in samples):
            raise ValueError(
                f"the samples of a batch have {sorted({len(s) for s in samples})} parts; all need the same number"
            )
        parts = [default_collate(part) for part in zip(*samples)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return list(samples)


def realize(batch: Any) -> None:
    """Computes all tensors of a batch: lazy ones would be computed by each step anew, as a part of its graph."""
    if found := list(_tensors(batch)):
        found[0].realize(*found[1:])


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (dict, tuple, list)):
        for part in batch.values() if isinstance(batch, dict) else batch:
            yield from _tensors(part)


def mapped(batch: Any, f: Any) -> Any:
    """The batch with `f` of each array."""
    if isinstance(batch, np.ndarray):
        return f(batch)
    if isinstance(batch, dict):
        return {k: mapped(v, f) for k, v in batch.items()}
    if isinstance(batch, (tuple, list)):
        parts = [mapped(v, f) for v in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch
