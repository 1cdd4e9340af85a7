"""The launcher: `launcher train.py --nodes N` runs the same script on N workers.

Read in this order: `options` (what is asked) → `driver` (the pipeline) → `attempts` (one after another, as `restarts`
decides) → `run` (the loop of one) → `cluster` (Ray: where) → `agent` and `supervisor` (start a worker on its node, and
stay with it) → `worker` (joins the others, runs the script) ↔ `channel`/`control` (messages, over `link`) →
`controller` (decides) → `logs` and `report` (what the user sees) → `janitor` (leaves nothing behind).
"""

from manygrad.errors import Infeasible, LaunchAborted, LaunchError, LaunchInterrupted, PlanMismatch, UsageError

from . import early  # noqa: F401 (first of all: it takes Ctrl-C from here on)

__all__ = ["Infeasible", "LaunchAborted", "LaunchError", "LaunchInterrupted", "PlanMismatch", "UsageError"]
