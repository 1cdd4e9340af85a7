"""Weights in GGUF's blocks that stay so: `QuantizedWeight`, the layers that have them, `quantize`."""

from manygrad.nn.quantized.layers import QuantizedEmbedding, QuantizedLinear, quantize
from manygrad.nn.quantized.weight import QuantizedWeight

__all__ = ["QuantizedEmbedding", "QuantizedLinear", "QuantizedWeight", "quantize"]
