"""Softmax over very many classes in clusters by frequency (Grave et al., 2017)."""

from __future__ import annotations

from typing import Any, NamedTuple

from manygrad.nn.container import ModuleList, Sequential
from manygrad.nn.linear import Linear
from manygrad.nn.module import Module
from manygrad.tensor.tensor import Tensor


class ASMoutput(NamedTuple):
    output: Tensor  # the log-probability of each target
    loss: Tensor


class AdaptiveLogSoftmaxWithLoss(Module):
    """The first cutoffs[0] classes and one entry a cluster are the head; cluster i has its own, narrower projection.

    Shapes are fixed, so every cluster is computed for every row and the right one is chosen.
    """

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        cutoffs: list[int],
        div_value: float = 4.0,
        head_bias: bool = False,
        device: Any = None,
        dtype: Any = None,
    ):
        cutoffs = list(cutoffs)
        if not cutoffs or cutoffs != sorted(set(cutoffs)) or cutoffs[0] <= 0 or cutoffs[-1] > n_classes - 1:
            raise ValueError(f"cutoffs are distinct, rising numbers in 1..{n_classes - 1}, not {cutoffs}")
        self.in_features, self.n_classes, self.cutoffs, self.div_value, self.head_bias = (
            in_features,
            n_classes,
            [*cutoffs, n_classes],
            div_value,
            head_bias,
        )
        self.shortlist_size, self.n_clusters = self.cutoffs[0], len(self.cutoffs) - 1
        self.head_size = self.shortlist_size + self.n_clusters
        self.head = Linear(in_features, self.head_size, head_bias, device, dtype)
        self.tail = ModuleList()
        for i in range(self.n_clusters):
            narrow = int(in_features // (div_value ** (i + 1)))
            classes = self.cutoffs[i + 1] - self.cutoffs[i]
            self.tail.append(
                Sequential(
                    Linear(in_features, narrow, False, device, dtype), Linear(narrow, classes, False, device, dtype)
                )
            )

    def forward(self, input: Tensor, target: Tensor) -> ASMoutput:
        """input (N, in_features) or (in_features,), target (N,) or () -> the log-probability of each target,
        their mean negated."""
        if (input.ndim, target.ndim) not in ((2, 1), (1, 0)) or input.shape[:-1] != target.shape:
            raise ValueError(
                f"AdaptiveLogSoftmaxWithLoss: input (N, {self.in_features}) and target (N,), "
                f"got {input.shape} and {target.shape}"
            )
        logp = self.log_prob(input.reshape(-1, self.in_features)).gather(1, target.reshape(-1, 1)).reshape(target.shape)
        return ASMoutput(logp, -logp.mean())

    def log_prob(self, input: Tensor) -> Tensor:
        """(N, n_classes)."""
        head = self.head(input).log_softmax(1).contiguous()
        parts = [head[:, : self.shortlist_size]]
        for i, tail in enumerate(self.tail):
            parts.append(tail(input).log_softmax(1) + head[:, self.shortlist_size + i : self.shortlist_size + i + 1])
        return parts[0].cat(*parts[1:], dim=1)

    def predict(self, input: Tensor) -> Tensor:
        """The likeliest class of each row."""
        return self.log_prob(input).argmax(1)
