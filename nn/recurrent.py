"""RNN, LSTM and GRU over sequences, and their cells. Parameter names, gate order and formulas are PyTorch's.

The products with the inputs of all steps are one matrix product;
the steps then go one by one, in a graph of their own length.
"""

from __future__ import annotations

import math
from typing import Any

from manygrad.nn import functional as F
from manygrad.nn.linear import uniform
from manygrad.nn.module import Module
from manygrad.tensor.deferred.install import deferrable
from manygrad.tensor.tensor import Tensor
from manygrad.tensor.time_loop import scan

GATES = {"RNN_TANH": 1, "RNN_RELU": 1, "LSTM": 4, "GRU": 3}
State = tuple[Tensor, ...]


def step(
    mode: str, gates: Tensor, state: State, w_hh: Tensor, b_hh: Tensor | None, w_hr: Tensor | None = None
) -> State:
    """One step: gates (B, G·H) from the input, state (h (B, P),) or (h, c (B, H)) -> the new state."""
    h = state[0]
    own = F.linear(h, w_hh, b_hh)
    if mode == "LSTM":
        i, f, g, o = (gates + own).chunk(4, -1)
        c = (f.sigmoid() * state[1] + i.sigmoid() * g.tanh()).contiguous()
        out = o.sigmoid() * c.tanh()
        return (out if w_hr is None else F.linear(out, w_hr)).contiguous(), c
    if mode == "GRU":
        (r, z, n), (rh, zh, nh) = gates.chunk(3, -1), own.chunk(3, -1)
        n = (n + (r + rh).sigmoid() * nh).tanh()
        z = (z + zh).sigmoid()
        return ((h - n) * z + n).contiguous(),  # fmt: skip
    out = gates + own
    return (out.tanh() if mode == "RNN_TANH" else out.relu()).contiguous(),  # fmt: skip


@deferrable
def run(
    mode: str, reverse: bool, gates: Tensor, state: State, w_hh: Tensor, b_hh: Tensor | None, w_hr: Tensor | None
) -> State:
    """All steps over gates (T, B, G·H) from the input -> (the outputs (T, B, P), *the last state)."""

    def one(state: State, gates: Tensor) -> tuple[State, Tensor]:
        now = step(mode, gates, state, w_hh, b_hh, w_hr)
        return now, now[0]

    last, outs = scan(one, state, gates, reverse=reverse)
    return (outs, *last)


