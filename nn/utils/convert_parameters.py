"""All parameters as one vector and back."""

from __future__ import annotations

from collections.abc import Iterable

from manygrad.tensor.tensor import Tensor


def parameters_to_vector(parameters: Iterable[Tensor]) -> Tensor:
    """The elements of all parameters in order, (total,)."""
    flat = [p.reshape(-1) for p in parameters]
    if not flat:
        raise ValueError("parameters_to_vector: no parameters")
    return flat[0].cat(*flat[1:]) if len(flat) > 1 else flat[0]


def vector_to_parameters(vec: Tensor, parameters: Iterable[Tensor]) -> None:
    """Overwrites the parameters, in order, with the parts of `vec`."""
    params = list(parameters)
    total = sum(p.numel() for p in params)
    if vec.shape != (total,):
        raise ValueError(
            f"vector_to_parameters: the parameters have {total} elements, the vector has shape {vec.shape}"
        )
    at = 0
    for p in params:
        n = p.numel()
        p.assign(vec.detach()[at : at + n].reshape(p.shape))
        at += n
