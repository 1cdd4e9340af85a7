"""Every kind of decoder on small weights: against transformers (golden), and against NumPy at every way of reading."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manygrad import Tensor, Variable, nn
from manygrad.llm.config import from_json
from manygrad.llm.engine.steps import Steps
from manygrad.llm.engine.writer import SamplingParams, Writer
from manygrad.llm.load import load
from manygrad.llm.model import Decoder, TokenEmbedding, row_groups
from manygrad.llm.pages import Pages
from manygrad.llm.sharding import rules
from manygrad.llm.shared_heads import share_heads
from manygrad.llm.weights import Weights, read_folder
from manygrad.nn.state import safe_save
from manygrad.runtime.devices import get_device
from tests.end_to_end.llm.variants import TOKENS, VARIANTS, config, weight

GOLDEN = json.loads((Path(__file__).parent / "golden" / "variants.json").read_text())


def give(shapes: dict[str, Any]) -> Any:
    """Weights by the names of the golden file."""
    names = {n.removeprefix("model."): n for n in shapes}
    return lambda name, shape, optional=False: (
        Tensor(weight(names[name], tuple(shape))) if name in names or not optional else None
    )


def decoder(
    variant: str, length: int = 64, devices: tuple[str, ...] = (), kind: str = "float32", **told: Any
) -> Decoder:
    """`told`: other values of config.json."""
    model = Decoder(from_json({**config(variant), **told}), give(GOLDEN[variant]["shapes"]))
    share_heads(model, len(devices) or 1)
    model.reserve(1, length, kind)
    if devices:
        nn.shard_rules(model, rules(model, devices), devices)
    Tensor.realize(*model.parameters(), *model.buffers())
    return model


def reference(model: Decoder, tokens: list[int]) -> np.ndarray:
    """(tokens, vocabulary) logits in float64, all at once."""
    c, w = model.config, {k: t.numpy().astype(np.float64) for k, t in model.state_dict().items()}
    t, group = len(tokens), c.heads // c.kv_heads
    at = np.arange(t)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + c.norm_eps) * w[f"{name}.weight"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def turned(x: np.ndarray, local: bool) -> np.ndarray:
        table = (c.local_rope if local else c.rope).table(t).numpy().astype(np.float64)
        z = (x[..., : c.head_dim // 2] + 1j * x[..., c.head_dim // 2 :]) * (table[0] + 1j * table[1])
        return np.concatenate([z.real, z.imag], -1)

    def heads(x: np.ndarray, name: str) -> np.ndarray:
        return linear(x, name).reshape(t, -1, c.head_dim).swapaxes(0, 1)

    def attention(x: np.ndarray, name: str, layer: int) -> np.ndarray:
        q, k, v = (heads(x, f"{name}.{n}_proj") for n in "qkv")
        if c.qk_norm:
            q, k = norm(q, f"{name}.q_norm"), norm(k, f"{name}.k_norm")
        q, k = turned(q, c.windowed[layer]), turned(k, c.windowed[layer]).repeat(group, 0)
        scores = q @ k.swapaxes(1, 2) * c.scale
        scores = scores if c.score_cap is None else c.score_cap * np.tanh(scores / c.score_cap)
        behind = at[:, None] - at
        scores[:, (behind < 0) | (behind >= (c.window_of(layer) or t))] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        y = weights / weights.sum(-1, keepdims=True) @ v.repeat(group, 0)
        return linear(y.swapaxes(0, 1).reshape(t, -1), f"{name}.o_proj")

    def gated(x: np.ndarray, name: str) -> np.ndarray:
        g = linear(x, f"{name}.gate_proj")
        g *= 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) if c.gelu else 1 / (1 + np.exp(-g))
        return linear(g * linear(x, f"{name}.up_proj"), f"{name}.down_proj")

    x = w["embed_tokens.weight"][tokens] * c.embedding_scale
    for i in range(c.layers):
        name, before = f"layers.{i}", "post_attention_layernorm"
        y = attention(norm(x, f"{name}.input_layernorm"), f"{name}.self_attn", i)
        if c.post_norms:
            y, before = norm(y, f"{name}.post_attention_layernorm"), "pre_feedforward_layernorm"
        x = x + y
        y = gated(norm(x, f"{name}.{before}"), f"{name}.mlp")
        x = x + (norm(y, f"{name}.post_feedforward_layernorm") if c.post_norms else y)
    logits = norm(x, "norm") @ w.get("lm_head.weight", w["embed_tokens.weight"]).T
    return logits if c.logit_cap is None else c.logit_cap * np.tanh(logits / c.logit_cap)


def logits(model: Decoder, sizes: list[int]) -> np.ndarray:
    """After each block of TOKENS, read in blocks of these sizes."""
    out, at = [], 0
    with Tensor.no_grad():
        for size in sizes:
            position = Variable(f"at{size}", 0, 64 - size).bind(at)
            tokens = Tensor([TOKENS[at : at + size]]).to(model.table.device)
            out.append(model(tokens, position, size - 1).numpy()[0])
            at += size
    return np.array(out)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers_and_of_numpy_in_blocks_of_any_size(variant: str) -> None:
    model, told = decoder(variant), np.array(GOLDEN[variant]["logits"])
    want = reference(model, TOKENS)
    np.testing.assert_allclose(want[::3, ::7], told, atol=2e-4)
    for sizes in ([1] * 40, [16, 1, 1, 8, 13, 1]):
        np.testing.assert_allclose(logits(model, sizes), want[np.cumsum(sizes) - 1], atol=2e-4)


@pytest.mark.parametrize("variant", ["llama", "gemma2"])
def test_long_prompts_are_read_some_tokens_at_a_time(variant: str) -> None:
    """From the beginning and after others, in one page and in several, behind other texts' pages."""
    tokens = np.random.default_rng(0).integers(3, 61, 600).tolist()
    model, paged = decoder(variant, 640), decoder(variant)
    want = reference(model, tokens)
    paged.reserve_pages(1300, 640)
    steps, pages = Steps(paged, 2, 640), Pages(40, 2, 20)
    for slot in range(2):
        pages.promise(slot, 20)
    for at, size in ((0, 512), (512, 32), (544, 32), (0, 256), (256, 256)):
        given = tokens[at : at + size]
        for slot in range(2):
            pages.grow(slot, max(at + size, sum(map(len, pages.held)) // 2))
        position = 32 * Variable(f"at{size}", 0, (640 - size) // 32).bind(at // 32)
        with Tensor.no_grad():
            alone = model(Tensor([given]), position, size - 1).numpy()[0]
        np.testing.assert_allclose(alone, want[at + size - 1], atol=2e-4)
        found = steps.block(pages.rows[1], given, at, size - 1).numpy()[0]
        np.testing.assert_allclose(found, want[at + size - 1], atol=2e-4)
    writer = Writer(model, 640)
    assert writer.start(tokens) == want[599].argmax()
    assert writer.write(tokens[-1]) == reference(model, [*tokens, tokens[-1]])[-1].argmax()


def test_a_folder_of_hugging_face_loads(tmp_path: Path) -> None:
    """config.json, names with `model.` in front, a copied head that is tied, two files."""
    shapes = GOLDEN["gemma2"]["shapes"]
    state = {n: Tensor(weight(n, tuple(s))) for n, s in shapes.items()}
    names = sorted(state)
    safe_save({n: state[n] for n in names[:9]}, tmp_path / "model-00001-of-00002.safetensors")
    tied = {"lm_head.weight": state["model.embed_tokens.weight"]}
    safe_save({**{n: state[n] for n in names[9:]}, **tied}, tmp_path / "model-00002-of-00002.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config("gemma2")))
    c, weights = read_folder(tmp_path, "float32")
    model = Decoder(c, weights)
    weights.check()
    model.reserve(1, 64)
    np.testing.assert_allclose(logits(model, [40])[0, ::7], GOLDEN["gemma2"]["logits"][-1], atol=2e-4)


def test_nothing_compiles_again_as_the_context_grows() -> None:
    writer = Writer(decoder("qwen3", 128), 128)

    def write(prompt: list[int], count: int) -> list[int]:
        tokens = [writer.start(prompt)]
        while len(tokens) < count:
            tokens.append(writer.write(tokens[-1]))
        return tokens

    first = write(TOKENS[:5], 4)
    write(TOKENS, 4)  # three steps of each kind: run, captured, replayed
    kernels = len(get_device("CPU").kernels.kernels)
    longer = write(TOKENS[:5], 60)
    write(TOKENS + TOKENS, 20)
    assert longer[:4] == first and len(get_device("CPU").kernels.kernels) == kernels
    tokens, model = list(TOKENS[:5]), writer.model
    for token in longer:
        assert token == reference(model, tokens)[-1].argmax()
        tokens.append(token)


def test_chosen_tokens_are_those_of_sample() -> None:
    """The penalty knows prompt and text, the noise where a text stands; a second text does not know the first."""
    choice = SamplingParams(0.9, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.4, seed=5)
    writer = Writer(decoder("llama"), 64, choice)
    for _ in range(2):
        tokens = [*TOKENS[:5], writer.start(TOKENS[:5])]
        while len(tokens) < 20:
            tokens.append(writer.write(tokens[-1]))
        for n in range(5, 20):
            row = Tensor(reference(writer.model, tokens[:n])[-1:].astype(np.float32))
            want = nn.sample(row, **vars(choice), history=Tensor([tokens[:n]]), draw=n - 1)
            assert tokens[n] == want.item()


@pytest.mark.parametrize("variant", ["llama_tied_biases", "qwen3"])
def test_the_same_text_on_any_number_of_devices(variant: str) -> None:
    """Three heads of keys, six of queries, 48 features and 61 words on 2 and 4 devices."""
    chosen = {}
    for n in (1, 2, 4):
        model = decoder(variant, devices=tuple(f"CPU:{i}" for i in range(n)) if n > 1 else ())
        for choice in (SamplingParams(), SamplingParams(1.1, top_p=0.9, repetition_penalty=1.2, seed=3)):
            writer = Writer(model, 64, choice)
            tokens = [writer.start(TOKENS[:5])]
            while len(tokens) < 16:
                tokens.append(writer.write(tokens[-1]))
            assert chosen.setdefault(choice, tokens) == tokens, (n, choice)


def test_a_table_that_is_cut_stays_where_it_is() -> None:
    """60 rows in 2 groups, 61 in as many as there are rows; what travels is the rows that were asked for."""
    devices = ("CPU:0", "CPU:1")
    for rows, groups in ((60, 2), (61, 61), (263, 1)):
        table = np.random.default_rng(rows).standard_normal((rows, 8)).astype(np.float32)
        embedding = TokenEmbedding(Tensor(table))
        assert row_groups(rows, devices) == groups
        nn.shard_rules(embedding, {"weight": (0, groups) if groups > 1 else None}, devices)
        tokens = np.array([[0, rows - 1, 7, rows // 2]])
        np.testing.assert_array_equal(embedding(Tensor(tokens).shard(devices)).numpy(), table[tokens])


def test_files_that_do_not_fit_say_what_is_wrong(tmp_path: Path) -> None:
    for path, message in [
        ("nowhere.gguf", "there is no file or folder 'nowhere.gguf'; without one, --model smollm2"),
        (str(tmp_path), "has no config.json; a model is a .gguf file, or a folder with config.json beside"),
        (__file__, "is no model: a .gguf file, or a folder with config.json"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            load(path)
    with pytest.raises(ValueError, match="of a model of the kind 'mamba'; known are llama, mistral"):
        from_json({"model_type": "mamba"})
    with pytest.raises(ValueError, match="config.json does not say 'hidden_size'"):
        from_json({"model_type": "llama"})
    with pytest.raises(ValueError, match="rope_type 'dynamic' of config.json is not known"):
        from_json({**config("llama"), "rope_parameters": {"rope_type": "dynamic"}})
    told = config("llama")
    weights = Weights({"extra.weight": Tensor.zeros(2)}, "float32")
    with pytest.raises(ValueError, match="no tensor for embed_tokens.weight; it has extra.weight"):
        Decoder(from_json(told), weights)
    with pytest.raises(ValueError, match=r"no place for 1 tensors of the file: extra.weight"):
        weights.check()
    with pytest.raises(ValueError, match="the prompt has 129 tokens, there is room for 128"):
        Writer(decoder("llama", 128), 128).start([1] * 129)
    full = Writer(decoder("llama", 32), 32)
    token = full.start([1] * 32)
    with pytest.raises(ValueError, match="the KV cache of 32 tokens is full"):
        full.write(token)
