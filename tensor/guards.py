"""What a capture depends on besides its arguments: what the function's Python can read.

    step ─ closure, defaults, globals that its code names ─┬─ functions of the user: theirs
                                                           ├─ modules: modes, attributes, parameters, hooks
                                                           ├─ optimisers: options of their groups, parameters
                                                           ├─ lists, dicts, tuples: their items
                                                           └─ other objects of the user's classes, namespaces:
                                                              attributes that reached code names

Numbers and texts are compared by value, tensors by which they are, where they lie, and whether they are trained, all
else by which object it is. What the front end changes is counted (`tensor/changes.py`): as long as the count is as it
was, only the closure, globals and plain objects are looked at in each call, by identity. Numbers that the function
itself changes are left out here: following it again (`runtime/jit/following.py`) tells whether they matter.

`TinyJit` holds its captures to it, `@function` its traces to the numbers in it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from operator import is_
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from manygrad.native.checks import ATTRIBUTE, CALLED, ELEMENT, ITEM, MAPPED, MISSING, SIZE, VARIABLE, Check
from manygrad.tensor.autocast import AUTOCAST, autocast_dtype
from manygrad.tensor.changes import CHANGES
from manygrad.tensor.grad_mode import ENABLED, is_grad_enabled
from manygrad.tensor.ops.random import places_of_draws
from manygrad.tensor.source import is_own
from manygrad.tensor.storage import is_stored
from manygrad.tensor.tensor import TRAINING, Tensor
from manygrad.tensor.uop.views import memory

MOST = 50_000  # objects that are looked at
NUMBERS = (bool, int, float, complex, str, bytes)
Fetch = Callable[[], Any]


def modes() -> tuple[Any, ...]:
    return is_grad_enabled(), Tensor.training, autocast_dtype(), places_of_draws()


class Watched(NamedTuple):
    """Values that are looked at in each call: `fetch` gives them in their order. The same as kinds of checks:
    each is found by its key in `of`, None where `fetch` alone finds them; `size`: how many `of` has, if that counts."""

    fetch: Fetch
    values: tuple[Any, ...]
    kind: int | None = None
    of: Any = None
    keys: tuple[Any, ...] = ()
    size: int | None = None

    def holds(self) -> bool:
        now = self.fetch()
        return len(now) == len(self.values) and all(map(is_, now, self.values))

    def checks(self) -> list[Check]:
        if self.kind is None:
            return [Check(CALLED, self.holds, None, True)]
        sizes = [] if self.size is None else [Check(SIZE, self.of, None, self.size)]
        if self.kind == ATTRIBUTE:  # (each of an object of its own)
            return [Check(ATTRIBUTE, x, key, v) for x, key, v in zip(self.of, self.keys, self.values)]
        return sizes + [Check(self.kind, self.of, key, v) for key, v in zip(self.keys, self.values)]


class Guards:
    """What `fn` can read now."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.count = CHANGES.count
        self.modes = modes()
        reader = Reader()
        reader.visit("", fn)
        reader.read_objects()
        self.cheap, self.values = reader.cheap, reader.values
        self.tensors = any(isinstance(x, Tensor) for x in self.values.values())  # whether there are some

    def hold(self) -> bool:
        """Whether nothing that is looked at in each call has changed."""
        if CHANGES.count != self.count or self.modes != modes():
            return False
        return all(w.holds() for w in self.cheap)

    def checks(self) -> list[Check]:
        """What `hold` looks at, for native code."""
        enabled, training, half, places = self.modes
        return [
            Check(ATTRIBUTE, CHANGES, "count", self.count),
            Check(VARIABLE, ENABLED, None, enabled),
            Check(VARIABLE, TRAINING, None, training),
            Check(VARIABLE, AUTOCAST, None, half),
            Check(CALLED, places_of_draws, None, places),
            *(check for w in self.cheap for check in w.checks()),
        ]

    def numbers(self, ignored: Iterable[str] = ()) -> tuple[Any, ...]:
        """All numbers and texts, with their paths: what a trace has in it as constants."""
        paths = sorted(p for p, v in self.values.items() if isinstance(v, NUMBERS) and p not in ignored)
        return tuple((p, type(self.values[p]), self.values[p]) for p in paths)

    def differences(self, other: Guards, ignored: Iterable[str] = ()) -> list[str]:
        """Paths of what is not the same; modes come first."""
        names = (
            "whether gradients are on (no_grad)",
            "Tensor.training",
            "autocast",
            "devices that numbers are drawn on",
        )
        found = [n for n, a, b in zip(names, self.modes, other.modes) if a != b]
        paths = dict.fromkeys([*self.values, *other.values])
        a, b = self.values, other.values
        return found + [p for p in paths if p not in ignored and not is_same(a.get(p, MISSING), b.get(p, MISSING))]

    def told(self, path: str) -> str:
        """The value at a path."""
        value = self.values.get(path, MISSING)
        return "nothing" if value is MISSING else repr(value) if isinstance(value, NUMBERS) else type(value).__name__


