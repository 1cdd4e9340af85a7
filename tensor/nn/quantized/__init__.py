"""Weights in GGUF's blocks that stay so: `QuantizedWeight`, the layers that have them, `quantize`."""

from manygrad.tensor.nn.quantized.layers import QuantizedEmbedding, QuantizedLinear, quantize
from manygrad.tensor.nn.quantized.weight import QuantizedWeight

__all__ = ["QuantizedEmbedding", "QuantizedLinear", "QuantizedWeight", "quantize"]
