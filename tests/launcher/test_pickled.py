"""Functions come to the workers with their source files, whichever cloudpickle is installed."""

from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

from manygrad.launcher import pickled


def files_of(code: CodeType) -> set[str]:
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    return {code.co_filename}.union(*map(files_of, inner))


def closure(by: int) -> Callable[[int], Any]:
    def outer(x: int) -> Any:
        def inner() -> list[int]:
            return [y * by for y in range(x)]

        return inner()

    return outer


def notebook_function(path: Path) -> Callable[..., Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("class A:\n  def f(self, x): return x + 1\ndef g(x): return A().f(x)\n", str(path), "exec"), names)
    function: Callable[..., Any] = names["g"]
    return function


def test_source_files_are_kept(tmp_path: Path) -> None:
    there = pickled.loads(pickled.dumps(closure(3)))
    assert there(3) == [0, 3, 6] and files_of(there.__code__) == {__file__}
    assert there.__code__.co_firstlineno == closure(3).__code__.co_firstlineno
    g = pickled.loads(pickled.dumps((notebook_function(tmp_path / "cell.py"), {"a": 1})))[0]
    assert g(1) == 2 and files_of(g.__code__) == {str(tmp_path / "cell.py")}
    assert g.__globals__["A"].f.__code__.co_filename == str(tmp_path / "cell.py")
