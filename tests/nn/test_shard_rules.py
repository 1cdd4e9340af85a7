"""`nn.shard_rules`: which tensors of a model are cut, where, and what is said of a rule that does not fit."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manygrad import Tensor, nn
from manygrad.nn.state import safe_load, safe_save
from manygrad.tensor.engine import engine

DEVICES = tuple(f"CPU:{i}" for i in range(4))


class Block(nn.Module):
    """Three heads of four features, then a layer with hidden features."""

    def __init__(self) -> None:
        self.heads, self.out = nn.Linear(6, 12), nn.Linear(12, 6, bias=False)
        self.up, self.down, self.norm = nn.Linear(6, 10), nn.Linear(10, 6), nn.LayerNorm(6)
        self.seen = nn.Buffer(Tensor.zeros(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.heads(x).reshape(*x.shape[:-1], 3, 4).softmax(-1)
        x = x + self.out(y.flatten(-2))
        return self.norm(x + self.down(self.up(x).relu()))


RULES: dict[str, Any] = {"*heads.*": (0, 3), "*.out.weight": (1, 3), "*.up.*": 0, "*.down.weight": -1, "*.seen": 0}
PARTS = {  # lengths of the cut dim
    "0.heads.weight": {2: [8, 4], 4: [4, 4, 4, 0]}, "0.heads.bias": {2: [8, 4], 4: [4, 4, 4, 0]},
    "0.out.weight": {2: [8, 4], 4: [4, 4, 4, 0]}, "1.up.weight": {2: [5, 5], 4: [3, 2, 3, 2]},
    "1.down.weight": {2: [5, 5], 4: [3, 2, 3, 2]}, "1.seen": {2: [2, 1], 4: [1, 1, 1, 0]},
}  # fmt: skip


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("computed", [False, True])
def test_a_model_that_is_cut_computes_and_learns_the_same(devices: int, computed: bool) -> None:
    x, results = Tensor(np.random.default_rng(0).standard_normal((2, 5, 6)).astype(np.float32)), []
    for names in ((), DEVICES[:devices]):
        Tensor.manual_seed(1)
        model = nn.ModuleList([Block(), Block()])
        if computed:
            Tensor.realize(*model.parameters(), *model.buffers())
        if names:
            assert nn.shard_rules(model, RULES, names) is model
            assert all(t.device == names for t in model.state_dict().values())
        optimizer = nn.optim.SGD(model.parameters(), lr=0.1)
        y = x.shard(names) if names else x
        for layer in model:
            y = layer(y)
        y.square().mean().backward()
        optimizer.step()
        results.append([y.numpy(), *(t.numpy() for t in model.state_dict().values())])
    for one, other in zip(*results):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("devices", [2, 4])
def test_dims_are_cut_between_parts(devices: int) -> None:
    model = nn.ModuleList([Block(), Block()])
    nn.shard_rules(model, RULES, DEVICES[:devices])
    state = model.state_dict()
    state["0.norm.weight"].realize(*state.values())
    for name, t in state.items():
        axis, bounds = engine().store_spec(t.uop)
        lengths = [b - a for a, b in pairwise(bounds)]
        if name in PARTS:
            assert lengths == PARTS[name][devices], name
        assert (axis is None) == (not any(part in name for part in ("heads", "out.w", "up", "down.w", "seen"))), name


@pytest.mark.parametrize("computed", [False, True])
def test_new_values_are_cut_between_the_same_parts(computed: bool) -> None:
    """Those of a file, of an initialisation, and what is made like a parameter, as an optimiser's state is."""
    new = np.arange(72, dtype=np.float32).reshape(18, 4)
    model = nn.shard_rules(nn.Linear(4, 18, bias=False), {"weight": (0, 3)}, DEVICES[:2])
    if computed:
        model.weight.realize()
    model.load_state_dict({"weight": Tensor(new)})
    made = [model.weight, model.weight.zeros_like(), model.weight.rand_like()]
    assert [engine().store_spec(t.uop) for t in made] == [(0, (0, 12, 18))] * 3
    np.testing.assert_array_equal(model.weight.numpy(), new)
    nn.init.constant_(model.weight, 3.0)
    assert engine().store_spec(model.weight.uop) == (0, (0, 12, 18))
    np.testing.assert_array_equal(model.weight.numpy(), np.full((18, 4), 3, np.float32))
    if not computed:
        model = nn.shard_rules(nn.Linear(4, 18, bias=False), {"weight": (0, 3)}, DEVICES[:2])
    even = Tensor(new).shard(DEVICES[:2], 0)
    model.load_state_dict({"weight": even})  # (rows that another device holds are sent to it)
    assert engine().store_spec(model.weight.uop) == (0, (0, 12, 18))
    np.testing.assert_array_equal(model.weight.numpy(), new)


def test_one_device_and_a_file_that_is_not_read_yet(tmp_path: Path) -> None:
    values = np.arange(48, dtype=np.float32).reshape(12, 4)
    safe_save({"weight": Tensor(values)}, tmp_path / "file.safetensors")
    holder = {"weight": safe_load(tmp_path / "file.safetensors")["weight"].to("CPU:0") * 2}
    nn.shard_rules(holder, {"weight": 0}, DEVICES[:3])
    np.testing.assert_array_equal(holder["weight"].numpy(), values * 2)
    one = nn.shard_rules({"weight": Tensor(values)}, {"weight": 0}, ("CPU:0",))
    assert one["weight"].device == ("CPU:0",)  # as that of data cut over one device


def test_the_first_pattern_that_fits_decides() -> None:
    holder = {"a": Tensor.zeros(4, 4), "b": Tensor.zeros(4, 4), "c": Tensor.zeros(4, 4)}
    nn.shard_rules(holder, {"a": 1, "[ab]": 0, "*": None}, DEVICES[:2])
    assert [engine().store_spec(t.uop)[0] for t in holder.values()] == [1, 0, None]


def test_rules_that_do_not_fit_change_nothing() -> None:
    tied = Tensor.zeros(4, 4)
    for rules, message in [
        ({"*.haeds.weight": 0}, r"no tensor of the model has a name like '\*.haeds.weight'; near it: \*.heads.weight"),
        ({"*.up.bias": 1}, r"0.up.bias of shape \(10,\) has no dim 1; its rule is 1"),
        ({"*.up.weight": (0, 3)}, r"dim 0 of 0.up.weight, 10 long, is not 3 parts of one size"),
    ]:
        model = nn.ModuleList([Block()])
        with pytest.raises(ValueError, match=f"shard_rules: {message}"):
            nn.shard_rules(model, rules, DEVICES[:2])
        assert all(t.device == "CPU:0" for t in model.state_dict().values())
    with pytest.raises(ValueError, match="a and b are one tensor, their rules say 0 and None"):
        nn.shard_rules({"a": tied, "b": tied}, {"a": 0}, DEVICES[:2])
