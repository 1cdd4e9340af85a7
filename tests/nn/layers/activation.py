"""Activations as layers."""

from __future__ import annotations

from typing import Any

from tests.nn.layers.layer import FUNCTION, Layer, data

X = data(3, 4)


def f(name: str, function: str, *args: Any, oracle: tuple[Any, ...] | None = None, x: Any = X, **options: Any) -> Layer:
    """The constructor's arguments are also the oracle's, unless `oracle` says which."""
    given = args if oracle is None else oracle
    return Layer(name, (x,), lambda a: FUNCTION[function](a, *given), args, **options)


LAYERS = [
    f("ReLU", "relu"), f("ReLU6", "relu6", x=data(3, 4, low=-9, high=9)), f("ELU", "elu", 0.7), f("CELU", "celu", 0.7),
    f("CELU", "celu", oracle=(1.0,), variant="plain"),
    f("SELU", "selu"), f("GELU", "gelu"), f("GELU", "gelu", "tanh", variant="tanh"), f("SiLU", "silu"),
    f("Mish", "mish"), f("LeakyReLU", "leaky_relu", 0.2),
    f("LeakyReLU", "leaky_relu", oracle=(0.01,), variant="plain"), f("RReLU", "rrelu"), f("Sigmoid", "sigmoid"),
    f("LogSigmoid", "logsigmoid"),
    f("Hardsigmoid", "hardsigmoid"), f("Hardswish", "hardswish"), f("Hardshrink", "hardshrink", 1.3),
    f("Hardshrink", "hardshrink", oracle=(0.5,), variant="plain"),
    f("Softshrink", "softshrink", 1.3), f("Softplus", "softplus", 2.5, 3), f("Softplus", "softplus", variant="plain"),
    f("Softsign", "softsign"), f("Tanh", "tanh"),
    f("Tanhshrink", "tanhshrink"), f("Threshold", "threshold", 0.1, -2.0), f("GLU", "glu", oracle=(-1,)),
    f("GLU", "glu", 0, x=data(4, 3), variant="0"),
    f("Softmax", "softmax", -1), f("Softmax", "softmax", 0, variant="0"), f("LogSoftmax", "log_softmax", 1),
    f("Softmin", "softmin", 1),
    f("Softmax2d", "softmax", oracle=(-3,), x=data(3, 2, 2, 3)), f("Hardtanh", "hardtanh", -1.5, 2.0),
    f("Hardtanh", "hardtanh", oracle=(-1, 1), variant="plain"),
    Layer("PReLU", (X,), lambda w, x: FUNCTION["prelu"](x, w["weight"]), keys=("weight",)),
    Layer("PReLU", (data(3, 2, 2),), lambda w, x: FUNCTION["prelu"](x, w["weight"]), (2,), {"init": 0.1},
          keys=("weight",), variant="a channel"),
]  # fmt: skip
