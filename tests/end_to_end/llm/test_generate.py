"""manygrad.llm.generate as a user runs it: from another folder, with text, with mistakes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Words
from tokenizers import decoders, models, pre_tokenizers

from manygrad.llm.stream import TextStream
from manygrad.llm.tokenizer import Tokenizer, from_folder
from tests.end_to_end.llm.tiny import write_model

PROGRAM = ("-m", "manygrad.llm.generate")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def generate(*arguments: str, where: Path, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *PROGRAM, *arguments], cwd=where, input=text, text=True, capture_output=True, timeout=90
    )


def test_text_from_another_folder(folder: Path, tmp_path: Path) -> None:
    given = ["--model", str(folder), "--tokens", "12", "--ignore-end"]
    one = generate(*given, "--prompt", "abc", where=tmp_path)
    assert one.returncode == 0 and one.stdout == "EysyYJfY\n", one.stderr
    assert "prompt: 3 tokens" in one.stderr and "then 11 tokens" in one.stderr
    assert generate(*given, "--prompt", "-", where=tmp_path, text="abc").stdout == one.stdout
    assert generate(*given, "--prompt", "abc", "--stop", "YJ", where=tmp_path).stdout == "Eysy\n"
    ended = generate("--model", str(folder), "--prompt", "abc", where=tmp_path)  # </s> is its fourth token
    assert ended.stdout == "Eys\n" and "then 3 tokens" in ended.stderr
    said = generate(*given, "--prompt", "bc", "--chat", "--system", "a", where=tmp_path)
    assert said.stdout == generate(*given, "--prompt", "saubc", where=tmp_path).stdout


def test_two_nodes_write_the_same_text_once(folder: Path, tmp_path: Path, command: Callable[..., Any]) -> None:
    given = ["--model", str(folder), "--tokens", "12", "--ignore-end", "--prompt", "abc"]
    for options, prefix in (("--nodes", "2"), "0:0: "), (("--devices-per-node", "4"), ""):
        run = command(*PROGRAM, *options, "--", *given).wait()
        assert run.code == 0 and run.out == f"{prefix}EysyYJfY\n", run.out + run.err
        assert bool(re.search(r"tokens/s, \d+% of it waiting for other nodes", run.err)) == bool(prefix), run.err
    run = command(*PROGRAM, "--nodes", "2", "--", *given[:-1], "-").wait()
    assert run.code == 1 and "standard input does not reach the workers" in run.err, run.out + run.err


def test_mistakes_are_told(folder: Path, tmp_path: Path) -> None:
    for arguments, code, message in [
        (["--model", "nowhere", "--prompt", "a"], 1, "generate.py: there is no file or folder 'nowhere'; without one"),
        (["--model", str(tmp_path), "--prompt", "a"], 1, "has no config.json"),
        (["--model", str(folder), "--prompt", ""], 1, "the prompt is empty"),
        (
            ["--model", str(folder), "--prompt", "a" * 100],
            1,
            "100 tokens and 64 more do not fit the model's context of",
        ),
        (["--model", str(folder), "--prompt", "a", "--tokens", "0"], 2, "--tokens 0: at least 1"),
        (["--model", str(folder), "--prompt", "a", "--system", "b"], 2, "--system needs --chat"),
        (["--model", str(folder), "--prompt", "a", "--activations", "int8"], 1, "int8 are for quantised weights"),
        (["--model", str(folder), "--prompt", "a", "--activations", "bfloat16"], 1, "--dtype bfloat16"),
    ]:
        run = generate(*arguments, where=tmp_path)
        assert run.returncode == code and message in run.stderr and "Traceback" not in run.stderr, run.stderr


def test_pieces_of_text_are_whole(folder: Path) -> None:
    tokenizer = from_folder(folder)

    def pieces(text: str, *stops: str) -> list[str]:
        stream, out = TextStream(tokenizer, stops), []
        for token in tokenizer.encode(text):
            out.append(stream.add(token))
            if stream.stopped:
                return out
        return [*out, stream.end()]

    assert pieces("abcd") == ["a", "b", "c", "d", ""]
    assert pieces("abcd", "cx", "d") == ["a", "b", "", "c"]
    assert pieces("abcab", "bcd") == ["a", "", "", "bca", "", "b"]
    assert "".join(pieces("abc" * 20)) == "abc" * 20
    letters = {w: i for i, w in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    words = Words(models.BPE(letters, []))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = Tokenizer(words, frozenset())
    assert pieces("aé🦙") == ["a", "", "é", "", "", "", "🦙", ""]
