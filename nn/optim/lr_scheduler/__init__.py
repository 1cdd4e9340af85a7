"""Learning rates over time, with torch.optim.lr_scheduler's names."""

from manygrad.nn.optim.lr_scheduler.base import LRScheduler
from manygrad.nn.optim.lr_scheduler.composed import ChainedScheduler, SequentialLR
from manygrad.nn.optim.lr_scheduler.cosine import CosineAnnealingLR, CosineAnnealingWarmRestarts
from manygrad.nn.optim.lr_scheduler.cyclic import CyclicLR, OneCycleLR
from manygrad.nn.optim.lr_scheduler.decay import (
    ConstantLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiplicativeLR,
    MultiStepLR,
    PolynomialLR,
    StepLR,
)
from manygrad.nn.optim.lr_scheduler.plateau import ReduceLROnPlateau

__all__ = [
    "ChainedScheduler", "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR",
    "LRScheduler", "LambdaLR", "LinearLR", "MultiStepLR", "MultiplicativeLR", "OneCycleLR", "PolynomialLR",
    "ReduceLROnPlateau", "SequentialLR", "StepLR",
]  # fmt: skip
