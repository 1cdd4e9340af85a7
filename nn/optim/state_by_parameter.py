"""`optimizer.state`: what an optimiser keeps of each parameter, PyTorch's dict of dicts, over flat storage.

    optimizer.state[p]["exp_avg"].zero_()        the part of p, which may be written to
    optimizer.state[p]["exp_avg"] = t            the same
    del optimizer.state[p]                       p begins anew

An optimiser with a `step` of its own, as PyTorch's users write them, keeps there what it likes: `state[p]` is an empty
dict at first.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any, Protocol

from manygrad.nn.optim.flat import Flat
from manygrad.tensor.grad_mode import no_grad
from manygrad.tensor.tensor import Tensor


class KeepsStates(Protocol):
    """An optimiser, as far as its states are concerned."""

    flats: list[Flat]
    own_state: dict[Tensor, dict[str, Any]]

    @property
    def keeps_own_state(self) -> bool:
        """Whether `own_state` is where they are."""

    def checked(self, entry: dict[str, Any], p: Tensor) -> dict[str, Any]:
        """A whole state of a parameter, as `load_entries` takes it."""

    def load_entries(self, entries: dict[int, dict[str, Any]]) -> None:
        """These states, by the parameter's id, are those from now on; the others begin anew."""


class StateByParameter(MutableMapping[Tensor, dict[str, Any]]):
    """Parameter -> its states and its count of steps."""

    def __init__(self, optimizer: KeepsStates) -> None:
        self._optimizer = optimizer

    def __getitem__(self, p: Tensor) -> dict[str, Any]:
        for f in self._optimizer.flats:
            for i, x in enumerate(f.params):
                if x is p:
                    numbers = {k: t.reshape(()) for k, t in f.scalars.items()}
                    return StateOfParameter(self, p, numbers, {k: f.split(t)[i] for k, t in f.state.items()})
        if self._optimizer.keeps_own_state:
            return self._optimizer.own_state.setdefault(p, {})
        return StateOfParameter(self, p, {}, {})

    def __setitem__(self, p: Tensor, state: dict[str, Any]) -> None:
        if self._optimizer.keeps_own_state:
            self._optimizer.own_state[p] = state
        else:
            self._optimizer.load_entries({**self._entries(), id(p): self._optimizer.checked(state, p)})

    def __delitem__(self, p: Tensor) -> None:
        if p not in self:
            raise KeyError("the optimiser has no state of this parameter")
        if self._optimizer.own_state.pop(p, None) is None:
            self._optimizer.load_entries({k: e for k, e in self._entries().items() if k != id(p)})

    def __contains__(self, p: object) -> bool:
        return any(x is p for x in self)

    def __iter__(self) -> Iterator[Tensor]:
        yield from [p for f in self._optimizer.flats for p in f.params]
        yield from [*self._optimizer.own_state]

    def __len__(self) -> int:
        return sum(len(f.params) for f in self._optimizer.flats) + len(self._optimizer.own_state)

    def clear(self) -> None:
        self._optimizer.own_state.clear()
        self._optimizer.load_entries({})

    def set_number(self, p: Tensor, name: str, value: Any) -> None:
        """A number of `p`, which shares it with others so far."""
        entries = self._entries()
        entries[id(p)] = {**entries[id(p)], name: float(value)}
        self._optimizer.load_entries(entries)

    def _entries(self) -> dict[int, dict[str, Any]]:
        """By parameter's id: copies, as `load_state_dict` takes them."""
        return {
            id(p): {k: t.item() if k in state.numbers else t.detach().clone() for k, t in state.items()}
            for p in self
            if isinstance(state := self[p], StateOfParameter)
        }


class StateOfParameter(dict[str, Any]):
    """The states of one parameter, by name: what is set is written where the optimiser reads it."""

    def __init__(self, of: StateByParameter, p: Tensor, numbers: dict[str, Tensor], states: dict[str, Tensor]) -> None:
        super().__init__(numbers | states)
        self._of, self._p, self.numbers = of, p, frozenset(numbers)

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self:
            raise KeyError(
                f"the optimiser keeps {[*self] or 'nothing yet'} of this parameter, not {name!r}; give the whole state "
                "by load_state_dict, or keep what is yours elsewhere"
            )
        if name in self.numbers:
            self._of.set_number(self._p, name, value)
            super().__setitem__(name, self._of[self._p][name])
            return
        with no_grad():
            self[name].copy_(value if isinstance(value, Tensor) else Tensor(value))