def is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, NUMBERS) and bool(a == b))


class Reader:
    """One look at all that a function can read. `cheap`: what each call compares; `values`: all of it by path."""

    def __init__(self) -> None:
        self.cheap: list[Watched] = []
        self.values: dict[str, Any] = {}
        self.seen: dict[int, Any] = {}
        self.below: list[Any] = []  # what belongs to optimisers
        self.globals: list[tuple[dict[str, Any], list[str]]] = []  # and their names that code has
        self.names: set[str] = set()  # attributes and globals that reached code names
        self.objects: list[tuple[str, Any]] = []  # plain ones, whose attributes are read when all names are known

    def read_objects(self) -> None:
        while self.objects:
            todo, self.objects = self.objects, []
            for path, x in todo:
                self._plain(path, x)

    def visit(self, path: str, x: Any, counted: bool = False) -> None:
        """`counted`: changes of it are counted."""
        if x is None or isinstance(x, (*NUMBERS, range)) or id(x) in self.seen or len(self.seen) > MOST:
            return
        if isinstance(x, type):
            self._class(x)
            return
        self.seen[id(x)] = x
        changes = getattr(type(x), "_counted", "")
        if isinstance(x, Tensor):
            self.values[f"{path}.requires_grad"] = x._requires_grad
            u = memory(x.uop)
            self.values[f"the memory of {path}"] = u if is_stored(u) else x.uop
        elif isinstance(x, FunctionType):
            self._function(path, x)
        elif isinstance(x, MethodType):
            self.visit(path, x.__func__)
            self.visit("self" if not path else f"{path}.__self__", x.__self__)
        elif isinstance(x, functools.partial):
            for name, y in (("func", x.func), ("args", x.args), ("keywords", x.keywords)):
                self.visit(f"{path}.{name}" if path and name != "func" else path or "func", y)
        elif isinstance(x, dict):
            self._items(path, x.items(), None if counted else x.values)
        elif isinstance(x, (list, tuple)):
            self._items(path, enumerate(x), None if counted or isinstance(x, tuple) else lambda: x, x)
        elif changes == "groups":
            for f in x.flats:
                self.below += [f, f.state, f.scalars]
            for i, group in enumerate(x.param_groups):
                self.below += [group, group._scalars, group.variable]
                options = [(k, v) for k, v in group.items() if k not in group.variable and k != "initial_lr"]
                self._items(f"{path}.param_groups[{i}]", options, None, counted=True)
            self.values[f"{path}.param_groups"] = len(x.param_groups)
        elif changes == "attributes":
            self._module(path, x)
        elif (_is_users(type(x)) or _is_namespace(x)) and hasattr(x, "__dict__"):
            self._class(type(x))
            self.objects.append((path, x))
        elif callable(wrapped := getattr(x, "__wrapped__", None)):
            self.visit(path, wrapped)

    def _watch(self, fetch: Fetch, paths: list[str], kind: int, of: Any, keys: Sequence[Any]) -> None:
        """Values that are read one by one."""
        found = tuple(fetch())
        self.cheap.append(Watched(fetch, found, kind, of, tuple(keys)))
        for p, v in zip(paths, found):
            self.values[p] = v
            self.visit(p, v)

    def _items(
        self, path: str, items: Iterable[tuple[Any, Any]], fetch: Fetch | None, of: Any = None, counted: bool = False
    ) -> None:
        found = list(items)
        if fetch is not None:
            kind = ELEMENT if type(of) is list else None  # (of a dict the order counts, too)
            keys, values = tuple(k for k, _ in found), tuple(v for _, v in found)
            self.cheap.append(Watched(fetch, values, kind, of, keys, len(found)))
        for k, v in found:
            p = f"{path}[{k!r}]"
            self.values[p] = v
            self.visit(p, v, counted)

    def _function(self, path: str, fn: FunctionType) -> None:
        wrapped = getattr(fn, "__wrapped__", None)
        if wrapped is not None:
            self.visit(path, wrapped)
        if is_own(fn.__code__.co_filename) or not _is_users_file(fn.__code__.co_filename):
            if wrapped is None or not is_own(fn.__code__.co_filename):
                return
        before = f"{path}: " if path else ""
        cells = fn.__closure__ or ()
        names = _names(fn.__code__)
        self.names |= names
        if cells:
            paths = [before + n for n in fn.__code__.co_freevars]
            self._watch(lambda: [_content(c) for c in cells], paths, ATTRIBUTE, cells, ["cell_contents"] * len(cells))
        d = fn.__globals__
        read = [n for n in sorted(names) if n in d and not _is_of_libraries(d[n])]
        if read:
            self.globals.append((d, read))
            self._watch(lambda: [d.get(n, MISSING) for n in read], [before + n for n in read], ITEM, d, read)
        for n in sorted(names):
            m = d.get(n)
            if isinstance(m, ModuleType) and _is_users_file(getattr(m, "__file__", None) or ""):
                self._plain(n, m)
        self._items(f"{before}defaults", enumerate(fn.__defaults__ or ()), None)
        self._items(f"{before}defaults", (fn.__kwdefaults__ or {}).items(), None)

    def _module(self, path: str, m: Any) -> None:
        self._class(type(m))
        own = not _is_users(type(m))
        for name, value in list(vars(m).items()):
            if name.startswith("_jit_"):
                continue
            if name == "_hooks":
                self._items(f"hooks of {path}", [(k, h) for d in value.values() for k, h in d.items()], None)
                continue
            if own or name in self.names or name == "training" or isinstance(value, (Tensor, list, dict, tuple)):
                p = f"{path}.{name}" if path else name
                self.values[p] = value
                self.visit(p, value)
            elif hasattr(value, "__dict__"):
                self.visit(f"{path}.{name}", value)

    def _class(self, kind: type) -> None:
        """The user's methods, and the values that a class has for its instances."""
        for k in kind.__mro__:
            if id(k) in self.seen or not _is_users(k):
                continue
            self.seen[id(k)] = k
            for name, value in list(vars(k).items()):
                inner = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
                if isinstance(inner, FunctionType):
                    self.visit(f"{k.__name__}.{name}", inner)
            self.objects.append((k.__name__, k))

    def _plain(self, path: str, x: Any) -> None:
        d, kind = vars(x), type(x)
        data = {n for k in kind.__mro__[:-1] if _is_users(k) for n, v in vars(k).items() if not callable(v)}
        read = [
            n
            for n in sorted(self.names & (set(d) | data))
            if not n.startswith(("__", "_jit_")) and not isinstance(d.get(n), (ModuleType, type, property))
        ]
        if read:
            item = ITEM if isinstance(d, dict) else MAPPED
            self._watch(lambda: [d.get(n, MISSING) for n in read], [f"{path}.{n}" for n in read], item, d, read)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # (empty yet)
        return MISSING


