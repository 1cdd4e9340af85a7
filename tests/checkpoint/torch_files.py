"""Writes `made_by_torch/dcp/`, a checkpoint of two processes of torch.distributed, and `state.pt`, what torch.save
makes of the same; `test_convert.py` reads them.

    python -m tests.checkpoint.torch_files            (where torch is installed; the files were made by 2.13)
    python -m tests.checkpoint.torch_files --check    has torch read what we make of them
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "made_by_torch"


def write(rank: int) -> None:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29577", RANK=str(rank), WORLD_SIZE="2")
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(35.0).reshape(7, 5)
    linear = torch.nn.Linear(5, 1)
    torch.nn.init.constant_(linear.weight, 0.5)
    optimizer = torch.optim.AdamW([linear.weight], lr=0.25)
    linear(whole).sum().backward()
    optimizer.step()
    state = {
        "model": {
            "rows": distribute_tensor(whole, mesh, [Shard(0)]),
            "columns": distribute_tensor(whole.T.contiguous(), mesh, [Shard(1)]),
            "copies": distribute_tensor(whole, mesh, [Replicate()]),
            "half": torch.ones(3, dtype=torch.bfloat16),
        },
        "optimizer": optimizer.state_dict(),
        "step": 3,
        "names": ["a", torch.tensor(2.5), None],
        "empty": torch.empty(0, 3),
    }
    dcp.save(state, checkpoint_id="dcp")
    if rank == 0:
        state["model"].update(rows=whole, columns=whole.T, copies=whole)
        torch.save(state, "state.pt")
    torch.distributed.destroy_process_group()


def main() -> None:
    import torch.multiprocessing

    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    os.chdir(FOLDER)
    torch.multiprocessing.spawn(write, nprocs=2)


def check() -> None:
    """Torch's files into ours, and back: torch reads the same tensors and values."""
    import tempfile

    import torch
    from safetensors.torch import load_file

    from manygrad.checkpoint import convert

    want = torch.load(FOLDER / "state.pt")
    with tempfile.TemporaryDirectory() as folder:
        convert(FOLDER / "dcp", f"{folder}/ours")
        back = torch.load(convert(f"{folder}/ours", f"{folder}/state.pt"))
        shards = convert(f"{folder}/ours", f"{folder}/shards", key="model", shard_nbytes=200)
        files = sorted(Path(shards).glob("*.safetensors"))
        pieces = {name: t for file in files for name, t in load_file(file).items()}
    assert (back["step"], back["names"][::2], back["empty"].shape) == (3, ["a", None], want["empty"].shape)
    for name, t in want["model"].items():
        assert torch.equal(back["model"][name], t) and torch.equal(pieces[name], t) and pieces[name].dtype == t.dtype
    assert torch.equal(back["optimizer"]["state"]["0"]["exp_avg"], want["optimizer"]["state"][0]["exp_avg"])
    assert back["optimizer"]["param_groups"] == want["optimizer"]["param_groups"]
    print(f"torch {torch.__version__} reads the same from one file and from {len(files)} shards")


if __name__ == "__main__":
    check() if "--check" in sys.argv else main()
