"""A vision transformer (Dosovitskiy et al., 2021), trained on synthetic images.

python examples/vit.py
launcher examples/vit.py --nodes 2 -- --steps 20 --dim 128 --layers 6
"""

import argparse

import numpy as np

from manygrad import Tensor, TinyJit, nn, world
from manygrad.checkpoint import Checkpointer
from manygrad.nn.data import DataLoader, TensorDataset


class ViT(nn.Module):
    """(N, 3, image, image) -> (N, classes)."""

    def __init__(self, image: int, patch: int, classes: int, dim: int, layers: int, heads: int, dropout: float = 0.0):
        super().__init__()
        if image % patch:
            raise ValueError(f"an image of {image} is not a whole number of patches of {patch}")
        self.patches = nn.Conv2d(3, dim, patch, stride=patch)
        self.cls = nn.Parameter(Tensor.zeros(1, 1, dim))
        self.positions = nn.Parameter(Tensor.randn(1, (image // patch) ** 2 + 1, dim) * 0.02)
        layer = nn.TransformerEncoderLayer(
            dim, heads, 4 * dim, dropout, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = Tensor.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        return self.head(self.norm(self.encoder(x)[:, 0]))


def synthetic_images(count: int, size: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """A pattern a class, under noise: (count, 3, size, size) and the classes."""
    random = np.random.default_rng(0)
    patterns, labels = random.standard_normal((classes, 3, size, size)), random.integers(0, classes, count)
    return (patterns[labels] + random.standard_normal((count, 3, size, size))).astype(np.float32), labels


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch", type=int, default=16, help="global batch size")
    parser.add_argument("--image", type=int, default=32)
    parser.add_argument("--patch", type=int, default=8)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--checkpoint", metavar="DIR", help="save every 50 steps, and go on where the last run ended")
    args = parser.parse_args()

    Tensor.manual_seed(0)
    model = ViT(args.image, args.patch, args.classes, args.dim, args.layers, args.heads, args.dropout).to(world.devices)
    optimizer = nn.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    warmup = max(args.steps // 8, 1)
    scheduler = nn.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            nn.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=warmup),
            nn.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps - warmup + 1),
        ],
        milestones=[warmup],
    )
    images, labels = synthetic_images(8 * args.batch, args.image, args.classes)
    loader = DataLoader(TensorDataset(images, labels), args.batch, shuffle=True, drop_last=True, devices=world.devices)

    @TinyJit
    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y, label_smoothing=0.1)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss, norm

    losses: list[float] = []
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader, "losses": losses}
    checkpoints = Checkpointer(args.checkpoint, state, every=50, asynchronous=True)
    checkpoints.resume()
    while len(losses) < args.steps:
        for x, y in loader:
            loss, norm = step(x, y)
            losses.append(loss.item())
            scheduler.step()
            checkpoints.step(len(losses))
            if world.rank == 0:
                print(
                    f"step {len(losses)}/{args.steps}  loss {losses[-1]:.4f}  gradient norm {norm.item():.3f}",
                    flush=True,
                )
            else:
                norm.item()
            if len(losses) == args.steps:
                break
    if world.rank == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