class RNNBase(Module):
    """`num_layers` layers over (T, B, input_size), or (B, T, ...) with batch_first, or without the batch dim."""

    def __init__(self, mode: str, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True,
                 batch_first: bool = False, dropout: float = 0.0, bidirectional: bool = False, proj_size: int = 0,
                 device: Any = None, dtype: Any = None):  # fmt: skip
        if mode not in GATES:
            raise ValueError(f"RNNBase: mode is one of {list(GATES)}, not {mode!r}")
        for name, flag in (("bias", bias), ("batch_first", batch_first), ("bidirectional", bidirectional)):
            if not isinstance(flag, bool):  # (a number in their place is another argument, given by position)
                raise TypeError(f"{mode}: {name} is True or False, not {flag!r}")
        for name, size in (("input_size", input_size), ("hidden_size", hidden_size), ("num_layers", num_layers)):
            if size <= 0:
                raise ValueError(f"{mode}: {name} must be positive, got {size}")
        if not 0 <= dropout <= 1:
            raise ValueError(f"{mode}: the dropout probability must lie in [0, 1], got {dropout}")
        if proj_size and (mode != "LSTM" or not 0 < proj_size < hidden_size):
            raise ValueError(f"{mode}: proj_size is for LSTM and below hidden_size {hidden_size}, got {proj_size}")
        self.mode, self.input_size, self.hidden_size, self.num_layers, self.bias, self.batch_first = (
            mode,
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
        )
        self.dropout, self.bidirectional, self.proj_size = float(dropout), bidirectional, proj_size
        bound, rows, out = 1 / math.sqrt(hidden_size), GATES[mode] * hidden_size, proj_size or hidden_size
        for layer in range(num_layers):
            size = input_size if layer == 0 else out * (1 + bidirectional)
            for end in self._ends(layer):
                setattr(self, f"weight_ih{end}", uniform((rows, size), bound, device, dtype))
                setattr(self, f"weight_hh{end}", uniform((rows, out), bound, device, dtype))
                if bias:
                    setattr(self, f"bias_ih{end}", uniform((rows,), bound, device, dtype))
                    setattr(self, f"bias_hh{end}", uniform((rows,), bound, device, dtype))
                if proj_size:
                    setattr(self, f"weight_hr{end}", uniform((proj_size, hidden_size), bound, device, dtype))

    def _ends(self, layer: int) -> list[str]:
        return [f"_l{layer}", f"_l{layer}_reverse"][: 1 + self.bidirectional]

    def flatten_parameters(self) -> None:
        """Nothing to do here."""

    @property
    def all_weights(self) -> list[list[Tensor]]:
        return [[getattr(self, f"{k}{end}")
                 for k in ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr") if hasattr(self, f"{k}{end}")]
                for layer in range(self.num_layers) for end in self._ends(layer)]  # fmt: skip

    def forward(self, input: Tensor, hx: Any = None) -> tuple[Tensor, Any]:
        """-> output (T, B, D·P) of the last layer, and the last states (layers·D, B, P): h, or (h, c) of an LSTM."""
        batched = input.ndim == 3
        if input.ndim in (2, 3) and input.shape[1 if batched and self.batch_first else 0] == 0:
            raise ValueError(f"{type(self).__name__}: the sequence is empty, {input.shape}")
        if input.ndim not in (2, 3) or input.shape[-1] != self.input_size:
            raise ValueError(
                f"{type(self).__name__}: the input needs 2 or 3 dims, the last of {self.input_size}, "
                f"not shape {input.shape}"
            )
        x = input.unsqueeze(1) if not batched else input.transpose(0, 1) if self.batch_first else input
        states = self._states(x, hx, batched)
        last: list[State] = []
        for layer in range(self.num_layers):
            outs = []
            for d, end in enumerate(self._ends(layer)):
                out, state = self._run(x, states[layer * (1 + self.bidirectional) + d], end, reverse=d == 1)
                outs.append(out)
                last.append(state)
            x = outs[0].cat(outs[1], dim=-1) if self.bidirectional else outs[0]
            if self.dropout and self._is_training and layer < self.num_layers - 1:
                x = F.dropout(x, self.dropout, True)
        ends = [s[0].stack(*s[1:]) if len(s) > 1 else s[0].unsqueeze(0) for s in zip(*last)]
        if not batched:
            x, ends = x.squeeze(1), [e.squeeze(1) for e in ends]
        elif self.batch_first:
            x = x.transpose(0, 1)
        return x, tuple(ends) if self.mode == "LSTM" else ends[0]

    def _states(self, x: Tensor, hx: Any, batched: bool) -> list[State]:
        """The first state of each layer and direction."""
        n, batch = self.num_layers * (1 + self.bidirectional), x.shape[1]
        sizes = [self.proj_size or self.hidden_size, self.hidden_size][: 1 + (self.mode == "LSTM")]
        if hx is None:
            return [tuple(_zeros(x, size) for size in sizes)] * n
        given = tuple(hx) if self.mode == "LSTM" else (hx,)
        for t, size in zip(given, sizes):
            want = (n, batch, size) if batched else (n, size)
            if t.shape != want:
                raise ValueError(f"{type(self).__name__}: a first state has shape {t.shape}, this input needs {want}")
        given = given if batched else tuple(t.unsqueeze(1) for t in given)
        return [tuple(t[i] for t in given) for i in range(n)]

    def _run(self, x: Tensor, state: State, end: str, reverse: bool) -> tuple[Tensor, State]:
        """One layer in one direction over (T, B, I)."""

        def w(k: str) -> Any:
            return getattr(self, f"{k}{end}", None)

        gates = F.linear(x, w("weight_ih"), w("bias_ih")).contiguous()
        out, *last = run(self.mode, reverse, gates, state, w("weight_hh"), w("bias_hh"), w("weight_hr"))
        return out, tuple(last)

    def extra_repr(self) -> str:
        said = f"{self.input_size}, {self.hidden_size}"
        said += f", proj_size={self.proj_size}" if self.proj_size else ""
        said += f", num_layers={self.num_layers}" if self.num_layers != 1 else ""
        said += "" if self.bias else ", bias=False"
        said += ", batch_first=True" if self.batch_first else ""
        said += f", dropout={self.dropout}" if self.dropout else ""
        return said + (", bidirectional=True" if self.bidirectional else "")


@deferrable
def _zeros(x: Tensor, size: int) -> Tensor:
    """A state (B, size) of zeros, sharded as the batch of x (T, B, I) is."""
    return x[0, :, :1].detach().zeros_like()._broadcast((x.shape[1], size))


class RNN(RNNBase):
    """h' = tanh(W_ih x + b_ih + W_hh h + b_hh), or relu of it."""

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1, nonlinearity: str = "tanh",
                 bias: bool = True, batch_first: bool = False, dropout: float = 0.0, bidirectional: bool = False,
                 device: Any = None, dtype: Any = None):  # fmt: skip
        if nonlinearity not in ("tanh", "relu"):
            raise ValueError(f'RNN: nonlinearity is "tanh" or "relu", not {nonlinearity!r}')
        self.nonlinearity = nonlinearity
        super().__init__(f"RNN_{nonlinearity.upper()}", input_size, hidden_size, num_layers, bias, batch_first,
                         dropout, bidirectional, 0, device, dtype)  # fmt: skip


