"""Decides how a run goes: events in, instructions out. No I/O, no clock, no threads; tested without any process.

`table.py` says what an event does in each state of a rank: the next state and a handler (`handlers.py`).
"""

from .controller import Controller as Controller
