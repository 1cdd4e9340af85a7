"""The IR texts: shipped, complete, and each of them says what it is."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

from manygrad.native.compiler import Compiler
from manygrad.native.processor import Processor, processor
from manygrad.native.sequence import constants
from manygrad.native.source import module, pause
from manygrad.native.team import PROTOTYPES, team_ir

ROOT = Path(__file__).parents[2]
TEXTS = sorted((ROOT / "native" / "ir").glob("*.ll"))


def test_the_texts_are_package_data() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert listed["manygrad.native"] == ["ir/*.ll"]
    assert {p.name for p in TEXTS} == {f.name for f in (files("manygrad.native") / "ir").iterdir()}


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: p.stem)
def test_a_text_begins_with_what_it_is(path: Path) -> None:
    assert path.read_text().startswith("; ")


def test_a_constant_that_is_not_given_is_an_error() -> None:
    with pytest.raises(KeyError, match="FUTEX"):
        module("futex")


def test_the_modules_compile_and_have_their_functions() -> None:
    compiler = Compiler()
    assert set(compiler.functions(team_ir(4096), list(PROTOTYPES))) == set(PROTOTYPES)
    words = module("futex", "clock", pause(processor().architecture), "sequence", **constants())
    assert all(compiler.functions(words, ["publish", "load", "wait"]).values())


@pytest.mark.parametrize("architecture", ["x86_64", "aarch64", "riscv64"])
def test_every_architecture_has_a_pause(architecture: str) -> None:
    assert "define internal void @pause()" in module(pause(architecture))


def test_names_of_a_processor() -> None:
    p = Processor("arm64-apple-darwin", "apple-m1", "+neon,-sve,+dotprod")
    assert p.architecture == "aarch64" and p.has("neon", "dotprod") and not p.has("sve") and not p.has("neon", "avx2")
