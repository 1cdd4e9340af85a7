"""Optimisers with torch.optim's names and arguments, and LARS and LAMB."""

from manygrad.tensor.nn.optim import lr_scheduler
from manygrad.tensor.nn.optim.adam import Adam, AdamW
from manygrad.tensor.nn.optim.adam_variants import Adamax, NAdam, RAdam
from manygrad.tensor.nn.optim.adaptive import Adadelta, Adagrad, RMSprop
from manygrad.tensor.nn.optim.layerwise import LAMB, LARS
from manygrad.tensor.nn.optim.muon import Muon
from manygrad.tensor.nn.optim.optimizer import Optimizer
from manygrad.tensor.nn.optim.sgd import SGD

__all__ = [
    "LAMB",
    "LARS",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Muon",
    "NAdam",
    "Optimizer",
    "RAdam",
    "RMSprop",
    "lr_scheduler",
]
