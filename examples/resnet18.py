"""ResNet-18 (He et al., 2016) with torchvision's parameter names, trained on synthetic images.

    python examples/resnet18.py
    launcher examples/resnet18.py --nodes 2 -- --steps 20 --image 64 --width 64

A checkpoint of torchvision's resnet18 loads with `--load resnet18.safetensors` (or .pth) at --width 64 --classes 1000.
"""

import argparse

import numpy as np

from manygrad import Tensor, TinyJit, nn, world
from manygrad.checkpoint import Checkpointer
from manygrad.nn import functional as F
from manygrad.nn.data import DataLoader, TensorDataset
from manygrad.nn.state import safe_load, torch_load


class BasicBlock(nn.Module):
    """Two 3×3 convolutions around a shortcut: (N, C, H, W) -> (N, C', H / stride, W / stride)."""

    def __init__(self, channels: int, out: int, stride: int = 1):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.downsample = None
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride=stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(x)) + shortcut)


class ResNet(nn.Module):
    def __init__(self, blocks: list[int], width: int = 64, classes: int = 1000):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        channels = width
        for i, count in enumerate(blocks):
            out = width * 2**i
            layers = []
            for k in range(count):
                layers.append(BasicBlock(channels, out, 2 if k == 0 and i > 0 else 1))
                channels = out
            self.add_module(f"layer{i + 1}", nn.Sequential(*layers))
        self.stages = len(blocks)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(channels, classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) -> (N, classes)."""
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        for i in range(self.stages):
            x = getattr(self, f"layer{i + 1}")(x)
        return self.fc(self.avgpool(x).flatten(1))


def resnet18(width: int = 64, classes: int = 1000) -> ResNet:
    return ResNet([2, 2, 2, 2], width, classes)


def synthetic_images(count: int, size: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """A pattern a class, under noise: (count, 3, size, size) and the classes."""
    random = np.random.default_rng(0)
    patterns, labels = random.standard_normal((classes, 3, size, size)), random.integers(0, classes, count)
    return (patterns[labels] + random.standard_normal((count, 3, size, size))).astype(np.float32), labels


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--batch", type=int, default=16, help="global batch size")
    parser.add_argument("--image", type=int, default=32)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--blocks", type=int, nargs="+", default=[2, 2, 2, 2], help="blocks of each stage")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--load", help="a checkpoint to start from (.safetensors, .pth)")
    parser.add_argument("--checkpoint", metavar="DIR", help="save every 50 steps, and go on where the last run ended")
    args = parser.parse_args()

    Tensor.manual_seed(0)
    model = ResNet(args.blocks, args.width, args.classes)
    if args.load:
        model.load_state_dict(torch_load(args.load) if args.load.endswith((".pt", ".pth")) else safe_load(args.load))
    model.to(world.devices)
    optimizer = nn.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = nn.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    criterion = nn.CrossEntropyLoss()
    images, labels = synthetic_images(8 * args.batch, args.image, args.classes)
    loader = DataLoader(TensorDataset(images, labels), args.batch, shuffle=True, drop_last=True, devices=world.devices)

    @TinyJit
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    model.train()
    losses: list[float] = []
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader, "losses": losses}
    checkpoints = Checkpointer(args.checkpoint, state, every=50, asynchronous=True)
    checkpoints.resume()
    while len(losses) < args.steps:
        for x, y in loader:
            losses.append(step(x, y).item())
            scheduler.step()
            checkpoints.step(len(losses))
            if world.rank == 0:
                print(
                    f"step {len(losses)}/{args.steps}  loss {losses[-1]:.4f}  rate {scheduler.get_last_lr()[0]:.4f}",
                    flush=True,
                )
            if len(losses) == args.steps:
                break
    model.eval()
    with Tensor.no_grad():
        hits = sum(
            model(x).argmax(1).eq(y).sum().item()
            for x, y in DataLoader(TensorDataset(images, labels), args.batch, devices=world.devices)
        )
    if world.rank == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {100 * hits / len(labels):.1f}% of the training images right")


if __name__ == "__main__":
    main()
