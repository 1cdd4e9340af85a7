"""The LLVM IR texts of `ir/`, one concept a file, put together to modules.

`$NAME` in a text stands for a constant that the caller gives (a size that Python has to know as well, the number of a
system call). A file that calls functions of another one says so in its first lines; the caller names all of them.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from string import Template


@cache
def _text(name: str) -> str:
    return (files(__package__) / "ir" / f"{name}.ll").read_text(encoding="utf-8")


def module(*names: str, **constants: int) -> str:
    """One module of the texts `names`, in that order. KeyError: a constant that they use and that is not given."""
    return Template("\n".join(map(_text, names))).substitute(constants)


def pause(architecture: str) -> str:
    """The name of the text that has `@pause`, one step of a loop that waits."""
    return f"pause_{architecture}" if architecture in ("x86_64", "aarch64") else "pause_other"
