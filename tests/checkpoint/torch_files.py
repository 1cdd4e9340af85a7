"""Writes `torch/dcp/`, a checkpoint of two processes of torch.distributed, and `torch/state.pt`, what torch.save makes
of the same; `test_convert.py` reads them.

    python -m tests.checkpoint.torch_files        (where torch is installed; the files were made by 2.13)
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

FOLDER = Path(__file__).parent / "torch"


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


if __name__ == "__main__":
    main()
