"""Sizes of the models, and their batches."""

import numpy as np

BATCH = {"mlp": 512, "mlp1": 1, "conv": 256, "gpt": 16, "resnet": 64}
TOKENS, DIM, LAYERS, HEADS, CONTEXT = 65, 256, 4, 4, 128


def batch(model: str, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and what they should give, for a global step."""
    random = np.random.RandomState(step)
    n = BATCH[model]
    if model == "gpt":
        return random.randint(0, TOKENS, (n, CONTEXT)).astype(np.int64), random.randint(0, TOKENS, (n, CONTEXT)).astype(
            np.int64
        )
    shape = {"conv": (n, 1, 28, 28), "resnet": (n, 3, 32, 32)}.get(model, (n, 784))
    return random.rand(*shape).astype(np.float32), random.randint(0, 10, n).astype(np.int64)
