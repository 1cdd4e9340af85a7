"""The ranks' output: what the user sees of it, and the files that keep all of it.

`LineMerger` and `Console` are pure (text and times in, text out). Console rules: rank 0's stdout and everyone's
stderr, one `node:rank:` prefix a line, lines that several ranks print within `WINDOW_S` merged into one
`[ranks 0-3] text`, rank 0's carriage-return progress bars redrawn in place on a terminal.
"""

from __future__ import annotations

import os
import queue
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from manygrad.tensor.threads import Threads

from .ranks import ranks_text

WINDOW_S = 0.15
BAR_EVERY_S = 5.0  # how often an unfinished bar shows where there is no terminal
MAX_LINE = 1 << 16


@dataclass
class _Held:
    text: str
    stream: str
    ranks: list[int]
    until: float
    seq: int


class LineMerger:
    """Holds whole lines for `window_s` so that equal lines of several ranks become one. Keeps each rank's order."""

    def __init__(self, size: int, window_s: float = WINDOW_S) -> None:
        self.size, self.window_s = size, window_s
        self.held: list[_Held] = []
        self.last = [-1] * size  # sequence number of the line that each rank's latest line went into
        self.count = 0

    def add(self, rank: int, stream: str, text: str, now: float) -> None:
        for h in self.held:
            if h.seq > self.last[rank] and h.text == text and h.stream == stream and rank not in h.ranks:
                h.ranks.append(rank)
                self.last[rank] = h.seq
                return
        self.held.append(_Held(text, stream, [rank], now + self.window_s, self.count))
        self.last[rank] = self.count
        self.count += 1

    def take(self, now: float, everything: bool = False) -> list[tuple[str, str]]:
        """The lines that are due, as (stream, prefixed line)."""
        out = []
        while self.held and (
            everything or self.held[0].until <= now or len(self.held[0].ranks) == self.size or len(self.held) > 2000
        ):
            h = self.held.pop(0)
            out.append((h.stream, f"{prefix(h.ranks)} {h.text}"))
        return out


def prefix(ranks: list[int]) -> str:
    """`2:2:` for one rank (node and rank), `[ranks 0-3]` for several."""
    return f"{ranks[0]}:{ranks[0]}:" if len(ranks) == 1 else f"[{ranks_text(ranks)}]"


class Console:
    """Turns chunks of the ranks' output into what is written to the terminal: (stream, text) pairs.

    `show_stdout` are the ranks whose stdout shows; `terminal` allows redrawing a bar in place.
    """

    def __init__(
        self,
        size: int,
        show_stdout: frozenset[int] = frozenset({0}),
        terminal: bool = False,
        window_s: float = WINDOW_S,
    ) -> None:
        self.show, self.terminal = show_stdout, terminal
        self.merger = LineMerger(size, window_s)
        self.partial: dict[tuple[int, str], str] = {}
        self.bar, self.bar_drawn, self.bar_at, self.redrawn = "", "", 0.0, False

    def feed(self, rank: int, stream: str, text: str, now: float) -> list[tuple[str, str]]:
        if stream == "stdout" and rank not in self.show:
            return []
        key, now_lines = (rank, stream), list[tuple[str, str]]()
        *lines, rest = (self.partial.get(key, "") + text.replace("\r\n", "\n")).split("\n")
        for line in lines:
            self._line(rank, stream, line.rstrip("\r").rsplit("\r", 1)[-1], now, now_lines)
        redrawn = "\r" in rest or (self.redrawn and not lines)
        rest = rest[rest.rstrip("\r").rfind("\r") + 1 :]  # of a bar only its latest state counts
        while len(rest) > MAX_LINE:
            self._line(rank, stream, rest[:MAX_LINE], now, now_lines)
            rest = rest[MAX_LINE:]
        self.partial[key] = rest
        if rank == 0:
            self.redrawn = redrawn
            self.bar = (
                ""
                if not (redrawn or self.terminal)
                else f"{prefix([0])} {rest.rstrip(chr(13))}"
                if rest.rstrip("\r")
                else ""
            )
        return self._draw(now_lines + self.merger.take(now), now)

    def tick(self, now: float) -> list[tuple[str, str]]:
        """Lines whose time has come, and the bar."""
        return self._draw(self.merger.take(now), now)

    def close(self, now: float) -> list[tuple[str, str]]:
        """Everything still held, unfinished lines included."""
        lines: list[tuple[str, str]] = []
        for (rank, stream), text in sorted(self.partial.items()):
            if text.rstrip("\r"):
                self._line(rank, stream, text.rstrip("\r"), now, lines)
        self.partial, self.bar = {}, ""
        return self._draw(lines + self.merger.take(now, everything=True), now)

    def _line(self, rank: int, stream: str, line: str, now: float, now_lines: list[tuple[str, str]]) -> None:
        """One whole line: shown now if no other rank can print the same, else held for merging."""
        if stream == "stdout" and len(self.show) == 1:
            now_lines.append((stream, f"{prefix([rank])} {line}"))
        else:
            self.merger.add(rank, stream, line, now)

    def _draw(self, lines: list[tuple[str, str]], now: float) -> list[tuple[str, str]]:
        out = []
        if not self.terminal:
            out = [(s, line + "\n") for s, line in lines]
            if self.bar and self.bar != self.bar_drawn and now - self.bar_at >= BAR_EVERY_S:
                if self.bar_at:
                    out.append(("stdout", self.bar + "\n"))
                self.bar_drawn, self.bar_at = self.bar, now
            return out
        if self.bar_drawn and (lines or self.bar != self.bar_drawn):
            out.append(("stdout", "\r\x1b[K"))
            self.bar_drawn = ""
        out += [(s, line + "\n") for s, line in lines]
        if self.bar and self.bar_drawn != self.bar:
            out.append(("stdout", self.bar))
            self.bar_drawn = self.bar
        return out


