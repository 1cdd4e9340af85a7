"""Models' state by name, and the files it is kept in. Files are mapped, checked and never executed."""

from manygrad.nn.state.dcp import dcp_load
from manygrad.nn.state.gguf import gguf_load
from manygrad.nn.state.model import get_parameters, get_state_dict, load_state_dict
from manygrad.nn.state.safetensors import safe_load, safe_save
from manygrad.nn.state.torch_file import torch_load
from manygrad.nn.state.torch_save import torch_save

__all__ = [
    "dcp_load",
    "get_parameters",
    "get_state_dict",
    "gguf_load",
    "load_state_dict",
    "safe_load",
    "safe_save",
    "torch_load",
    "torch_save",
]
