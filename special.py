"""`manygrad.special`, whose functions have torch.special's names; they stand in `tensor/special.py`."""

from manygrad.tensor.special import *  # noqa: F403
from manygrad.tensor.special import __all__ as __all__
