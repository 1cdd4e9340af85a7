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
from embed import Embedder, batches, height
from encoder import from_json, load_encoder

from manygrad import Tensor, nn

ROOT = Path(__file__).parents[3]
GOLDEN = json.loads((Path(__file__).parent / "golden" / "minilm.json").read_text())


@pytest.fixture(scope="module")
def embedder(minilm: str) -> Embedder:
    model, tokenizer = load_encoder(minilm)
    nn.shard_rules(model, {}, ("CPU:0",))
    Tensor.realize(*model.parameters())
    return Embedder(model, tokenizer, 3)


def test_vectors_are_those_of_transformers_in_any_order(embedder: Embedder) -> None:
    """Cosines above 0.9999; texts of other lengths beside them change nothing."""
    assert embedder.all_ids([told["text"] for told in GOLDEN]) == [told["ids"] for told in GOLDEN]
    want = np.array([told["vector"] for told in GOLDEN])
    for order in (list(range(len(GOLDEN))), [4, 1, 6, 0, 2]):
        found = embedder([GOLDEN[i]["text"] for i in order])
        np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
        assert ((found * want[order]).sum(1) > 0.9999).all()
        np.testing.assert_allclose(found, want[order], atol=1e-4)


def test_batches_are_of_like_lengths() -> None:
    lengths = [5, 200, 17, 6, 16, 700, 40]
    found = list(batches(lengths, 3))
    assert found == [([5], 700), ([1], 208), ([6, 2], 40), ([4, 3, 0], 16)]
    assert [height(n, 32) for n in (8, 32, 40, 128, 512, 5000)] == [32, 32, 25, 8, 2, 1]
    assert [height(n, 32, 4) for n in (8, 40, 512, 5000)] == [32, 24, 4, 4]  # as many on each device


def run(*arguments: str, where: Path, text: str = "") -> subprocess.CompletedProcess[str]:
    script = str(ROOT / "examples" / "llm" / "embed.py")
    return subprocess.run(
        [sys.executable, script, *arguments], cwd=where, input=text, text=True, capture_output=True, timeout=90
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


def test_two_devices_give_the_same(minilm: str, command: Callable[..., Any]) -> None:
    """Three rows over two devices."""
    script, texts = str(ROOT / "examples" / "llm" / "embed.py"), [told["text"] for told in GOLDEN[:3]]
    done = command(script, "--devices-per-node", "2", "--", "--vectors", "--batch", "3", *texts).wait()
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
