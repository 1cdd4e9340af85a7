"""The console: prefixes, merging, progress bars. Pure: text and times in, text out."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manygrad.launcher.logs import Console, LineMerger, RankLogs, Terminal, make_run_directory


def test_rank_0_stdout_at_once_and_stderr_of_all_merged() -> None:
    c = Console(4)
    assert c.feed(0, "stdout", "hello\n", 0.0) == [("stdout", "0:0: hello\n")]
    assert c.feed(1, "stdout", "hidden\n", 0.0) == []
    out = [piece for r in range(4) for piece in c.feed(r, "stderr", "warn\n", 0.01 * r)]
    assert out == [("stderr", "[ranks 0-3] warn\n")]
    assert c.feed(2, "stderr", "mine\n", 1.0) == []
    assert c.tick(1.5) == [("stderr", "2:2: mine\n")]


def test_lines_across_chunks_and_unfinished_last_line() -> None:
    c = Console(2)
    assert c.feed(0, "stdout", "a", 0) == []
    assert c.feed(0, "stdout", "b\r\nc", 0) == [("stdout", "0:0: ab\n")]
    assert c.close(1) == [("stdout", "0:0: c\n")]


def test_progress_bar_without_terminal_shows_its_last_state() -> None:
    c = Console(2)
    out = [p for i in range(100) for p in c.feed(0, "stdout", f"\rstep {i}", i / 100)]
    out += c.feed(0, "stdout", "\n", 1.0)
    assert out == [("stdout", "0:0: step 99\n")]


def test_text_and_its_newline_in_two_writes_is_one_line() -> None:
    c = Console(2)
    out = [p for i in range(20) for text in (f"step {i}", "\n") for p in c.feed(0, "stdout", text, 10.0 * i)]
    assert out == [("stdout", f"0:0: step {i}\n") for i in range(20)]


def test_progress_bar_on_a_terminal_is_redrawn_below_other_lines() -> None:
    c = Console(2, terminal=True)
    assert c.feed(0, "stdout", "\rstep 1", 0) == [("stdout", "0:0: step 1")]
    assert c.feed(0, "stdout", "\rstep 2", 0) == [("stdout", "\r\x1b[K"), ("stdout", "0:0: step 2")]
    c.feed(1, "stderr", "oh\n", 0)
    assert c.tick(1) == [("stdout", "\r\x1b[K"), ("stderr", "1:1: oh\n"), ("stdout", "0:0: step 2")]
    assert c.feed(0, "stdout", "\rstep 3\n", 2) == [("stdout", "\r\x1b[K"), ("stdout", "0:0: step 3\n")]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc"), st.floats(0, 0.1)), max_size=60))
def test_merging_keeps_every_line_and_each_ranks_order(lines: list[tuple[int, str, float]]) -> None:
    merger, now, out = LineMerger(4), 0.0, []
    for rank, text, dt in lines:
        now += dt
        merger.add(rank, "stderr", text, now)
        out += merger.take(now)
    out += merger.take(now, everything=True)
    seen: dict[int, list[str]] = {r: [] for r in range(4)}
    for _, line in out:
        if line.startswith("[ranks "):
            inside, text = line[7:].split("] ")
            for part in inside.split(", "):
                a, _, b = part.partition("-")
                for r in range(int(a), int(b or a) + 1):
                    seen[r].append(text)
        else:
            seen[int(line[0])].append(line.split(": ")[1])
    assert seen == {r: [t for rank, t, _ in lines if rank == r] for r in range(4)}


def test_run_directories_are_never_mixed(tmp_path: Path) -> None:
    wanted = str(tmp_path / "x")
    assert make_run_directory(wanted, "n", "s") == wanted
    assert make_run_directory(wanted, "n", "s") == wanted  # still empty
    (tmp_path / "x" / "report.json").write_text("{}")
    assert make_run_directory(wanted, "n", "s") == wanted + "-2"


def test_logs_that_cannot_all_be_made(tmp_path: Path) -> None:
    """A disk that is full at once, say: none is left."""
    (tmp_path / "rank1.log").mkdir()
    with pytest.raises(IsADirectoryError):
        RankLogs(str(tmp_path), 3)
    assert [f.name for f in tmp_path.iterdir()] == ["rank1.log"]


def names() -> list[str]:
    return [t.name for t in threading.enumerate()]


def test_the_terminal_writes_all_and_leaves_no_thread(capfd: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    assert "manygrad-terminal" in names()
    for i in range(100):
        terminal.put([("stdout", f"{i}\n"), ("stderr", f"e{i}\n")])
    terminal.close(lambda: False)
    assert "manygrad-terminal" not in names() and terminal.trouble == "" and not terminal.full
    assert capfd.readouterr() == ("".join(f"{i}\n" for i in range(100)), "".join(f"e{i}\n" for i in range(100)))


def test_a_stream_that_raises_anything_ends_no_run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What is put is dropped, so that the driver goes on taking output; the error is told, with its traceback."""

    class Odd:
        encoding = "utf-8"

        def write(self, text: str) -> None:
            raise ZeroDivisionError("odd")

    odd: Any = Odd()
    monkeypatch.setattr(sys, "stdout", odd)
    terminal, until = Terminal(), time.monotonic() + 20
    terminal.put([("stdout", "x" * (Terminal.FULL + 1))])
    while not terminal.trouble:
        assert time.monotonic() < until
    terminal.put([("stdout", "x" * (Terminal.FULL + 1))])
    assert not terminal.full and terminal.trouble == "ZeroDivisionError: odd"
    terminal.close(lambda: False)
    assert "the thread manygrad-terminal has ended by an error:\nTraceback" in capfd.readouterr().err
