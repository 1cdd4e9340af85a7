"""Functions and results on their way between processes, as cloudpickle writes them but with their source files.

cloudpickle from 3.1.3 on writes every function's code as of the file "<dynamic-code>": the errors, plan comparisons and
traces of a launched function would no longer say which of the user's lines they are about.
"""

from __future__ import annotations

import io
from types import CodeType
from typing import Any

import cloudpickle
from cloudpickle import loads as loads


def dumps(value: Any) -> bytes:
    """`value` as bytes for `loads`."""
    out = io.BytesIO()
    _Pickler(out).dump(value)
    return out.getvalue()


def _code_of_file(make: Any, args: tuple[Any, ...], filename: str) -> CodeType:
    """The code that cloudpickle would have made, of the file where its function stands."""
    code: CodeType = make(*args)
    return code.replace(co_filename=filename)


def _reduce_code(code: CodeType) -> tuple[Any, tuple[Any, ...]]:
    make, args = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return _code_of_file, (make, args, code.co_filename)


class _Pickler(cloudpickle.Pickler):
    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child({CodeType: _reduce_code})
