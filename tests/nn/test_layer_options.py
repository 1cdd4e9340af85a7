"""What layers can do besides a call: errors of constructors, PyTorch's older arguments, other methods,
rows that are not trained."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from manygrad import Context, Tensor, nn
from tests.nn.layers.layer import data
from tests.tensor.cases.loss import log_softmax


@pytest.mark.parametrize("make, said", [
    (lambda: nn.Conv3d(3, 4, 2, groups=2), "Conv3d: in_channels 3 and out_channels 4 must be multiples of groups 2"),
    (lambda: nn.Conv1d(2, 4, 2, padding_mode="mirror"), "padding_mode is one of"),
    (lambda: nn.Conv1d(2, 4, 2, 2, "same"), 'padding="same" needs stride 1'),
    (lambda: nn.Conv2d(2, 4, (2, 2, 2)), "is not a number or 2 numbers"),
    (lambda: nn.ConvTranspose1d(2, 4, 2, padding_mode="reflect"), 'ConvTranspose1d: padding_mode "zeros" only'),
    (lambda: nn.ConvTranspose3d(1, 1, 2, 2)(Tensor.zeros(1, 1, 2, 2, 2), [6, 4, 4]),
     "ConvTranspose3d: output_size .* cannot be made"),
    (lambda: nn.ZeroPad2d((1, 2, 3)), "ZeroPad2d: padding is a number or 4 numbers"),
    (lambda: nn.Hardtanh(1.0, 1.0), "max_val 1.0 must be above min_val 1.0"),
    (lambda: nn.EmbeddingBag(4, 2, padding_idx=4), "padding_idx 4 is no row"),
    (lambda: nn.FractionalMaxPool2d(2), "FractionalMaxPool2d: give output_size or output_ratio, not neither"),
    (lambda: nn.FractionalMaxPool3d(2, 3, 0.5), "FractionalMaxPool3d: give output_size or output_ratio, not both"),
    (lambda: nn.FractionalMaxPool2d(2, output_ratio=(0.5, 1.5)), "output_ratio must lie between 0 and 1"),
    (lambda: nn.GroupNorm(0, 8), "num_channels 8 must be a multiple of num_groups 0, 1 or more"),
    (lambda: nn.GroupNorm(-2, 8), "must be a multiple of num_groups -2"),
    (lambda: nn.Bilinear(0, 3, 4), "in1_features must be positive, got 0"),
    (lambda: nn.BatchNorm1d(4, eps=0)(Tensor.ones(3, 4)), "batch_norm in training needs a positive eps, got 0"),
    (lambda: nn.RReLU(0.5, 0.1)(Tensor.ones(3)), "lower must not be above upper, got 0.5 and 0.1"),
    (lambda: nn.CELU(0)(Tensor.ones(3)), "celu: alpha must not be 0"),
    (lambda: nn.AdaptiveLogSoftmaxWithLoss(4, 5, [3, 2]), "cutoffs are distinct, rising numbers"),
    (lambda: nn.AdaptiveLogSoftmaxWithLoss(4, 5, [2])(Tensor.zeros(3, 4), Tensor([1, 2])), "and target"),
])  # fmt: skip
def test_errors(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_an_argument_that_a_layer_does_not_have_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"MaxPool1d\(kernel_size, stride=None.*missing a required argument: 'kernel_size'"
    ):
        nn.MaxPool1d()
    with pytest.raises(TypeError, match="GELU"):
        nn.GELU(inplace=True)


def test_older_arguments_of_losses_say_the_reduction() -> None:
    assert [nn.L1Loss(*a).reduction for a in ((), (False,), (True,), (None, False), (False, False), (False, True))] == [
        "mean",
        "sum",
        "mean",
        "none",
        "none",
        "sum",
    ]  # type: ignore[attr-defined]
    assert nn.NLLLoss2d is nn.NLLLoss


def test_adaptive_softmax_gives_all_classes_and_the_likeliest() -> None:
    x = data(3, 4)
    with Context(DEVICE="PYTHON"):
        layer = nn.AdaptiveLogSoftmaxWithLoss(4, 6, [2, 4], 2.0).double()
        assert "head.bias" not in layer.state_dict() and layer.cutoffs == [2, 4, 6]
        logp = layer.log_prob(Tensor(x)).numpy()
        np.testing.assert_allclose(np.exp(logp).sum(1), 1, rtol=1e-12)
        head = log_softmax(x @ layer.head.weight.numpy().T)
        np.testing.assert_allclose(logp[:, :2], head[:, :2], rtol=1e-10)
        np.testing.assert_allclose(np.exp(logp[:, 4:]).sum(1), np.exp(head[:, 3]), rtol=1e-10)
        assert layer.predict(Tensor(x)).tolist() == logp.argmax(1).tolist()
        np.testing.assert_allclose(layer(Tensor(x[0]), Tensor(5)).loss.numpy(), -logp[0, 5], rtol=1e-10)


def test_the_padding_row_of_a_bag_is_zero_and_not_trained() -> None:
    with Context(DEVICE="PYTHON"):
        layer = nn.EmbeddingBag(4, 2, mode="sum", padding_idx=-1)
        assert layer.padding_idx == 3 and layer.weight.numpy()[3].tolist() == [0, 0]
        layer(Tensor([[0, 3, 0], [1, 3, 3]])).sum().backward()
        assert layer.weight.grad is not None and layer.weight.grad.tolist() == [[2, 2], [1, 1], [0, 0], [0, 0]]
        same = nn.Embedding.from_pretrained(layer.weight.detach())
        assert not same.weight.requires_grad and same.num_embeddings == 4


def test_what_cells_have_in_common() -> None:
    cell = nn.RNNCellBase(2, 3, True, 4)
    assert {k: t.shape for k, t in cell.state_dict().items()} == {
        "weight_ih": (12, 2),
        "weight_hh": (12, 3),
        "bias_ih": (12,),
        "bias_hh": (12,),
    }
    assert (
        all(issubclass(c, nn.RNNCellBase) for c in (nn.RNNCell, nn.LSTMCell, nn.GRUCell))
        and repr(cell) == "RNNCellBase(2, 3)"
    )
    assert np.abs(cell.weight_ih.numpy()).max() <= 1 / np.sqrt(3)
    assert (
        list(nn.GRUCell(2, 3, bias=False).state_dict()) == ["weight_ih", "weight_hh"]
        and repr(nn.RNNCell(2, 3, nonlinearity="relu")) == "RNNCell(2, 3, nonlinearity=relu)"
    )


def test_layers_read_as_pytorch_s() -> None:
    assert repr(nn.Conv2d(2, 4, 3, 2, 1, groups=2, bias=False, padding_mode="reflect")) == (
        "Conv2d(2, 4, kernel_size=(3, 3), stride=(2, 2), padding=(1, 1), groups=2, bias=False, padding_mode=reflect)"
    )
    assert (
        repr(nn.ConvTranspose1d(1, 1, 3, 2, output_padding=1))
        == "ConvTranspose1d(1, 1, kernel_size=(3,), stride=(2,), output_padding=(1,))"
    )
    assert (
        repr(nn.ConstantPad1d(1, 2.5)) == "ConstantPad1d(padding=(1, 1), value=2.5)"
        and repr(nn.ReflectionPad2d(1)) == "ReflectionPad2d((1, 1, 1, 1))"
    )
    assert (
        repr(nn.PReLU(3)) == "PReLU(num_parameters=3)"
        and repr(nn.Bilinear(1, 2, 3)) == "Bilinear(in1_features=1, in2_features=2, out_features=3, bias=True)"
    )
    assert (
        repr(nn.MaxPool2d(2)) == "MaxPool2d(kernel_size=2, stride=2, padding=0, dilation=1, ceil_mode=False)"
        and repr(nn.Unflatten(1, (2, 3))) == "Unflatten(dim=1, unflattened_size=(2, 3))"
    )
    assert (
        repr(nn.GroupNorm(2, 4)) == "GroupNorm(2, 4, eps=1e-05, affine=True, bias=True)"
        and repr(nn.RMSNorm(4)) == "RMSNorm((4,), eps=None, elementwise_affine=True)"
    )
