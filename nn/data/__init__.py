"""Datasets and `DataLoader`."""

from manygrad.nn.data.collate import default_collate
from manygrad.nn.data.dataset import ConcatDataset, Dataset, Subset, TensorDataset, TokenDataset, random_split
from manygrad.nn.data.images import ImageFolder, read_image
from manygrad.nn.data.loader import DataLoader
from manygrad.nn.data.randomness import rng

__all__ = [
    "ConcatDataset",
    "DataLoader",
    "Dataset",
    "ImageFolder",
    "Subset",
    "TensorDataset",
    "TokenDataset",
    "default_collate",
    "random_split",
    "read_image",
    "rng",
]
