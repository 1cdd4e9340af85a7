"""Writes what is generated of docs/: environment.md, errors.md, ops.md, opts.md and loops.md as a whole, and the marked
blocks of architecture.md and of the pages in stages/, whose other text is written by hand:

    <!-- generated: fusion rules -->
    | table | ...

A block ends at the next blank line.

python docs/generate.py           # writes them
python docs/generate.py --check   # exit code 1 if they are not up to date
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import error_table
import loops
import op_table
import opts
import stages
import walk

from manygrad.tensor.environment import markdown_table

HERE = Path(__file__).resolve().parent
BLOCK = re.compile(r"(<!-- generated: ([^>]*?) -->\n)(?:[^\n]+\n)*")


def filled(text: str, blocks: dict[str, str]) -> str:
    """A page with its blocks as they are now; a marker may name several passes that change nothing."""

    def block(m: re.Match[str]) -> str:
        names = split(m[2])
        text = walk.unchanged(names) if names[0].startswith(walk.NO_CHANGE) else blocks[names[0]]
        assert "\n\n" not in text, names
        return f"{m[1]}{text}\n"

    return BLOCK.sub(block, text)


def split(names: str) -> list[str]:
    return [name.strip() for name in names.split(";")]


def names_in(text: str) -> set[str]:
    return {name for m in BLOCK.finditer(text) for name in split(m[2])}


def pages() -> dict[str, str]:
    steps = walk.blocks()
    blocks = stages.blocks() | steps
    made = {
        "environment.md": markdown_table(),
        "errors.md": error_table.page(),
        "ops.md": op_table.markdown(),
        "opts.md": opts.page(),
        "loops.md": loops.page(),
    }
    used: set[str] = set()
    for path in sorted(HERE.rglob("*.md")):
        name, text = path.relative_to(HERE).as_posix(), path.read_text(encoding="utf-8")
        if name not in made and (names := names_in(text)):
            if unknown := names - blocks.keys():
                raise SystemExit(f"docs/{name} asks for {sorted(unknown)}; there are {sorted(blocks)}")
            made[name] = filled(text, blocks)
            used |= names
    if unused := blocks.keys() - used:
        raise SystemExit(f"no page shows {sorted(unused)}: a pass that changes the example now, or a new table?")
    return made


def main() -> int:
    stale = []
    for name, text in pages().items():
        path = HERE / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(text, encoding="utf-8")
    if "--check" in sys.argv and stale:
        print(f"not up to date: {', '.join(stale)}; run python docs/generate.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
