"""Language models: texts by a decoder, vectors of texts by an encoder, and a server.

    from manygrad.llm import TextModel
    model = TextModel("smollm2")
    print("".join(model.generate("The sky is", max_tokens=16)))

`python -m manygrad.llm.generate`, `.embed` and `.serve` are programs of it, also under `launcher -m`.
"""

from manygrad.llm.embedder import Embedder
from manygrad.llm.engine.writer import SamplingParams
from manygrad.llm.text_model import TextModel

__all__ = ["Embedder", "SamplingParams", "TextModel"]
