"""MiniLM as transformers has it (`make_golden.py`), in any batch, on several devices; embed.py as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manygrad import Tensor, nn
from manygrad.llm.embedder import Embedder
from manygrad.llm.encoder import from_json, load_encoder
from manygrad.llm.packing import WIDTHS, batches

PROGRAM = ("-m", "manygrad.llm.embed")
GOLDEN = json.loads((Path(__file__).parent / "golden" / "minilm.json").read_text())


@pytest.fixture(scope="module")
def embedder(minilm: str) -> Embedder:
    model, tokenizer = load_encoder(minilm)
    nn.shard_rules(model, {}, ("CPU:0",))
    Tensor.realize(*model.parameters())
    return Embedder(model, tokenizer, 3, cut=True)


def test_vectors_are_those_of_transformers_in_any_order(embedder: Embedder) -> None:
    """Cosines above 0.9999; texts of other lengths beside them change nothing."""
    assert embedder.all_ids([told["text"] for told in GOLDEN]) == [told["ids"] for told in GOLDEN]
    want = np.array([told["vector"] for told in GOLDEN])
    for order in (list(range(len(GOLDEN))), [4, 1, 6, 0, 2]):
        found = embedder([GOLDEN[i]["text"] for i in order])
        np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
        assert ((found * want[order]).sum(1) > 0.9999).all()
        np.testing.assert_allclose(found, want[order], atol=1e-4)


def test_texts_stand_one_after_another() -> None:
    lengths = [5, 200, 17, 6, 16, 700, 40]
    assert [(b.rows, b.capacity, b.width) for b in batches(lengths, 256)] == [
        ([[5]], 700, 700),
        ([[1, 6, 4]], 256, 208),
        ([[2, 3, 0]], 64, 20),
    ]
    assert [(b.rows, b.capacity) for b in batches([9, 8, 7, 6], 64, 2)] == [([[0, 3], [1, 2]], 16)]
    found = next(batches([3, 1, 2], 32)).packed([[7, 8, 9], [1], [4, 5]])
    assert found.tokens.tolist() == [[7, 8, 9, 4, 5, 1, 0, 0]] and found.places.tolist() == [[0, 1, 2, 0, 1, 0, 0, 0]]
    assert found.begins.tolist() == [[0, 3, 5, 0]] and found.lengths.tolist() == [[3, 2, 1, 1]]
    assert found.back.tolist() == [[0, 1, 2, 4, 5, 8, 0, 0]]


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("capacity", [1, 64, 1024])
def test_every_text_is_in_one_batch_that_is_nearly_full(capacity: int, devices: int) -> None:
    rng = np.random.default_rng(capacity)
    lengths = [int(n) for n in np.clip(rng.lognormal(3, 0.8, 800), 2, 700)]
    made = list(batches(lengths, capacity, devices))
    assert sorted(i for b in made for row in b.rows for i in row) == list(range(len(lengths)))
    for b in made:
        assert len(b.rows) == devices and all(len(row) <= b.slots for row in b.rows)
        assert all(sum(lengths[i] for i in row) <= b.capacity for row in b.rows)
        longest = max(lengths[i] for row in b.rows for i in row)
        assert b.width == next((w for w in WIDTHS if w >= longest), longest) <= b.capacity
    if capacity == 1024:
        assert sum(b.capacity * devices for b in made) < 1.05 * sum(lengths) + capacity * devices


def run(*arguments: str, where: Path, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *PROGRAM, *arguments], cwd=where, input=text, text=True, capture_output=True, timeout=90
    )


def test_a_user_sees_cosines_or_vectors(minilm: str, tmp_path: Path) -> None:
    texts = [told["text"] for told in GOLDEN[:3]]
    shown = run("--batch", "3", *texts, where=tmp_path)
    assert shown.returncode == 0, shown.stderr
    rows = np.array([[float(x) for x in line.split()[:3]] for line in shown.stdout.splitlines()])
    want = np.array([told["vector"] for told in GOLDEN[:3]])
    np.testing.assert_allclose(rows, want @ want.T, atol=2e-3)
    vectors = run("--vectors", "--batch", "3", "-", where=tmp_path, text="\n".join(texts))
    np.testing.assert_allclose([json.loads(line) for line in vectors.stdout.splitlines()], want, atol=1e-4)


def test_texts_longer_than_the_model_takes_are_not_cut_without_a_word(minilm: str, tmp_path: Path) -> None:
    long = "word " * 300
    failed = run("a", long, where=tmp_path)
    assert failed.returncode == 1 and "Traceback" not in failed.stderr
    assert "1 of 2 texts are longer than the model's 256 tokens: number 2 has 302;" in failed.stderr
    assert "(--cut leaves out their ends)" in failed.stderr
    shown = run("--cut", "--vectors", long, "word " * 254, where=tmp_path)
    one, two = (np.array(json.loads(line)) for line in shown.stdout.splitlines())
    np.testing.assert_allclose(one, two, atol=1e-5)


def test_two_devices_give_the_same(minilm: str, command: Callable[..., Any]) -> None:
    """Three rows over two devices."""
    texts = [told["text"] for told in GOLDEN[:3]]
    done = command(*PROGRAM, "--devices-per-node", "2", "--", "--vectors", "--batch", "3", *texts).wait()
    assert done.code == 0, done.err
    want = [told["vector"] for told in GOLDEN[:3]]
    np.testing.assert_allclose([json.loads(line) for line in done.out.splitlines()], want, atol=1e-4)


def test_mistakes_are_told(tmp_path: Path) -> None:
    for arguments, code, message in [
        (["--model", "nowhere", "a"], 1, "embed.py: there is no file or folder 'nowhere'"),
        (["--model", str(tmp_path), "a"], 1, "has no config.json; an encoder is a folder with it"),
        (["--batch", "0", "a"], 2, "--batch 0: at least 1"),
        (["-"], 1, "embed.py: stdin has no line"),
    ]:
        failed = run(*arguments, where=tmp_path)
        assert failed.returncode == code and message in failed.stderr and "Traceback" not in failed.stderr


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"model_type": "roberta"}, "of the kind 'roberta' with None; encoders are known of the kind 'bert'"),
        ({"model_type": "bert", "hidden_act": "relu"}, "with 'relu'"),
        ({"model_type": "bert"}, "config.json does not say vocab_size, hidden_size"),
        ({"model_type": "bert", "position_embedding_type": "relative_key"}, "'relative_key' is not known, absolute is"),
    ],
)
def test_other_encoders_are_refused(told: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(told)
