"""Checkpoints of other programs into ours, and back: `launcher convert SRC DST`.

    a file of torch.save (.pt, .pth, .bin)                 <->  a file of torch.save
    a folder of torch.distributed.checkpoint (.metadata)    ->
    safetensors, one file or several with an index         <->  the same
    a checkpoint of ours, or the newest in a folder        <->  the same

Nothing in a file is executed. What is read is as it was saved; a model's names are its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any, Literal

import numpy as np

from manygrad.checkpoint.api import load, save
from manygrad.checkpoint.index import NAME
from manygrad.checkpoint.reader import committed, is_checkpoint
from manygrad.checkpoint.store import is_remote, location
from manygrad.checkpoint.tree import flatten
from manygrad.errors import EXIT_USAGE, CheckpointError
from manygrad.nn.state import dcp_load, safe_load, safe_save, torch_load, torch_save
from manygrad.nn.state.dcp import is_dcp
from manygrad.nn.state.files import written_at_once
from manygrad.tensor.tensor import Tensor

Format = Literal["checkpoint", "safetensors", "torch"]
FORMATS = ("checkpoint", "safetensors", "torch")
TORCH = (".pt", ".pth", ".bin", ".ckpt")
INDEX = "model.safetensors.index.json"
SHARD_NBYTES = 5 << 30  # as Hugging Face's


def convert(src: str | os.PathLike[str], dst: str | os.PathLike[str], *, to: Format | None = None,
            key: str | None = None, below: str | None = None, step: int = 0,
            shard_nbytes: int = SHARD_NBYTES) -> str:  # fmt: skip
    """Reads `src`, whatever of these it is, writes it to `dst`, and returns the path of what was written.

    `to`: by default a file of torch.save where `dst` ends as one does, safetensors where it ends so or `src` is a
    checkpoint of ours, else a checkpoint of ours of step `step`. `key`: only this part of what was saved ("model",
    "state.model"). `below`: what is written stands under this name, as `Checkpointer("dir", {"model": model})` looks
    for it. safetensors have tensors alone, under their whole names, and files of at most `shard_nbytes` where one
    tensor is not larger. ValueError and CheckpointError say what cannot be read, or written so. Cost: the state in
    memory.
    """
    source, target = location(src), location(dst)
    if source == target:
        raise ValueError(f"{dst} is what is read; give another path")
    kind, state = read_any(source)
    to = to or ("checkpoint" if is_remote(target) else _format(target, kind))
    if is_remote(target) and to != "checkpoint":
        raise ValueError(f"{dst} is remote storage, to which checkpoints are written; {to} needs a local path")
    state = _part(state, key, source) if key else state
    state = {below: state} if below else state
    if to == "torch":
        os.makedirs(os.path.dirname(target), exist_ok=True)
        torch_save(_with_tensors(state), target)
        return target
    return save(target, state, step) if to == "checkpoint" else _save_safetensors(state, target, shard_nbytes)


def read_any(path: str) -> tuple[Format, Any]:
    """What kind of files stand at `path`, and the state in them."""
    if is_remote(path):
        return "checkpoint", load(path, None)
    if not os.path.exists(path):
        raise ValueError(f"{path} does not exist; give a file or a folder")
    if not os.path.isdir(path):
        if path.endswith((".safetensors", ".index.json")):
            return "safetensors", safe_load(path)
        return "torch", torch_load(path)
    if is_dcp(path):
        return "torch", dcp_load(path)
    if is_checkpoint(path) or committed(path):
        return "checkpoint", load(path, None)
    names = sorted(os.listdir(path))
    indices = [n for n in names if n.endswith(".safetensors.index.json")]
    files = [n for n in names if n.endswith(".safetensors")]
    if len(indices) == 1:
        return "safetensors", safe_load(os.path.join(path, indices[0]))
    if len(files) == 1:
        return "safetensors", safe_load(os.path.join(path, files[0]))
    found = f"has {len(files)} safetensors files and {len(indices)} indices of such" if files else "has none of them"
    raise ValueError(
        f"{path} is no checkpoint: it has no .metadata, no {NAME} and no step-*, and of safetensors it {found}; give "
        "the path of a file in it"
    )


def _format(target: str, source: Format) -> Format:
    if target.endswith(TORCH):
        return "torch"
    return "safetensors" if target.endswith(".safetensors") or source == "checkpoint" else "checkpoint"


def _part(state: Any, key: str, path: str) -> Any:
    """What stands at `key`, dict by dict."""
    at, rest = state, key
    while rest:
        if not isinstance(at, dict):
            raise ValueError(f"{path} has no {key}: what stands above {rest} is a {type(at).__name__}")
        name = next((n for n in (rest, rest.partition(".")[0]) if n in at), None)
        if name is None:
            raise ValueError(f"{path} has no {key}; there are {', '.join(map(str, list(at)[:20]))}")
        at, rest = at[name], rest[len(name) + 1 :]
    return at


def _with_tensors(x: Any) -> Any:
    """Arrays as Tensors, which a file of torch.save has."""
    if isinstance(x, dict):
        return {k: _with_tensors(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(_with_tensors(v) for v in x)
    return Tensor(x) if isinstance(x, np.ndarray) else x


def _save_safetensors(state: Any, target: str, shard_nbytes: int) -> str:
    """One file, or a folder with as many as are needed, and an index; the index comes last."""
    tensors = {n: t if isinstance(t, Tensor) else Tensor(t) for n, t in flatten(state)[1].items()}
    if not tensors:
        raise ValueError("there are no tensors to write")
    if target.endswith(".safetensors"):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        safe_save(tensors, target, {"format": "pt"})
        return target
    os.makedirs(target, exist_ok=True)
    if there := [n for n in os.listdir(target) if n.endswith((".safetensors", ".safetensors.index.json"))]:
        raise ValueError(f"{target} has {there[0]} already; give another folder, or remove what is in it")
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, t in tensors.items():
        if shards[-1] and filled + t.nbytes > shard_nbytes:
            shards.append({})
            filled = 0
        shards[-1][name] = t
        filled += t.nbytes
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    files = files if len(shards) > 1 else ["model.safetensors"]
    for file, shard in zip(files, shards):
        safe_save(shard, os.path.join(target, file), {"format": "pt"})
    if len(shards) > 1:
        total = sum(t.nbytes for t in tensors.values())
        where = {name: file for file, shard in zip(files, shards) for name in shard}
        with written_at_once(os.path.join(target, INDEX)) as f:
            f.write(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2).encode())
    return target


def main(words: list[str]) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser("launcher convert", description=(convert.__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "src", help="a .pt file, a folder of torch.distributed.checkpoint, safetensors, or a checkpoint"
    )
    parser.add_argument("dst", help="where to write: a .pt or .safetensors file, else a folder")
    parser.add_argument("--to", choices=FORMATS, help="what to write, where dst does not say it")
    parser.add_argument("--key", help="only this part of what was saved, as model or state.model")
    parser.add_argument("--below", help="write it under this name, as model")
    parser.add_argument("--step", type=int, default=0, help="the step of the checkpoint that is written (default 0)")
    parser.add_argument("--shard-mb", type=int, default=SHARD_NBYTES >> 20, help="size of a safetensors file, in MiB")
    try:
        given = parser.parse_args(words)
    except SystemExit as e:
        return EXIT_USAGE if e.code else 0
    try:
        print(convert(given.src, given.dst, to=given.to, key=given.key, below=given.below, step=given.step,
                      shard_nbytes=given.shard_mb << 20))  # fmt: skip
    except (ValueError, TypeError, OSError, CheckpointError) as e:
        print(f"launcher convert: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
