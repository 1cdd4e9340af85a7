"""Layers, optimisers and state. Layers are plain objects with Tensor attributes; there is no base class to inherit."""

from manygrad.tensor.nn import optim, state
from manygrad.tensor.nn.layers import BatchNorm, BatchNorm2d, Conv2d, Embedding, LayerNorm, Linear

__all__ = ["BatchNorm", "BatchNorm2d", "Conv2d", "Embedding", "LayerNorm", "Linear", "optim", "state"]
