"""Optimisers with torch.optim's names and arguments, and LARS and LAMB."""

from manygrad.nn.optim import lr_scheduler
from manygrad.nn.optim.adam import Adam, AdamW
from manygrad.nn.optim.adam_variants import Adamax, NAdam, RAdam
from manygrad.nn.optim.adaptive import Adadelta, Adagrad, RMSprop
from manygrad.nn.optim.diloco import DiLoCo
from manygrad.nn.optim.grad_scaler import GradScaler
from manygrad.nn.optim.layerwise import LAMB, LARS
from manygrad.nn.optim.muon import Muon
from manygrad.nn.optim.optimizer import Optimizer
from manygrad.nn.optim.sgd import SGD

__all__ = [
    "LAMB",
    "LARS",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "DiLoCo",
    "GradScaler",
    "Muon",
    "NAdam",
    "Optimizer",
    "RAdam",
    "RMSprop",
    "lr_scheduler",
]
