"""Where samples come from: anything with `len(d)` and `d[i]`.
`d.__getitems__(rows)`, if there is one, gives many at once.

A sample is an array, a number, text, or a tuple, list or dict of them, all on the host.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

import numpy as np

from manygrad.tensor.tensor import Tensor


@runtime_checkable
class Dataset(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class TensorDataset:
    """Row i of each array: tensors (fetched once), NumPy arrays, also memory-mapped ones
    (`np.load(path, mmap_mode="r")`)."""

    def __init__(self, *tensors: Any):
        self.tensors = [t.numpy() if isinstance(t, Tensor) else np.asanyarray(t) for t in tensors]
        if not self.tensors or any(t.ndim == 0 for t in self.tensors) or len({len(t) for t in self.tensors}) != 1:
            raise ValueError(
                f"TensorDataset: arrays of one common length are needed, got shapes {[t.shape for t in self.tensors]}"
            )

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: Any) -> tuple[np.ndarray, ...]:
        return tuple(t[index] for t in self.tensors)

    def rows(self, rows: np.ndarray) -> tuple[np.ndarray, ...]:
        """A whole batch without collating row by row."""
        return tuple(np.ascontiguousarray(t[rows]) for t in self.tensors)


class TokenDataset:
    """Windows of a long array of token numbers, or of a raw file of them that is memory-mapped:
    (tokens, the same one later).

    Sample i covers positions i·stride .. i·stride + context; stride is context unless given.
    """

    def __init__(
        self,
        tokens: str | os.PathLike[str] | np.ndarray,
        context: int,
        dtype: str = "uint16",
        stride: int | None = None,
    ):
        if isinstance(tokens, (str, os.PathLike)):
            size, width = os.path.getsize(tokens), np.dtype(dtype).itemsize
            if size % width:
                raise ValueError(f"TokenDataset: {os.fspath(tokens)} has {size} bytes, not a whole number of {dtype}")
            tokens = np.memmap(tokens, dtype=dtype, mode="r") if size else np.zeros(0, dtype)
        self.tokens, self.context, self.stride = tokens, context, stride or context
        if context < 1 or self.stride < 1 or len(tokens) < context + 1:
            raise ValueError(
                f"TokenDataset: {len(tokens)} tokens are too few for a context of {context} and what follows it"
            )

    def __len__(self) -> int:
        return (len(self.tokens) - 1 - self.context) // self.stride + 1

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        at = range(len(self))[index] * self.stride
        window = np.asarray(self.tokens[at : at + self.context + 1]).astype(np.int64)
        return window[:-1], window[1:]


class Subset:
    """The samples `indices` of a dataset."""

    def __init__(self, dataset: Dataset, indices: Sequence[int]):
        self.dataset, self.indices = dataset, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.indices[index]]


class ConcatDataset:
    """Datasets one after another."""

    def __init__(self, datasets: Sequence[Dataset]):
        self.datasets = list(datasets)
        if not self.datasets:
            raise ValueError("ConcatDataset: no datasets")
        self.ends = list(accumulate(len(d) for d in self.datasets))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> Any:
        i = range(len(self))[index]
        which = bisect_right(self.ends, i)
        return self.datasets[which][i - (self.ends[which - 1] if which else 0)]


def random_split(dataset: Dataset, lengths: Sequence[int | float], seed: int = 0) -> list[Subset]:
    """Disjoint random subsets of the given lengths, or shares that add up to 1
    (what is left over goes round from the first)."""
    n = len(dataset)
    counts = [int(x) for x in lengths]
    if abs(sum(lengths) - 1) < 1e-6 and all(0 <= x <= 1 for x in lengths):
        counts = [int(n * x) for x in lengths]
        for i in range(n - sum(counts)):
            counts[i % len(counts)] += 1
    if sum(counts) != n or min(counts, default=0) < 0:
        raise ValueError(
            f"random_split: the lengths {list(lengths)} add up to {sum(counts)}, the dataset has {n} samples; "
            "lengths are 0 or more, or shares that add up to 1"
        )
    order = np.random.default_rng(seed).permutation(n).tolist()
    ends = list(accumulate(counts))
    return [Subset(dataset, order[end - count : end]) for count, end in zip(counts, ends)]
