"""The tree of errors: public, documented, picklable with their fields, and all in one place."""

from __future__ import annotations

import ast
import builtins
import inspect
import pickle
import re
from typing import Any

import pytest

import manygrad
from manygrad import errors
from tests.test_house import modules

TREE = [e for _, e in inspect.getmembers(errors, inspect.isclass) if e.__module__ == errors.__name__]
# what never reaches a user as it is, and why
INSIDE = {
    "ApiError": "an answer of the server, in the API's own form",
    "Gone": "the server's client has closed its connection",
    "NotStorable": "a graph is not kept on disk",
    "UnknownArgument": "a call is not put off",
    "StartFailed": "the launcher's own start is unwound",
    "StartInterrupted": "the launcher's own start is unwound",
}
FIELDS: dict[str, dict[str, Any]] = {
    "CollectiveTimeout": {
        "rank": 1,
        "peer": 2,
        "plan": 3,
        "sequence": 4,
        "waited_for": "8 bytes",
        "timeout_s": 60.0,
        "where": "train.py:12",
    },
    "CollectiveAborted": {"rank": 1, "reason": "rank 3 failed"},
    "NoRank": {"rank": 1, "reason": "it has ended"},
    "PlanMismatch": {"rank": 1, "difference": "rank 1: a; rank 2: b"},
    "PeerLost": {"rank": 1, "peer": 2, "waited_for": "8 bytes", "evidence": "its process ended"},
    "TransportError": {"rank": 1, "peer": 2, "problem": "no shared memory", "remedy": "take TRANSPORT=zmq"},
}


@pytest.mark.parametrize("kind", TREE, ids=lambda e: str(e.__name__))
def test_an_error_survives_pickling_with_its_fields(kind: type[BaseException]) -> None:
    fields = FIELDS.get(kind.__name__, {})
    e = kind(**fields) if fields else kind("what, where, and the next step")
    back = pickle.loads(pickle.dumps(e))
    assert type(back) is kind and str(back) == str(e) and str(e)
    assert {k: getattr(back, k) for k in fields} == fields
    for value in fields.values():
        assert "{" not in str(e) and (not isinstance(value, str) or value in str(e)), "a field that the text leaves out"


def test_a_launch_error_keeps_its_report() -> None:
    back = pickle.loads(pickle.dumps(errors.LaunchError("rank 2 failed", 3, 2, {"ranks": [0, 1]})))
    assert (back.report, back.exit_code, back.rank, back.details) == ("rank 2 failed", 3, 2, {"ranks": [0, 1]})
    assert str(back) == "rank 2 failed"


def test_the_tree_is_one() -> None:
    """Each error is below ManygradError, or is the end of a rank, which no `except Exception` may hold up."""
    for kind in TREE:
        assert issubclass(kind, (errors.ManygradError, errors.LaunchAborted))
        assert kind.__doc__ and re.search(rf"^    +.*\b{kind.__name__}\b", errors.__doc__ or "", re.M), kind
    assert not issubclass(errors.LaunchAborted, Exception)
    assert manygrad.errors is errors


def test_no_error_is_defined_elsewhere() -> None:
    raised = {n for n in dir(builtins) if inspect.isclass(k := getattr(builtins, n)) and issubclass(k, BaseException)}
    raised |= {e.__name__ for e in TREE}
    classes = {
        (n.name, path): {b.attr if isinstance(b, ast.Attribute) else getattr(b, "id", "") for b in n.bases}
        for path, tree in modules().items()
        for n in ast.walk(tree)
        if isinstance(n, ast.ClassDef) and path != "errors.py"
    }
    elsewhere: set[str] = set()
    while more := {n for (n, _), bases in classes.items() if bases & (raised | elsewhere)} - elsewhere:
        elsewhere |= more
    assert elsewhere == set(INSIDE)
    names = [n for path, tree in modules().items() for n in ast.walk(tree) if _compares_a_class_name(n, elsewhere)]
    assert names == []


def _compares_a_class_name(n: ast.AST, elsewhere: set[str]) -> bool:
    """Whether an exception is told by the text of its class's name."""
    texts = {e.__name__ for e in TREE} | elsewhere
    if not isinstance(n, ast.Compare):
        return False
    constants = {c.value for c in ast.walk(n) if isinstance(c, ast.Constant) and isinstance(c.value, str)}
    return bool(constants & texts)
