"""From the start of a process to a text's first token, and the memory that it takes until its end: ours
(manygrad.llm.generate) and llama.cpp, each in fresh processes that find their caches, and their bytecode, warm.

Memory is what belongs to the process alone (RssAnon), at its highest: the file's mapped pages are not in it.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Thread

LIMIT_S, LOOK_S = 300.0, 0.002
LLAMA = """
import sys, llama_cpp
path, threads, text, tokens = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
there = llama_cpp.Llama(path, n_ctx=256, n_threads=threads, n_threads_batch=threads, verbose=False)
ids = there.tokenize(text.encode(), add_bos=False)
for _ in range(tokens):
    there.eval(ids)
    ids = [int(there.sample(temp=0.0))]
    print(there.detokenize(ids).decode(errors="replace"), end="", flush=True)
"""


def ours(text: str, tokens: int) -> list[str]:
    return [sys.executable, "-m", "manygrad.llm.generate", "--model", "smollm2", "--prompt", text,
            "--tokens", str(tokens), "--ignore-end"]  # fmt: skip


def llama(path: Path, threads: int, text: str, tokens: int) -> list[str]:
    return [sys.executable, "-c", LLAMA, str(path), str(threads), text, str(tokens)]


def started(command: Sequence[str], env: dict[str, str]) -> tuple[float, float]:
    """(seconds to the first byte of its output, MB that it had at most)."""
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env) as process:
        most = [0]
        watch = Thread(target=_watch, args=(process.pid, most), daemon=True)
        watch.start()
        assert process.stdout is not None
        if not process.stdout.read(1):
            raise SystemExit(f"{' '.join(command[:2])} wrote nothing")
        first = time.perf_counter() - began
        process.stdout.read()
        process.wait(LIMIT_S)
    return first, most[0] / 1024


def _watch(pid: int, most: list[int]) -> None:
    while True:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return
        anonymous = [line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")]
        if not anonymous:  # it has ended
            return
        most[0] = max(most[0], int(anonymous[0]))
        time.sleep(LOOK_S)


def first_token(sides: dict[str, list[str]], repeats: int) -> None:
    """Prints a row for each side; they take turns, the first one of each warms its caches."""
    with tempfile.TemporaryDirectory() as bytecode:
        env = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for i in range(repeats + 1):
            for name, command in sides.items():
                row = started(command, env)
                found[name] += [row] if i else []
    times = {name: statistics.median(t for t, _ in rows) for name, rows in found.items()}
    memory = {name: statistics.median(m for _, m in rows) for name, rows in found.items()}
    for name in sides:
        compared = f"{times[name] / times['ours']:7.2f}{memory[name] / memory['ours']:7.2f} of ours"
        print(f"{'first token':16}{name:14}{times[name] * 1e3:9.0f} ms{memory[name]:9.0f} MB{compared}")
