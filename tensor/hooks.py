"""Hooks of tensors and modules: what registering one returns."""

from __future__ import annotations

from typing import Any


class RemovableHandle:
    """Returned by the methods that register a hook; `remove()`, or the end of a `with`, takes the hook off again."""

    def __init__(self, hooks: dict[int, Any], hook: Any) -> None:
        self.hooks, self.id = hooks, max(hooks, default=-1) + 1
        hooks[self.id] = hook

    def remove(self) -> None:
        self.hooks.pop(self.id, None)

    def __enter__(self) -> RemovableHandle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()
