"""The protocol of `Module`: names, walking, modes, hooks, moving, loading, printing."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from manygrad import Tensor, dtypes, nn


class Block(nn.Module):
    def __init__(self, size: int = 4) -> None:
        self.norm = nn.BatchNorm1d(size)
        self.scale = nn.Parameter(Tensor.ones(size))
        self.heads = [nn.Linear(size, size, bias=False), nn.Linear(size, size)]
        self.mask = Tensor.ones(size)  # a value, not state
        self.cache = nn.Buffer(Tensor.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[1](self.heads[0](self.norm(x)) * self.scale)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.out = nn.Sequential(nn.ReLU(), nn.Linear(4, 2))
        self.tied = self.out[1]

    def forward(self, x: Tensor) -> Tensor:
        for b in self.blocks:
            x = b(x)
        return self.out(x)


BLOCK = [
    "scale",
    "norm.weight",
    "norm.bias",
    "norm.running_mean",
    "norm.running_var",
    "norm.num_batches_tracked",
    "heads.0.weight",
    "heads.1.weight",
    "heads.1.bias",
]
NET = [f"blocks.{i}.{n}" for i in range(2) for n in BLOCK] + ["out.1.weight", "out.1.bias", "tied.weight", "tied.bias"]


def test_names_in_the_order_of_pytorch() -> None:
    net = Net()
    assert list(net.state_dict()) == NET and next(iter(net.state_dict(prefix="m."))) == "m.blocks.0.scale"
    assert [n for n, _ in net.named_parameters()] == [
        n for n in NET if "running" not in n and "tracked" not in n and "tied" not in n
    ]
    assert len([n for n, _ in net.named_parameters(remove_duplicate=False)]) == 16
    assert [n for n, _ in net.blocks[0].named_parameters(recurse=False)] == ["scale"]
    assert [n for n, _ in Block().named_buffers()] == [
        "cache",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]
    assert [n for n, _ in net.named_children()] == ["blocks", "out", "tied"] and next(net.modules()) is net
    assert [n for n, _ in Block().named_modules()] == ["", "norm", "heads.0", "heads.1"]
    assert [type(m).__name__ for m in net.out.children()] == ["ReLU", "Linear"]
    assert len(nn.state.get_parameters(net)) == len(list(net.parameters())) == 14
    assert list(nn.state.get_state_dict({"a": [net.out]})) == ["a.0.1.weight", "a.0.1.bias"]


def test_finding_by_path() -> None:
    net = Net()
    assert net.get_submodule("blocks.1.norm") is net.blocks[1].norm and net.get_submodule("") is net
    assert (
        net.get_parameter("out.1.bias") is net.out[1].bias
        and net.get_buffer("blocks.0.norm.running_var") is net.blocks[0].norm.running_var
    )
    with pytest.raises(AttributeError, match=r"'blocks.0.nrm': Block has no 'nrm'; it has \['norm'"):
        net.get_submodule("blocks.0.nrm")
    with pytest.raises(AttributeError, match="is a Parameter, not a Module"):
        net.get_submodule("out.1.bias")


def test_an_object_that_contains_itself() -> None:
    net = Net()
    net.blocks[0].parent = net
    net.itself = [net]  # type: ignore[attr-defined]
    assert list(net.state_dict()) == NET and len(list(net.modules())) == len(list(Net().modules()))


def test_modes() -> None:
    net = Net()
    assert all(m.training for m in net.modules())
    assert net.eval() is net and not any(m.training for m in net.modules())
    drop = nn.Dropout(0.5)
    x = Tensor.ones(1000)
    assert 300 < drop(x).eq(0).sum().item() < 700 and drop.eval()(x) is x
    with Tensor.train():
        assert drop(x).eq(0).any().item()
    drop.train()
    with Tensor.train(False):
        assert drop(x) is x
    assert nn.functional.dropout(x, 0.5, training=False) is x and nn.functional.dropout(x, 1.0).sum().item() == 0


def test_parameters_are_tensors_and_results_are_not_parameters() -> None:
    p = nn.Parameter(Tensor([1.0, 2.0]))
    assert isinstance(p, Tensor) and type(p * 2) is Tensor and p.requires_grad
    twin, again = copy.deepcopy(p), pickle.loads(pickle.dumps(p))
    for q in (twin, again):
        assert isinstance(q, nn.Parameter) and q is not p and q.requires_grad and q.tolist() == [1.0, 2.0]
    b = copy.deepcopy(nn.Buffer(Tensor([1]), persistent=False))
    assert isinstance(b, nn.Buffer) and not b.persistent
    assert not nn.Parameter(Tensor([1]), requires_grad=False).requires_grad
    with pytest.raises(TypeError, match="only float tensors can require a gradient, this one is int64"):
        nn.Parameter(Tensor([1]))


def test_equal_parameters_have_their_own_gradients() -> None:
    a, b = nn.Parameter(Tensor.ones(2)), nn.Parameter(Tensor.ones(2))
    (a * 2 + b * 3).sum().backward()
    assert a.grad.tolist() == [2.0, 2.0] and b.grad.tolist() == [3.0, 3.0]  # type: ignore[union-attr]


def test_registering() -> None:
    m = nn.Module()
    m.register_parameter("w", nn.Parameter(Tensor.ones(2)))
    m.register_parameter("none", None)
    m.register_buffer("b", Tensor.zeros(1))
    m.register_buffer("t", Tensor.zeros(1), persistent=False)
    m.add_module("child", nn.Linear(1, 1))
    assert list(m.state_dict()) == ["w", "b", "child.weight", "child.bias"] and m.none is None  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="already has an attribute 'training'"):
        m.add_module("training", nn.Linear(1, 1))
    with pytest.raises(ValueError, match="without dots"):
        m.register_buffer("a.b", Tensor.zeros(1))
    with pytest.raises(TypeError, match="is a int, not a Module"):
        m.add_module("x", 3)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match=r"Module has no forward\(\)"):
        m(1)


@pytest.mark.parametrize("value", [Tensor.ones(2, 3), np.ones((2, 3)), 1.0], ids=["tensor", "array", "number"])
def test_no_plain_value_takes_a_parameters_place(value: Any) -> None:
    """It would be used, but not trained, saved or moved."""
    layer = nn.Linear(3, 2)
    before = layer.weight
    with pytest.raises(TypeError, match=r"cannot assign a \w+ as the parameter 'weight' of Linear; .* nn.Parameter"):
        layer.weight = value
    assert layer.weight is before
    layer.weight = nn.Parameter(Tensor.ones(2, 3))
    layer.bias = None
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    layer.weight = Tensor.ones(2, 3, requires_grad=True)
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    layer.weight.requires_grad_(False)
    layer.note = value  # what was no parameter is a value as before


def test_a_tensor_in_a_buffers_place_is_the_buffer() -> None:
    norm = nn.BatchNorm1d(2)
    norm.register_buffer("mask", Tensor.zeros(2), persistent=False)
    norm.running_mean = norm.running_mean * 0.5 + 1.0
    norm.mask = Tensor.ones(2)
    assert [name for name, _ in norm.named_buffers()] == ["running_mean", "running_var", "num_batches_tracked", "mask"]
    assert norm.state_dict()["running_mean"].tolist() == [1.0, 1.0] and "mask" not in norm.state_dict()
    with pytest.raises(TypeError, match="cannot assign a float as the buffer 'running_mean' of BatchNorm1d"):
        norm.running_mean = 0.5


def test_apply_requires_grad_zero_grad() -> None:
    net, seen = Net(), []
    net.apply(lambda m: seen.append(type(m).__name__))
    # the tied layer twice
    assert seen[-1] == "Net" and seen[0] == "BatchNorm1d" and len(seen) == len(list(net.modules())) + 1
    net(Tensor(np.ones((3, 4), np.float32))).sum().backward()
    assert all(p.grad is not None for p in net.parameters())
    net.zero_grad()
    assert all(p.grad is None for p in net.parameters())
    net.requires_grad_(False)
    assert (
        not any(p.requires_grad for p in net.parameters())
        and len(list(net.parameters())) == 14
        and nn.state.get_parameters(net) == []
    )


def test_hooks_see_and_change() -> None:
    m, log = nn.Linear(2, 2), []
    handles = [
        m.register_forward_pre_hook(lambda mod, args: log.append("pre") or (args[0] * 2,)),
        m.register_forward_hook(lambda mod, args, out: log.append("post") or out + 1),
    ]
    x = Tensor([[1.0, 2.0]])
    np.testing.assert_allclose(m(x).numpy(), m.forward(x * 2).numpy() + 1, rtol=1e-6)
    for h in handles:
        h.remove()
    np.testing.assert_allclose(m(x).numpy(), m.forward(x).numpy())
    assert log == ["pre", "post"] and list(m.state_dict()) == ["weight", "bias"]
    keyword: list[Any] = []
    with m.register_forward_pre_hook(
        lambda mod, args, kwargs: keyword.append(kwargs) or (args, kwargs), with_kwargs=True
    ):
        m(input=x)
    assert list(keyword[0]) == ["input"] and len(copy.deepcopy(m).state_dict()) == 2


def test_moving_and_casting() -> None:
    net = Net()
    before = {k: t.numpy() for k, t in net.state_dict().items()}
    assert net.to(dtypes.float64) is net and {t.dtype.name for t in net.state_dict().values()} == {"float64", "int64"}
    net.half().float().to(("CPU:0", "CPU:1"))
    assert all(t.device == ("CPU:0", "CPU:1") for t in net.state_dict().values())
    out = net(Tensor(np.ones((4, 4), np.float32)).shard(("CPU:0", "CPU:1"), 0))
    out.sum().backward()
    assert all(p.grad is not None and p.grad.numpy().shape == p.shape for p in net.parameters())
    net.to("CPU:1")
    for k, t in net.state_dict().items():
        if "running" not in k and "tracked" not in k:
            np.testing.assert_allclose(t.numpy(), before[k], rtol=1e-3, atol=1e-3)
    with pytest.raises(TypeError, match="parameters are floats, int64 is not"):
        net.to(dtypes.int64)


def test_loading() -> None:
    a, b = Net(), Net()
    assert a.load_state_dict(b.state_dict()) == ([], [])
    for k, t in b.state_dict().items():
        np.testing.assert_array_equal(t.numpy(), a.state_dict()[k].numpy())
    state = dict(b.state_dict())
    state["new"] = state.pop("out.1.bias")
    with pytest.raises(KeyError, match=r"missing \['out.1.bias'\], unexpected \['new'\]"):
        a.load_state_dict(state)
    result = a.load_state_dict(state, strict=False)
    assert result.missing_keys == ["out.1.bias"] and result.unexpected_keys == ["new"]


def test_repr() -> None:
    assert repr(nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Sequential(nn.ReLU(), nn.Dropout(0.1)))) == (
        "Sequential(\n  (0): Conv2d(1, 2, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))\n"
        "  (1): Sequential(\n    (0): ReLU()\n    (1): Dropout(p=0.1, inplace=False)\n  )\n)"
    )
    assert (
        repr(nn.ELU(0.5)) == "ELU(alpha=0.5)"
        and repr(nn.MaxPool2d(2)) == "MaxPool2d(kernel_size=2, stride=2, padding=0, dilation=1, ceil_mode=False)"
    )
    assert repr(nn.ZeroPad2d(1)) == "ZeroPad2d((1, 1, 1, 1))" and repr(nn.CrossEntropyLoss()) == "CrossEntropyLoss()"


def test_held_arguments() -> None:
    x = Tensor([-1.0, 2.0])
    assert nn.LeakyReLU(0.5)(x).tolist() == [-0.5, 2.0] and nn.LeakyReLU(negative_slope=0.5, inplace=True)(
        x
    ).tolist() == [-0.5, 2.0]
    assert x.tolist() == [-1.0, 2.0] and nn.Softmax(dim=0)(x).sum().item() == pytest.approx(1)
    with pytest.raises(TypeError, match=r"ELU\(alpha=1.0, inplace=False\)"):
        nn.ELU(slope=3)
    with pytest.raises(TypeError, match="missing a required argument"):
        nn.MaxPool2d()
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):
        nn.Dropout(1.5)
    assert nn.MSELoss(reduce=False).reduction == "none" and nn.MSELoss(size_average=False).reduction == "sum"  # type: ignore[attr-defined]
    weighted = nn.CrossEntropyLoss(weight=Tensor([1.0, 2.0]))
    assert list(weighted.state_dict()) == ["weight"] and list(weighted.parameters()) == []


def test_containers() -> None:
    a, b, c = nn.Linear(1, 1), nn.Linear(1, 2), nn.ReLU()
    seq = nn.Sequential({"first": a, "second": b})
    assert (
        list(seq.state_dict()) == ["first.weight", "first.bias", "second.weight", "second.bias"]
        and seq[1] is b
        and seq.first is a
    )  # type: ignore[attr-defined]
    seq.append(c)
    assert len(seq) == 3 and seq[-1] is c and isinstance(seq[:2], nn.Sequential) and len(seq[:2]) == 2
    items = nn.ModuleList([a, b])
    items.insert(0, c)
    del items[1]
    assert (
        list(items) == [c, b]
        and [n for n, _ in items.named_children()] == ["0", "1"]
        and items.pop() is b
        and len(items + [a]) == 2
    )
    for make in (lambda: nn.ModuleList([3]), lambda: items.append(Tensor.ones(2)), lambda: nn.ModuleDict({"a": "b"})):
        with pytest.raises(TypeError, match=r"Module\w+ holds modules, not a \w+; parameters go into a ParameterList"):
            make()
    with pytest.raises(IndexError, match="index 5 is outside a ModuleList of 1"):
        items[5]
    table = nn.ModuleDict({"x": a})
    table["y"] = b
    assert list(table) == ["x", "y"] and "x" in table and table.pop("x") is a and len(table) == 1
    with pytest.raises(KeyError, match=r"'z' is not among \['y'\]"):
        table["z"]
    params = nn.ParameterList([Tensor.ones(2)])
    params.append(Tensor.ones(1))
    named = nn.ParameterDict({"w": Tensor.ones(3)})
    assert (
        [n for n, _ in params.named_parameters()] == ["0", "1"]
        and isinstance(named["w"], nn.Parameter)
        and named.get("v", 5) == 5
    )


def test_lazy_layers_take_their_size_from_the_first_input() -> None:
    net = nn.Sequential(nn.LazyConv2d(3, 2), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(5))
    assert list(net.parameters()) == [] and repr(net[3]).startswith("LazyLinear(in_features=?, out_features=5")
    assert net(Tensor(np.ones((2, 4, 5, 6), np.float32))).shape == (2, 5)
    assert (
        type(net[0]) is nn.Conv2d
        and net[0].weight.shape == (3, 4, 2, 2)
        and net[1].num_features == 3
        and net[3].weight.shape == (5, 60)
    )
    assert len(list(net.parameters())) == 6


class FrozenNorm(nn.Module):
    """The usual way to keep a norm as it is in a model that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.bn, self.up = nn.BatchNorm1d(2), nn.Linear(2, 2)

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.bn.eval()
        return self


