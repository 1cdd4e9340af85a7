"""The launcher: `launcher train.py --nodes N` runs the same script on N workers.

Read in this order: `options` (what is asked) → `driver` (the pipeline) → `cluster` (Ray: where) → `agent` (starts a
worker on its node) → `worker` (joins the others, runs the script) ↔ `channel`/`control` (messages) → `controller` (decides) →
`logs` and `report` (what the user sees) → `janitor` (leaves nothing behind).
"""

from .errors import Infeasible, LaunchAborted, LaunchError, LaunchInterrupted, PlanMismatch, UsageError

__all__ = ["Infeasible", "LaunchAborted", "LaunchError", "LaunchInterrupted", "PlanMismatch", "UsageError"]
