"""Sharding in twenty lines: run it with `--devices-per-node 4`, or with `--nodes 4`; it prints the same."""

from manygrad import Tensor, world

if len(world.devices) == 1:
    devices: tuple[str, ...] = ("CPU:0", "CPU:1", "CPU:2")  # one process may have several devices
else:
    devices = world.devices

x = Tensor.arange(10 * 4).reshape(10, 4).float()
cut = x.shard(devices, axis=0)  # rows over the devices; 10 rows need not divide evenly
weight = Tensor.ones(4, 2).shard(devices)  # a full copy on each

y = cut @ weight  # each device multiplies its own rows: still cut along axis 0
total = y.sum()  # a sum over the cut axis is an all-reduce
column_means = y.mean(0)

if world.rank == 0:
    print(f"{x.shape} over {len(devices)} devices")
values = total.item(), column_means.tolist(), y.numpy().shape
if world.rank == 0:
    print("total", values[0], "column means", values[1], "gathered", values[2])
