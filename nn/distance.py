"""Distances and similarities as modules."""

from __future__ import annotations

from manygrad.nn.held import Held


class CosineSimilarity(Held, of="cosine_similarity", show="", dim=1, eps=1e-8):
    """x·y / (|x| |y|) along dim."""


class PairwiseDistance(Held, of="pairwise_distance", show="", p=2.0, eps=1e-6, keepdim=False):
    """The p-norm of x − y + eps over the last dim."""
