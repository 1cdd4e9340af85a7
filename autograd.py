"""`manygrad.autograd`: what a program differentiates with besides `backward()`; it stands in `tensor/autograd.py`."""

from manygrad.tensor.anomaly import detect_anomaly, set_detect_anomaly
from manygrad.tensor.autograd import Context, Function, checkpoint, grad

__all__ = ["Context", "Function", "checkpoint", "detect_anomaly", "grad", "set_detect_anomaly"]
