"""The table of docs/ops.md: every operator of torch.Tensor, torch.nn.functional and torch.nn,
and where it is here, or why not."""

from __future__ import annotations

import inspect
import os
from typing import Any

import manygrad
from manygrad import Tensor, nn

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.dirname(os.path.realpath(manygrad.__file__))
OWNERS: dict[str, Any] = {"Tensor": Tensor, "nn.functional": nn.functional, "nn": nn}

# what the project sets aside as a whole: complex, sparse, quantised, FFT, named and nested tensors
SET_ASIDE: dict[str, str] = {
    "complex": "cdouble cfloat chalf imag resolve_conj resolve_neg",
    "sparse": (
        "ccol_indices coalesce col_indices crow_indices dense_dim indices is_coalesced is_sparse_csr "
        "resize_as_sparse_ row_indices smm sparse_dim sparse_mask sparse_resize_ sparse_resize_and_clear_ sspaddmm "
        "to_dense to_sparse to_sparse_bsc to_sparse_bsr to_sparse_coo to_sparse_csc to_sparse_csr values"
    ),
    "quantised": (
        "dequantize int_repr q_per_channel_axis q_per_channel_scales q_per_channel_zero_points q_scale "
        "q_zero_point qscheme"
    ),
    "FFT": "istft stft",
    "nested": "to_padded_tensor",
}

# by design not here, and why
NOT: dict[str, str] = {
    "Python code cannot run element by element inside a kernel": "apply_ map_ map2_",
    (
        "a tensor is a lazy value without storage of its own layout: there are no strides or storages to share, "
        "resize or set"
    ): (
        "is_set_to new_empty_strided resize resize_ resize_as resize_as_ set_ storage storage_type "
        "untyped_storage const_data_ptr dim_order layout slice_inverse"
    ),
    (
        "the storage of an operator's result is decided by the scheduler; memory is shared by `shard`, "
        "DLPack and shared-memory arenas"
    ): "is_shared share_memory_ is_pinned pin_memory record_stream",
    "gradients are a rewrite of the graph, there are no autograd nodes": (
        "grad_fn output_nr grad_dtype reinforce volatile"
    ),
    "devices are named by strings: `.to('CUDA:0')`": (
        "cuda ipu xpu mtia is_ipu is_maia is_mkldnn is_mps is_mtia is_vulkan is_xla is_xpu to_mkldnn"
    ),
    "deprecated in PyTorch itself, or an internal of its dispatcher": (
        "as_subclass eig is_distributed lstsq module_load name symeig hash_tensor Container new index "
        "LinearCrossEntropyOptions conv_tbc native_channel_shuffle"
    ),
    "experimental in PyTorch, for the tensor cores of some GPUs": "grouped_mm scaled_grouped_mm scaled_mm",
    "replaced by sharding: `x.shard(devices, axis=0)` and `launcher --nodes`": "DataParallel",
}


def torch_names() -> dict[str, list[str]]:
    """Section -> names, from torch_names.txt."""
    out: dict[str, list[str]] = {}
    with open(os.path.join(HERE, "torch_names.txt")) as f:
        for line in f.read().splitlines():
            if line.startswith("["):
                section = out.setdefault(line.strip("[]"), [])
            elif line and not line.startswith("#"):
                section.append(line)
    return out


def reasons() -> dict[str, str]:
    return {name: f"set aside: {kind}" for kind, names in SET_ASIDE.items() for name in names.split()} | {
        name: f"by design not: {why}" for why, names in NOT.items() for name in names.split()
    }


def has(section: str, name: str) -> bool:
    return hasattr(OWNERS[section], name) or (section == "Tensor" and name in ATTRIBUTES)


ATTRIBUTES = ("grad",)  # set by the constructor


def home(section: str, name: str) -> str:
    """The file that defines it."""
    found: Any = inspect.getattr_static(OWNERS[section], name, None)
    found = found.fget if isinstance(found, property) else found.__func__ if isinstance(found, staticmethod) else found
    try:
        path = inspect.getsourcefile(inspect.unwrap(found)) or ""
    except TypeError:
        path = inspect.getsourcefile(OWNERS[section]) or ""
    return os.path.relpath(os.path.realpath(path), PACKAGE).replace(os.sep, "/")


def counts() -> dict[str, tuple[int, int, int]]:
    """Section -> (have, by design not, set aside)."""
    why = reasons()
    out = {}
    for section, names in torch_names().items():
        have = sum(has(section, n) for n in names)
        aside = sum(not has(section, n) and why.get(n, "").startswith("set aside") for n in names)
        out[section] = (have, len(names) - have - aside, aside)
    return out


def markdown() -> str:
    why = reasons()
    lines = [
        "# Operators",
        "",
        "Every operator of PyTorch's `torch.Tensor`, `torch.nn.functional` and `torch.nn`, and the file that has it "
        "here. Written by `python docs/generate.py`; a test compares. What is marked *set aside* belongs to complex, "
        "sparse, quantised, FFT, named or nested tensors.",
        "",
        "No operator falls back to NumPy on the host. Those whose result's shape depends on data (`nonzero`, "
        "`masked_select`, `unique`, `x[mask]`, `bincount`, `repeat_interleave` of a tensor, ...) read one number, the "
        "count, back to the host, unless `size=` (or what PyTorch calls it) is given.",
        "",
        "| | have | by design not | set aside | have, of what is not set aside |",
        "|---|---|---|---|---|",
    ]
    for section, (have, missing, aside) in counts().items():
        lines.append(f"| torch.{section} | {have} | {missing} | {aside} | {100 * have / (have + missing):.1f}% |")
    for section, names in torch_names().items():
        lines += ["", f"## torch.{section}", "", "| name | here |", "|---|---|"]
        lines += [f"| `{n}` | {f'`{home(section, n)}`' if has(section, n) else why.get(n, 'missing')} |" for n in names]
    return "\n".join(lines) + "\n"
