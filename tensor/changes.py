"""How often the program has changed what steps depend on: flags, modes, attributes of modules, options of optimisers.

A captured step compares one number with what it was, and looks closer only where it differs
(`guards.py`). What many steps change in memory, values and learning rates, is none of it.
"""

from __future__ import annotations


class Changes:
    """`count` grows; threads that lose one of two at the same time still change it."""

    def __init__(self) -> None:
        self.count = 0


CHANGES = Changes()