def _is_of_libraries(x: Any) -> bool:
    """Whether it is a module, or a class that is none of the program's."""
    return isinstance(x, ModuleType) or (isinstance(x, type) and not _is_users(x))


@functools.cache
def _names(code: CodeType) -> frozenset[str]:
    """Globals and attributes that code names, also in texts for `getattr`, that of functions inside of it too."""
    inner = [_names(c) for c in code.co_consts if isinstance(c, CodeType)]
    texts = [c for c in code.co_consts if isinstance(c, str) and c.isidentifier()]
    return frozenset(code.co_names).union(*inner, texts if "getattr" in code.co_names else ())


@functools.cache
def _is_users_file(path: str) -> bool:
    """Whether a file is of the program: not the package's, nor of an installed library."""
    library = path.startswith((sys.prefix, sys.base_prefix, "<frozen")) or "site-packages" in path
    return bool(path) and not library and not is_own(path)


def _is_namespace(x: Any) -> bool:
    """Whether it is an object of the standard library that holds what a program puts into it: options, mostly."""
    return isinstance(x, SimpleNamespace) or (type(x).__module__, type(x).__name__) == ("argparse", "Namespace")


def _is_users(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None) or ("" if kind.__module__ in sys.builtin_module_names else "<input>")
    return kind.__module__ != "builtins" and _is_users_file(file)