class Counted(nn.Module):
    """A module that has more state than its tensors."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layer, self.count = nn.Linear(1, 1), count

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


def test_a_module_below_sets_its_mode_itself() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(FrozenNorm(), nn.BatchNorm1d(2)))
    for mode in (True, False, True):
        assert net.train(mode) is net
        frozen, norm = net[1][0], net[1][1]
        assert (net.training, net[0].training, frozen.up.training, norm.training) == (mode,) * 4
        assert not frozen.bn.training
    net.parent = net  # (an object that contains itself)
    assert not net.eval().training


def test_extra_state() -> None:
    one, two = nn.Sequential(Counted(1), Counted(2)), nn.Sequential(Counted(8), Counted(9))
    state = one.state_dict()
    assert state["0._extra_state"] == {"count": 1} and Counted(3).state_dict()["_extra_state"] == {"count": 3}
    two.load_state_dict(state)
    assert [m.count for m in two] == [1, 2] and two[1].layer.weight.tolist() == one[1].layer.weight.tolist()
    del state["1._extra_state"]
    with pytest.raises(KeyError, match=r"missing \['1._extra_state'\]"):
        two.load_state_dict(state)
    assert two.load_state_dict(state, strict=False).missing_keys == ["1._extra_state"]
    with pytest.raises(KeyError, match="unexpected .*_extra_state"):
        nn.Linear(1, 1).load_state_dict({**nn.Linear(1, 1).state_dict(), "_extra_state": 1})


def test_a_plain_dict_of_parameters_is_in_the_order_of_its_keys() -> None:
    named = nn.ParameterDict({"b": Tensor.ones(1), "a": Tensor.ones(2)})
    named.update({"d": Tensor.ones(3), "c": Tensor.ones(4)})
    assert [p.shape[0] for p in named.parameters()] == [2, 1, 4, 3]
    ordered = nn.ParameterDict([("b", Tensor.ones(1)), ("a", Tensor.ones(2))])
    assert [k for k, _ in ordered.named_parameters()] == ["b", "a"]
