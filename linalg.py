"""`manygrad.linalg`, whose functions have torch.linalg's names; they stand in `tensor/linalg/`."""

from manygrad.tensor.linalg import *  # noqa: F403
from manygrad.tensor.linalg import __all__ as __all__