class LSTM(RNNBase):
    """i, f, o = sigmoid(...), g = tanh(...); c' = f c + i g; h' = o tanh(c') (W_hr h' with proj_size)."""

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True,
                 batch_first: bool = False, dropout: float = 0.0, bidirectional: bool = False, proj_size: int = 0,
                 device: Any = None, dtype: Any = None):  # fmt: skip
        super().__init__("LSTM", input_size, hidden_size, num_layers, bias, batch_first,
                         dropout, bidirectional, proj_size, device, dtype)  # fmt: skip


class GRU(RNNBase):
    """r, z = sigmoid(...); n = tanh(W_in x + b_in + r (W_hn h + b_hn)); h' = (1 − z) n + z h."""

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True,
                 batch_first: bool = False, dropout: float = 0.0, bidirectional: bool = False, device: Any = None,
                 dtype: Any = None):  # fmt: skip
        super().__init__(
            "GRU", input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, 0, device, dtype
        )


class RNNCellBase(Module):
    """One step over (B, input_size), or (input_size,)."""

    mode = ""

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool, num_chunks: int, device: Any = None, dtype: Any = None
    ):
        self.input_size, self.hidden_size, self.bias = input_size, hidden_size, bias
        bound, rows = 1 / math.sqrt(hidden_size), num_chunks * hidden_size
        self.weight_ih, self.weight_hh = (
            uniform((rows, input_size), bound, device, dtype),
            uniform((rows, hidden_size), bound, device, dtype),
        )
        self.bias_ih, self.bias_hh = (uniform((rows,), bound, device, dtype) if bias else None for _ in range(2))

    def _step(self, input: Tensor, hx: Any, states: int) -> State:
        if input.ndim not in (1, 2) or input.shape[-1] != self.input_size:
            raise ValueError(
                f"{type(self).__name__}: the input needs 1 or 2 dims, the last of {self.input_size}, "
                f"not shape {input.shape}"
            )
        alone = input.ndim == 1
        x = input.unsqueeze(0) if alone else input
        state = (
            (_zeros(x.unsqueeze(0), self.hidden_size),) * states if hx is None else tuple(hx) if states == 2 else (hx,)
        )
        want = (self.hidden_size,) if alone else (x.shape[0], self.hidden_size)
        for s in state if hx is not None else ():
            if s.shape != want:
                raise ValueError(f"{type(self).__name__}: a state has shape {s.shape}, this input needs {want}")
        state = tuple(s.unsqueeze(0) for s in state) if alone and hx is not None else state
        new = step(self.mode, F.linear(x, self.weight_ih, self.bias_ih), state, self.weight_hh, self.bias_hh)
        return tuple(s.squeeze(0) for s in new) if alone else new

    def extra_repr(self) -> str:
        relu = ", nonlinearity=relu" if self.mode == "RNN_RELU" else ""
        return f"{self.input_size}, {self.hidden_size}" + ("" if self.bias else ", bias=False") + relu


class RNNCell(RNNCellBase):
    """One step of an RNN."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: str = "tanh",
        device: Any = None,
        dtype: Any = None,
    ):
        if nonlinearity not in ("tanh", "relu"):
            raise ValueError(f'RNNCell: nonlinearity is "tanh" or "relu", not {nonlinearity!r}')
        self.nonlinearity, self.mode = nonlinearity, f"RNN_{nonlinearity.upper()}"
        super().__init__(input_size, hidden_size, bias, 1, device, dtype)

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        return self._step(input, hx, 1)[0]


class LSTMCell(RNNCellBase):
    """One step of an LSTM: (h, c) -> (h', c')."""

    mode = "LSTM"

    def __init__(self, input_size: int, hidden_size: int, bias: bool = True, device: Any = None, dtype: Any = None):
        super().__init__(input_size, hidden_size, bias, 4, device, dtype)

    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, ...]:
        return self._step(input, hx, 2)


class GRUCell(RNNCellBase):
    """One step of a GRU."""

    mode = "GRU"

    def __init__(self, input_size: int, hidden_size: int, bias: bool = True, device: Any = None, dtype: Any = None):
        super().__init__(input_size, hidden_size, bias, 3, device, dtype)

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        return self._step(input, hx, 1)[0]