class RankLogs:
    """The run directory's `rank<r>.log` files: everything each rank wrote, as it came.

    Raises OSError where they cannot be made; after that what cannot be written (a full disk) is left out,
    and `trouble` says so.
    """

    def __init__(self, directory: str, size: int) -> None:
        self.paths = [os.path.join(directory, f"rank{r}.log") for r in range(size)]
        self.fds: list[int] = []
        self.waiting = [bytearray() for _ in self.paths]
        self.error = ""
        try:
            for p in self.paths:
                self.fds.append(os.open(p, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644))
        except OSError:
            made = self.paths[: len(self.fds)]
            self.close()
            self.paths = made
            self.remove()
            raise

    def write(self, rank: int, text: str) -> None:
        self.waiting[rank] += text.encode("utf-8", "backslashreplace")

    def flush(self) -> None:
        for fd, data in zip(self.fds, self.waiting, strict=True):
            try:
                while data:
                    del data[: os.write(fd, data)]
            except OSError as e:
                self.error = self.error or str(e)
                data.clear()

    def trouble(self) -> str:
        """Tells what is missing from the files, if anything."""
        gone = [p for p in self.paths if not os.path.exists(p)]
        return self.error or (f"{gone[0]} was deleted" if gone else "")

    def close(self) -> None:
        if len(self.fds) == len(self.paths):
            self.flush()
        fds, self.fds, self.waiting = self.fds, [], []
        for fd in fds:
            try:
                os.close(fd)
            except OSError as e:  # some file systems report a full disk only now
                self.error = self.error or str(e)

    def remove(self) -> None:
        """Removes the files of a run that never began."""
        for p in self.paths:
            try:
                os.unlink(p)
            except OSError:
                pass


def write(stream: IO[str] | None, text: str) -> str:
    """Write to a terminal, pipe or file whatever its encoding; returns what went wrong, or nothing."""
    if stream is None:
        return ""
    try:
        encoding = getattr(stream, "encoding", None) or "utf-8"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except BrokenPipeError:
        return ""  # a pager that was left
    except (OSError, ValueError, LookupError) as e:
        return str(e) or type(e).__name__
    return ""


class Terminal:
    """Writes to this process's stdout and stderr in a thread of its own.

    A terminal that is held (Ctrl-S), or a pager that does not read on, would stop the launcher's heartbeat. What waits
    is bounded by back-pressure: while `full`, the driver takes no output from the workers. A stream that raises what
    none should (a notebook's, say) ends the thread: nothing more is shown, `trouble` says why, and the run goes on.
    """

    FULL = 1 << 20

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[list[tuple[str, str]] | None] = queue.SimpleQueue()
        self.put_chars = self.written_chars = 0
        self.trouble = ""
        self._threads = Threads()
        self._writer = self._threads.start("manygrad-terminal", self._write, on_error=self._has_broken)

    @property
    def full(self) -> bool:
        return self._writer.error is None and self.put_chars - self.written_chars > self.FULL

    def put(self, pieces: list[tuple[str, str]]) -> None:
        if pieces and self._writer.error is None:
            self.put_chars += sum(len(text) for _, text in pieces)
            self.queue.put(pieces)

    def _has_broken(self, error: BaseException) -> None:
        self.trouble = self.trouble or f"{type(error).__name__}: {error}"

    def _write(self) -> None:
        while (pieces := self.queue.get()) is not None:
            for stream, text in pieces:
                trouble = write(sys.stdout if stream == "stdout" else sys.stderr, text)
                self.trouble = self.trouble or trouble
                self.written_chars += len(text)

    def close(self, give_up: Callable[[], bool]) -> None:
        """Until all is written, or the user will wait no longer."""
        self.queue.put(None)
        while self._writer.is_alive() and not give_up():
            self._writer.join(0.05)
        self._threads.close(0.0)


def make_run_directory(wanted: str, name: str, stamp: str) -> str:
    """Create and return the run's folder: `wanted`, or `runs/<stamp>-<name>`;
    a number is added rather than mixing two runs."""
    base = wanted or os.path.join("runs", f"{stamp}-{name}")
    for n in range(1, 1000):
        path = base if n == 1 else f"{base}-{n}"
        if (
            os.path.isdir(path)
            and not any(f == "report.json" or (f.startswith("rank") and f.endswith(".log")) for f in os.listdir(path))
            and wanted
        ):
            return os.path.abspath(path)
        try:
            os.makedirs(path, mode=0o755)
            return os.path.abspath(path)
        except FileExistsError:
            if not os.path.isdir(path):
                raise
    raise FileExistsError(f"{base}-1 to {base}-999 exist already")
