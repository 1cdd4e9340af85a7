"""A character-level LSTM on any plain text, and what it writes.

python examples/lstm.py
launcher examples/lstm.py --nodes 2 -- --text my_book.txt --steps 500 --hidden 256
"""

import argparse

import numpy as np

from manygrad import Tensor, TinyJit, nn, world
from manygrad.checkpoint import Checkpointer
from manygrad.nn import functional as F
from manygrad.nn.data import DataLoader, TokenDataset

TEXT = (
    "to shard or not to shard, that is the reduction: whether a ring is nobler than a tree of halves and doubles. " * 40
)


class TextModel(nn.Module):
    """(N, T) characters -> (N, T, vocabulary) logits, and the state to go on from."""

    def __init__(self, vocabulary: int, hidden: int, layers: int, dropout: float = 0.0):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.lstm = nn.LSTM(hidden, hidden, layers, batch_first=True, dropout=dropout)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        out, after = self.lstm(self.embedding(x), state)
        return self.head(out), after


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", help="a plain text file")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16, help="global batch size")
    parser.add_argument("--context", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--write", type=int, default=40, help="characters to write at the end")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--checkpoint", metavar="DIR", help="save every 50 steps, and go on where the last run ended")
    args = parser.parse_args()
    text = open(args.text, encoding="utf-8").read() if args.text else TEXT
    characters = sorted(set(text))
    code = {c: i for i, c in enumerate(characters)}
    data = TokenDataset(np.array([code[c] for c in text]), args.context, stride=3)
    loader = DataLoader(data, args.batch, shuffle=True, seed=1, drop_last=True, devices=world.devices)

    Tensor.manual_seed(0)
    model = TextModel(len(characters), args.hidden, args.layers).to(world.devices)
    optimizer = nn.optim.Adam(model.parameters(), lr=args.lr)

    @TinyJit
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        logits, _ = model(x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    losses: list[float] = []
    state = {"model": model, "optimizer": optimizer, "loader": loader, "losses": losses}
    checkpoints = Checkpointer(args.checkpoint, state, every=50, asynchronous=True)
    checkpoints.resume()
    while len(losses) < args.steps:
        for x, y in loader:
            losses.append(step(x, y).item())
            checkpoints.step(len(losses))
            if world.rank == 0 and (len(losses) % 10 == 0 or len(losses) == 1):
                print(f"step {len(losses)}/{args.steps}  loss {losses[-1]:.4f}", flush=True)
            if len(losses) == args.steps:
                break

    model.eval()

    @TinyJit
    def following(x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One character on: the likeliest next one, and the state."""
        logits, (h, c) = model(x, (h, c))
        return logits[:, -1].argmax(-1, keepdim=True).contiguous(), h.contiguous(), c.contiguous()

    x = Tensor([[code[text[0]]]]).to(world.devices)
    h = c = Tensor.zeros(args.layers, 1, args.hidden).to(world.devices)
    written = text[0]
    with Tensor.no_grad():
        for _ in range(args.write):
            x, h, c = (t.clone().realize() for t in following(x, h, c))
            written += characters[int(x.item())]
    if world.rank == 0:
        print(f"it writes: {written!r}")
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
