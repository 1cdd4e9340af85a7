"""The page docs/errors.md: the tree of `manygrad.errors`, made from its docstrings."""

from __future__ import annotations

import inspect

from manygrad import errors

HEAD = """# Errors

Everything that manygrad raises under a name of its own is in `manygrad.errors`. Arguments that a program got wrong are
Python's `ValueError`, `TypeError` and `IndexError`. Named fields are attributes of the error and survive pickling.

```python
from manygrad.errors import CollectiveError, LaunchError
```

`LaunchAborted` ends a rank whose run is over. It is no `Exception`, so that `except Exception: continue` in a training
loop cannot keep a dead run alive.

| Error | It is also | When it is raised |
|---|---|---|
"""
END = "\nHow a failed run is reported, and the exit codes of `launcher`: [launching](launching.md).\n"


def rows(base: type[BaseException], depth: int = 0) -> list[str]:
    """A line for `base` and each error below it."""
    also = [b.__name__ for b in base.__bases__ if b.__module__ == "builtins"]
    text = " ".join((inspect.getdoc(base) or "").split())
    mine = f"| {'↳ ' * depth}`{base.__name__}` | {', '.join(f'`{b}`' for b in also)} | {text} |"
    return [mine, *(row for kind in base.__subclasses__() for row in rows(kind, depth + 1))]


def page() -> str:
    """The whole page."""
    return HEAD + "\n".join([*rows(errors.ManygradError), *rows(errors.LaunchAborted)]) + "\n" + END
