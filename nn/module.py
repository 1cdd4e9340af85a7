"""`Module`: PyTorch's protocol for layers and models.
It is optional: plain objects with Tensor attributes are models too.

Nothing is registered: parameters, buffers and submodules are the attributes themselves (also inside lists, tuples and
dicts), found by `walk.py` when they are asked for. So a subclass needs not call `super().__init__()`.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np

from manygrad.nn import walk
from manygrad.nn.parameter import Buffer, Parameter
from manygrad.tensor.changes import CHANGES
from manygrad.tensor.dtype import DType, dtypes, to_dtype
from manygrad.tensor.hooks import RemovableHandle
from manygrad.tensor.ops.differentiation import zero_grad
from manygrad.tensor.tensor import Tensor

M = TypeVar("M", bound="Module")


class LoadResult(NamedTuple):
    """Keys that `load_state_dict(strict=False)` could not match."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class Module:
    """Base class of layers: write `forward`, call the module.

    `training` is True until `eval()`; inside `with Tensor.train(mode):` that mode holds for every module.

    Large: PyTorch's methods.
    """

    training: bool = True
    _counted = "attributes"  # are what `tensor/changes.py` counts changes of
    _hooks: dict[str, dict[int, Any]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no forward(); write one")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hooks = self.__dict__.get("_hooks")
        if not hooks:
            return self.forward(*args, **kwargs)
        for hook, with_kwargs in list(hooks["pre"].values()):
            changed = hook(self, args, kwargs) if with_kwargs else hook(self, args)
            if changed is not None and with_kwargs:
                args, kwargs = changed
            elif changed is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
        out = self.forward(*args, **kwargs)
        for hook, with_kwargs in list(hooks["post"].values()):
            changed = hook(self, args, kwargs, out) if with_kwargs else hook(self, args, out)
            out = out if changed is None else changed
        return out

    @property
    def _is_training(self) -> bool:
        """The mode that counts: that of `with Tensor.train(mode):`, else the module's own."""
        return self.training if Tensor.training is None else Tensor.training

    # *** what is below ***

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        return self._named(lambda t: not isinstance(t, Buffer), prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        return self._named(lambda t: isinstance(t, Buffer), prefix, recurse, remove_duplicate)

    def _named(
        self, wanted: Callable[[Tensor], bool], prefix: str, recurse: bool, remove_duplicate: bool
    ) -> Iterator[tuple[str, Tensor]]:
        seen: set[int] = set()
        own = {id(v) for _, v in walk.entries(self)}
        for name, t in walk.tensors(self, f"{prefix}." if prefix else ""):
            if wanted(t) and not (remove_duplicate and id(t) in seen) and (recurse or id(t) in own):
                seen.add(id(t))
                yield name, t

    def parameters(self, recurse: bool = True) -> Iterator[Tensor]:
        return (t for _, t in self.named_parameters(recurse=recurse))

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        return (t for _, t in self.named_buffers(recurse=recurse))

    def named_modules(
        self, memo: set[int] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Module]]:
        """This module (named `prefix`), then all below it."""
        seen = set() if memo is None else memo
        for name, m in walk.modules(self, prefix):
            if not remove_duplicate or id(m) not in seen:
                seen.add(id(m))
                yield name, m

    def modules(self) -> Iterator[Module]:
        return (m for _, m in self.named_modules())

    def named_children(self) -> Iterator[tuple[str, Module]]:
        seen: set[int] = set()
        for name, m in walk.child_modules(self):
            if id(m) not in seen:
                seen.add(id(m))
                yield name, m

    def children(self) -> Iterator[Module]:
        return (m for _, m in self.named_children())

    def _at(self, path: str) -> Any:
        at: Any = self
        for part in path.split(".") if path else []:
            below = dict(walk.entries(at))
            if part not in below:
                raise AttributeError(
                    f"{path!r}: {type(at).__name__} has no {part!r}; "
                    f"it has {[k for k, v in below.items() if isinstance(v, (Module, Tensor))]}"
                )
            at = below[part]
        return at

    def get_submodule(self, target: str) -> Module:
        """The module at a path such as `layers.0.norm`."""
        found = self._at(target)
        if not isinstance(found, Module):
            raise AttributeError(f"{target!r} is a {type(found).__name__}, not a Module")
        return found

    def get_parameter(self, target: str) -> Tensor:
        found = self._at(target)
        if not walk.is_parameter(found):
            raise AttributeError(f"{target!r} is a {type(found).__name__}, not a parameter")
        return found

    def get_buffer(self, target: str) -> Buffer:
        found = self._at(target)
        if not isinstance(found, Buffer):
            raise AttributeError(f"{target!r} is a {type(found).__name__}, not a buffer")
        return found

    # *** adding to it ***

    def __setattr__(self, name: str, value: Any) -> None:
        """As in PyTorch: where a parameter is, no plain value is put, which would not be trained or saved; a tensor in
        place of a buffer is that buffer from now on."""
        old = self.__dict__.get(name)
        if isinstance(old, Tensor) and value is not old:
            if isinstance(value, Tensor) and isinstance(old, Buffer) and not isinstance(value, (Buffer, Parameter)):
                value = Buffer(value, old.persistent)
            kind = "buffer" if isinstance(old, Buffer) else "parameter" if walk.is_parameter(old) else ""
            fits = isinstance(value, (Buffer, Parameter)) or (kind == "parameter" and walk.is_parameter(value))
            if kind and not fits and isinstance(value, (Tensor, np.ndarray, numbers.Number)):
                raise TypeError(
                    f"cannot assign a {type(value).__name__} as the {kind} {name!r} of {type(self).__name__}; to keep "
                    f"the {kind}, write its values: `with no_grad(): module.{name}.copy_(...)`; to have another one: "
                    f"`module.{name} = nn.{kind.capitalize()}(...)`"
                )
        super().__setattr__(name, value)
        CHANGES.count += value is not old

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        CHANGES.count += 1

    def _check_name(self, kind: str, name: Any) -> None:
        if not isinstance(name, str) or not name or "." in name:
            raise ValueError(f"{kind}: a name is a text without dots, not {name!r}")
        if hasattr(self, name) and not (
            name in self.__dict__ and (self.__dict__[name] is None or isinstance(self.__dict__[name], (Module, Tensor)))
        ):
            raise ValueError(f"{kind}: {type(self).__name__} already has an attribute {name!r}; choose another name")

    def add_module(self, name: str, module: Module | None) -> None:
        self._check_name("add_module", name)
        if module is not None and not isinstance(module, Module) and not callable(module):
            raise TypeError(f"add_module: {name!r} is a {type(module).__name__}, not a Module")
        setattr(self, name, module)

    register_module = add_module

    def register_parameter(self, name: str, param: Tensor | None) -> None:
        self._check_name("register_parameter", name)
        setattr(self, name, param if param is None or walk.is_parameter(param) else Parameter(param))

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        self._check_name("register_buffer", name)
        if tensor is not None and not isinstance(tensor, Tensor):
            raise TypeError(f"register_buffer: {name!r} is a {type(tensor).__name__}, not a Tensor")
        setattr(self, name, None if tensor is None else Buffer(tensor, persistent))

    def _hook(self, kind: str, hook: Any) -> RemovableHandle:
        CHANGES.count += 1
        return RemovableHandle(self.__dict__.setdefault("_hooks", {"pre": {}, "post": {}})[kind], hook)

    def register_forward_pre_hook(self, hook: Callable[..., Any], *, with_kwargs: bool = False) -> RemovableHandle:
        """`hook(module, args)` runs before forward; what it returns, if not None, replaces the arguments."""
        return self._hook("pre", (hook, with_kwargs))

    def register_forward_hook(self, hook: Callable[..., Any], *, with_kwargs: bool = False) -> RemovableHandle:
        """`hook(module, args, output)` runs after forward; what it returns, if not None, replaces the output."""
        return self._hook("post", (hook, with_kwargs))

    # *** changing all of it ***

    def apply(self: M, fn: Callable[[Module], Any]) -> M:
        """`fn` on every module below, then on this one."""
        for child in self.children():
            child.apply(fn)
        fn(self)
        return self

    def train(self: M, mode: bool = True) -> M:
        """Sets `training` here and below. A module below that has a `train` of its own (to keep its norms as they are,
        say) is asked to do so itself."""
        todo, seen = list[Module]([self]), set[int]()
        while todo:
            m = todo.pop()
            if id(m) in seen:
                continue
            seen.add(id(m))
            m.training = mode
            for child in m.children():
                if type(child).train is Module.train:
                    todo.append(child)
                elif id(child) not in seen:
                    seen.add(id(child))
                    child.train(mode)
        return self

    def eval(self: M) -> M:
        return self.train(False)

    def requires_grad_(self: M, requires_grad: bool = True) -> M:
        for p in list(self.parameters()):
            p.requires_grad = requires_grad
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self.parameters():
            zero_grad(p, set_to_none)

    def _each(self: M, change: Callable[[Tensor], Tensor]) -> M:
        """Every parameter and buffer becomes `change` of itself, in place; their gradients as well."""
        for t in {id(t): t for _, t in walk.tensors(self)}.values():
            new = change(t.detach())
            if (new.dtype, new.device) != (t.dtype, t.device):
                t._device = new._device
                t._become(new.uop)
                CHANGES.count += 1
            if t.grad is not None:
                t.grad = change(t.grad)
        for m in self.modules():
            m._later(change)
        return self

    def _later(self, change: Callable[[Tensor], Tensor]) -> None:
        """A layer whose tensors are not made yet remembers what will have to be done to them."""

    def _before_load(self, state_dict: dict[str, Tensor], prefix: str) -> None:
        """A layer whose tensors are not made yet makes them as large as those under `prefix`."""

    def to(self: M, *args: Any, **kwargs: Any) -> M:
        """`to(device)`, `to(dtype)`, `to(device, dtype)` or `to(tensor)`; a tuple of devices puts a copy on each,
        but of what is on them already, cut perhaps. In place; types of floats only."""
        device, dtype = kwargs.pop("device", None), kwargs.pop("dtype", None)
        kwargs.pop("non_blocking", None)
        if kwargs:
            raise TypeError(f"Module.to does not know {sorted(kwargs)}; it takes device, dtype or a tensor")
        for a in args:
            if isinstance(a, Tensor):
                device, dtype = a.device, a.dtype
            elif isinstance(a, DType) or (isinstance(a, str) and isinstance(getattr(dtypes, a, None), DType)):
                dtype = a
            elif isinstance(a, (str, tuple, list)):
                device = tuple(a) if isinstance(a, list) else a
            elif not isinstance(a, bool) and a is not None:
                raise TypeError(f"Module.to takes a device, a dtype or a tensor, not {type(a).__name__}")
        kind = None if dtype is None else to_dtype(dtype)
        if kind is not None and not kind.is_float:
            raise TypeError(f"Module.to: parameters are floats, {kind.name} is not")
        return self._each(lambda t: (t.cast(kind) if kind is not None and t.dtype.is_float else t).to(device))

    def type(self: M, dst_type: DType | str) -> M:
        return self.to(dtype=dst_type)

    def float(self: M) -> M:
        return self.to(dtypes.float32)

    def double(self: M) -> M:
        return self.to(dtypes.float64)

    def half(self: M) -> M:
        return self.to(dtypes.float16)

    def bfloat16(self: M) -> M:
        return self.to(dtypes.bfloat16)

    # *** state ***

    def get_extra_state(self) -> Any:
        """What a subclass keeps in `state_dict()` besides tensors, as `<path>._extra_state`; it writes
        `set_extra_state`, too."""
        raise RuntimeError(f"{type(self).__name__} has no get_extra_state() of its own")

    def set_extra_state(self, state: Any) -> None:
        """Takes over what `get_extra_state` gave."""
        raise RuntimeError(f"{type(self).__name__} has no set_extra_state() of its own")

    def _with_extra_state(self, prefix: str = "") -> dict[str, Module]:
        """The modules that have one, by its name."""
        found = ((f"{prefix}{path}.", m) for path, m in self.named_modules())
        own = ((path, m) for path, m in found if type(m).get_extra_state is not Module.get_extra_state)
        return {f"{path.lstrip('.')}_extra_state": m for path, m in own}

    def state_dict(self, *, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Parameters and persistent buffers by path, with PyTorch's names, and what modules give as their extra state.
        The tensors are the module's own, not copies."""
        found: dict[str, Any] = {k: t for k, t in walk.tensors(self, prefix) if getattr(t, "persistent", True)}
        return found | {k: m.get_extra_state() for k, m in self._with_extra_state(prefix).items()}

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True, assign: bool = False) -> LoadResult:
        """Copies the tensors in, or with `assign` takes them as they are (`state.load_state_dict`). KeyError lists the
        names that are missing or not known here (strict), ValueError the shapes that differ."""
        from manygrad.nn.state import load_state_dict

        for path, m in list(self.named_modules()):
            m._before_load(state_dict, f"{path}." if path else "")
        own, extra = self.state_dict(), self._with_extra_state()
        if strict and (missing := [k for k in extra if k not in state_dict]):
            raise KeyError(f"load_state_dict: missing {missing}; strict=False loads what fits")
        load_state_dict(self, {k: t for k, t in state_dict.items() if k not in extra}, strict, assign)
        for k, m in extra.items():
            if k in state_dict:
                m.set_extra_state(state_dict[k])
        return LoadResult([k for k in own if k not in state_dict], [k for k in state_dict if k not in own])

    # *** how it reads ***

    def extra_repr(self) -> str:
        """Text in the brackets of repr()."""
        return ""

    def __repr__(self) -> str:
        below = [f"({k}): {_indented(repr(m))}" for k, m in walk.child_modules(self)]
        extra = self.extra_repr()
        lines = [*(extra.split("\n") if extra else []), *below]
        if not below and len(lines) <= 1:
            return f"{type(self).__name__}({extra})"
        return f"{type(self).__name__}(\n  " + "\n  ".join(lines) + "\n)"


def _indented(text: str) -> str:
    return text.replace("\n", "\n  ")
