"""What is told when ranks differ."""

from __future__ import annotations

from manygrad.launcher.compare import Comparisons, first_difference, pack, plans_differ, unpack, write_values
from manygrad.launcher.messages import MAX_TEXT

MINE = "train.py:3\tPARAM float32 (8, 4) None\ntrain.py:4\tCONST float32 () 0.1\ntrain.py:4\tMUL float32 (8, 4) None"


def test_the_first_node_that_differs() -> None:
    theirs = MINE.replace("0.1", "0.2").replace("train.py:4\tCONST", "train.py:9\tCONST")
    assert first_difference(MINE, theirs) == ("train.py:4: CONST float32 () 0.1", "train.py:9: CONST float32 () 0.2")
    assert first_difference(MINE, MINE.replace("train.py", "other.py")) is None  # lines are not what is compared
    assert first_difference(MINE, MINE + "\ntrain.py:5\tNEG") == ("nothing more", "train.py:5: NEG")
    assert first_difference(MINE + "\ntrain.py:5\tNEG", MINE) == ("train.py:5: NEG", "nothing more")


def test_outlines_of_large_models_fit_a_message() -> None:
    lines = [f"train.py:{i % 300}\tMUL float32 ({i % 7}, {i % 12}) [#{i % 50}]" for i in range(20_000)]
    outline = "\n".join(lines)
    packed = pack(outline, MAX_TEXT)
    assert len(packed) <= MAX_TEXT and unpack(packed) == outline
    other = unpack(pack("\n".join([*lines[:19_000], "train.py:7\tADD float32 (8,) []", *lines[19_001:]]), MAX_TEXT))
    assert first_difference(unpack(packed), other) == (
        lines[19_000].replace("\t", ": "),
        "train.py:7: ADD float32 (8,) []",
    )
    first = unpack(pack(outline, 1000))
    assert first and outline.startswith(first) and len(pack(outline, 1000)) <= 1000
    assert unpack(pack("", 10)) == unpack("no outline") == unpack("\udcff") == ""


def test_both_ranks_both_lines_and_the_usual_cause() -> None:
    text = plans_differ(2, (0, 3), ("sum at train.py:5", "sum at train.py:6"), (MINE, MINE.replace("(8, 4)", "(9, 4)")))
    for part in (
        "plan 2 differs",
        "rank 0: sum at train.py:5",
        "rank 3: train.py:3: PARAM float32 (9, 4)",
        "Every rank must build the same",
    ):
        assert part in text, text
    assert "first difference" not in plans_differ(1, (0, 1), ("a", "b"), ("", ""))


def test_values_are_compared_round_by_round() -> None:
    ranks = Comparisons(3)
    same = write_values([(0, "ab", "float32 (4,) of train.py:3"), (1, "cd", "float32 (2,) of train.py:4")])
    other = write_values([(1, "ce", "float32 (2,) of train.py:4"), (7, "xx", "one that rank 0 does not have")])
    assert ranks.take(0, "1.0", same) is None and ranks.take(2, "1.0", same) is None
    assert ranks.take(1, "2.0", other) is None  # another round
    found = ranks.take(1, "1.0", other)
    assert found is not None
    for part in ("ranks 0 and 1 hold different values", "rank 0: float32 (2,) of train.py:4", "broadcast_"):
        assert part in found, found
    assert "1.0" not in ranks.open and "2.0" in ranks.open


def test_what_no_rank_completes_is_forgotten() -> None:
    ranks = Comparisons(2)
    for i in range(10_000):
        assert ranks.take(0, str(i), write_values([(0, "a", "b")])) is None
    assert len(ranks.open) <= 4096


def test_texts_of_another_form_do_no_harm() -> None:
    ranks = Comparisons(2)
    for text in ("", "\n\n", "1", "1\t2", "a\tb\tc\td", "\t\t"):
        ranks.take(0, "x", text)
        ranks.take(1, "y", text)
