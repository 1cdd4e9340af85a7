"""Folders of images, a class a folder. Decoding needs Pillow: `pip install manygrad[images]`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class ImageFolder:
    """root/<class>/**/<image>: sample i is (image, number of its class), classes and files in order of their names.

    An image is (3, H, W) float32 in [0, 1], brought to `size` (H, W) if given, then given to `transform`.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        transform: Callable[[np.ndarray], Any] | None = None,
        size: tuple[int, int] | None = None,
    ):
        self.root, self.transform, self.size = os.fspath(root), transform, size
        self.classes = sorted(e.name for e in os.scandir(self.root) if e.is_dir())
        self.class_to_idx = {c: i for i, c in enumerate(self.classes)}
        self.samples = [
            (os.path.join(folder, name), i)
            for c, i in self.class_to_idx.items()
            for folder, _, names in sorted(os.walk(os.path.join(self.root, c)))
            for name in sorted(names)
            if name.lower().endswith(EXTENSIONS)
        ]
        if not self.samples:
            raise ValueError(f"ImageFolder: {self.root} holds no folders with images ({', '.join(EXTENSIONS)})")

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.samples[index]
        image = read_image(path, self.size)
        return (image if self.transform is None else self.transform(image)), label


def read_image(path: str | os.PathLike[str], size: tuple[int, int] | None = None) -> np.ndarray:
    """(3, H, W) float32 in [0, 1]."""
    try:
        from PIL import Image
    except ImportError:
        raise RuntimeError("reading images needs Pillow: pip install manygrad[images]") from None
    try:
        with Image.open(path) as image:
            rgb = image.convert("RGB")
            if size is not None:
                rgb = rgb.resize((size[1], size[0]), Image.Resampling.BILINEAR)
            return np.asarray(rgb, dtype=np.float32).transpose(2, 0, 1) / 255
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{os.fspath(path)} cannot be read as an image: {error}") from None
