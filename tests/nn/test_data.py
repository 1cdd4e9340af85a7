"""Datasets and loaders: which rows a worker reads, order by epoch, going on, threads that end,
and what they say when they fail."""

from __future__ import annotations

import random
import threading
import time
import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from manygrad import Tensor
from manygrad.nn.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    ImageFolder,
    Subset,
    TensorDataset,
    TokenDataset,
    default_collate,
    random_split,
    rng,
)
from manygrad.tensor.storage import is_stored
from manygrad.tensor.uop import even_bounds

X = np.arange(23, dtype=np.float32)


class Squares:
    """Sample i is {"x": i, "y": (i², text)}; some samples fail or take long."""

    def __init__(self, n: int = 10, bad: int = -1, slow: int = -1):
        self.n, self.bad, self.slow, self.release = n, bad, slow, threading.Event()

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        if i == self.bad:
            raise RuntimeError("this sample is broken")
        if i == self.slow:
            self.release.wait(20)
        return {"x": np.float32(i), "y": (i * i, f"text {i}")}


def joined(lists: Any) -> list[float]:
    return list(chain.from_iterable(lists))


def rows(loader: DataLoader) -> list[list[float]]:
    return [batch[0].tolist() for batch in loader]


def test_batches_and_epochs() -> None:
    loader = DataLoader(TensorDataset(X, X * 2), 10)
    assert len(loader) == 3 and rows(loader) == [list(range(10)), list(range(10, 20)), [20, 21, 22]]
    assert (
        len(DataLoader(TensorDataset(X), 10, drop_last=True))
        == 2
        == len(rows(DataLoader(TensorDataset(X), 10, drop_last=True)))
    )
    a, b = next(iter(loader))
    assert isinstance(a, Tensor) and a.dtype.name == "float32" and b.tolist() == (X[:10] * 2).tolist()
    shuffled = DataLoader(TensorDataset(X), 10, shuffle=True, seed=5)
    one, two = joined(rows(shuffled)), joined(rows(shuffled))
    assert sorted(one) == sorted(two) == X.tolist() and one != two != X.tolist() and shuffled.epoch == 2
    # the order is that of seed and epoch alone
    assert joined(rows(DataLoader(TensorDataset(X), 7, shuffle=True, seed=5))) == one


@settings(max_examples=40)
@given(
    n=st.integers(0, 40),
    batch=st.integers(1, 12),
    world=st.integers(1, 5),
    per_node=st.integers(1, 3),
    threads=st.integers(0, 2),
)
def test_workers_together_read_each_batch_once_as_shard_cuts_it(
    n: int, batch: int, world: int, per_node: int, threads: int
) -> None:
    data = TensorDataset(np.arange(n))
    whole = [r[0].tolist() for r in DataLoader(data, batch, True, seed=3, rank=0, world=1, num_workers=threads)]
    parts = [
        rows(DataLoader(data, batch, True, seed=3, rank=r, world=world, num_workers=threads)) for r in range(world)
    ]
    assert [joined(step) for step in zip(*parts)] == whole
    for size in range(batch + 1):
        bounds = even_bounds(size, world * per_node)
        for r in range(world):
            loader = DataLoader(data, batch, rank=r, world=world, devices=[f"CPU:{i}" for i in range(world * per_node)])
            assert list(loader.part(size)) == list(range(bounds[r * per_node], bounds[(r + 1) * per_node]))


def test_sharded_batches() -> None:
    devices = ("CPU:0", "CPU:1", "CPU:2")
    for (x,), want in zip(DataLoader(TensorDataset(X), 10, devices=devices), (X[:10], X[10:20], X[20:])):
        assert x.device == devices and x.shape == want.shape
        np.testing.assert_array_equal(x.numpy(), want)
        assert x.mean().item() == pytest.approx(want.mean())


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_going_on_where_another_loader_stopped(threads: int) -> None:
    make = lambda **k: DataLoader(TensorDataset(X), 4, shuffle=True, seed=1, num_workers=threads, **k)  # noqa: E731
    whole = make()
    want = [r for _ in range(2) for r in rows(whole)]
    for stop in (1, 5, 6, 8):
        first, got = make(), []
        while len(got) < stop:
            for batch in first:
                got.append(batch[0].tolist())
                if len(got) == stop:
                    break
        second = make(rank=0, world=1)
        second.load_state_dict(first.state_dict())
        while second.epoch < 2:
            got += rows(second)
        assert got == want
    with pytest.raises(ValueError, match="batch_size is 5 here, 4 in the state"):
        DataLoader(TensorDataset(X), 5, shuffle=True, seed=1).load_state_dict(whole.state_dict())


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_each_loop_begins_an_epoch(threads: int) -> None:
    """After a break, an error, and beside another one: from its first batch on, in the order of the next epoch."""
    make = lambda: DataLoader(TensorDataset(X), 4, shuffle=True, seed=1, num_workers=threads)  # noqa: E731
    whole = make()
    epochs = [rows(whole) for _ in range(4)]
    loader = make()
    for batch in loader:
        assert batch[0].tolist() == epochs[0][0]
        break
    with pytest.raises(ZeroDivisionError):
        for i, batch in enumerate(loader):
            assert batch[0].tolist() == epochs[1][i]
            1 / (i - 2)
    assert loader.state_dict()["epoch"] == 1 and loader.state_dict()["position"] == 3
    assert [(a[0].tolist(), b[0].tolist()) for a, b in zip(loader, loader)] == list(zip(epochs[2], epochs[3]))
    again = make()
    again.load_state_dict({**loader.state_dict(), "epoch": 1, "position": 3})
    assert [rows(again), rows(again)] == [epochs[1][3:], epochs[2]]
    wait_for_threads()


class Noisy(Squares):
    """Sample i with noise from `draw`."""

    def __init__(self, draw: Any):
        super().__init__(40)
        self.draw = draw

    def __getitem__(self, i: int) -> Any:
        time.sleep(0.001 * (i % 3))
        return np.float32(i + self.draw())


def own_generator() -> Any:
    generator = np.random.default_rng(0)
    return Noisy(lambda: generator.random())


def numpys_generator() -> Any:
    np.random.seed(0)
    return Noisy(lambda: np.random.rand())


def pythons_generator() -> Any:
    random.seed(0)
    return Noisy(random.random)


def manygrads_generator() -> Any:
    Tensor.manual_seed(0)
    return Noisy(lambda: Tensor.rand(1).item())


class Attribute:
    def __init__(self) -> None:
        self.generator = random.Random(3)

    def __call__(self) -> float:
        return self.generator.random()


@pytest.mark.parametrize(
    "make", [own_generator, numpys_generator, pythons_generator, manygrads_generator, lambda: Noisy(Attribute())]
)
def test_augmentation_from_a_generator_that_threads_share_can_be_repeated(make: Any) -> None:
    runs = []
    for threads in (1, 3, 3, 3):
        loader = DataLoader(make(), 2, num_workers=threads)
        if threads == 1:
            runs.append([batch.tolist() for batch in loader])
            continue
        with pytest.warns(UserWarning, match=r"one thread loads it, not 3, .* draw from nn.data.rng\(\)"):
            runs.append([batch.tolist() for batch in loader])
        runs[-1] += [batch.tolist() for batch in loader]
    assert runs[1] == runs[2] == runs[3]
    if make is not manygrads_generator:
        assert runs[0] == runs[1][:20]
    wait_for_threads()


def test_augmentation_by_the_samples_own_generator_is_the_same_on_any_number_of_threads_and_workers() -> None:
    whole = DataLoader(Noisy(lambda: rng().random()), 4, True, seed=3, num_workers=0)
    epochs = [[batch.tolist() for batch in whole] for _ in range(2)]
    assert epochs[0] != epochs[1]
    for threads in (1, 3):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loaders = [
                DataLoader(Noisy(lambda: rng().random()), 4, True, seed=3, num_workers=threads, rank=r, world=2)
                for r in range(2)
            ]
            for epoch in epochs:
                assert [a.tolist() + b.tolist() for a, b in zip(*loaders)] == epoch
    with pytest.raises(RuntimeError, match="is for a dataset's __getitem__ while a DataLoader reads it"):
        rng()


@pytest.mark.parametrize("threads", [0, 1, 2])
@pytest.mark.parametrize("where", ["sample", "collate"])
def test_stop_iteration_in_a_dataset_is_no_end_of_the_epoch(threads: int, where: str) -> None:
    class Ends(Squares):
        def __getitem__(self, i: int) -> Any:
            if where == "sample" and i == 4:
                raise StopIteration
            return i

    def collate(samples: list[Any]) -> Any:
        return next(iter(())) if 4 in samples else samples

    with pytest.raises(RuntimeError, match="the dataset raised StopIteration") as caught:
        list(DataLoader(Ends(), 2, num_workers=threads, collate_fn=collate))
    assert caught.value.__cause__.__notes__ == ["while loading the samples [4, 5]"]


def test_collating() -> None:
    batch = next(iter(DataLoader(Squares(), 3)))
    assert (
        batch["x"].tolist() == [0.0, 1.0, 2.0]
        and batch["y"][0].dtype.name == "int64"
        and batch["y"][1] == ["text 0", "text 1", "text 2"]
    )
    assert (
        default_collate([True, False]).dtype == bool
        and default_collate([0.5]).dtype == np.float64
        and default_collate([Tensor([1.0])] * 2).shape == (2, 1)
    )
    with pytest.raises(ValueError, match=r"have the shapes \[\(1,\), \(2,\)\]"):
        default_collate([np.zeros(1), np.zeros(2)])
    for values, dtype in (([1, 2.5], np.float64), ([True, 2], np.int64), ([True, 0.5], np.float64)):
        assert default_collate(values).tolist() == values and default_collate(values).dtype == dtype
    assert default_collate([1.5, np.float32(2.5)]).tolist() == [1.5, 2.5]
    with pytest.raises(ValueError, match=r"are \['NoneType', 'int'\]; make them all numbers"):
        default_collate([1, None])
    with pytest.raises(ValueError, match=r"have the keys \[\('a',\), \('a', 'b'\)\]"):
        default_collate([{"a": 1}, {"a": 1, "b": 2}])
    lists = DataLoader(Squares(), 4, collate_fn=lambda samples: len(samples))
    assert list(lists) == [4, 4, 2]


@pytest.mark.parametrize("threads", [0, 2])
def test_an_error_of_the_dataset_reaches_the_loop(threads: int) -> None:
    seen = []
    with pytest.raises(RuntimeError, match="this sample is broken") as caught:
        for batch in DataLoader(Squares(bad=5), 2, num_workers=threads):
            seen.append(batch["x"].tolist())
    assert seen == [[0, 1], [2, 3]] and caught.value.__notes__ == ["while loading the samples [4, 5]"]
    wait_for_threads()


def wait_for_threads() -> None:
    deadline = time.monotonic() + 10
    while any(t.name.startswith("manygrad-loader") for t in threading.enumerate()):
        assert time.monotonic() < deadline, "a loader's thread is still there"
        time.sleep(0.01)


def test_a_deadline_for_a_batch_and_threads_that_end() -> None:
    data = Squares(slow=2)
    with pytest.raises(TimeoutError, match=r"batch 1 was not loaded within 0\.2 s"):
        list(DataLoader(data, 2, timeout_s=0.2))
    data.release.set()
    wait_for_threads()
    iterator = iter(DataLoader(Squares(1000), 1, num_workers=3, prefetch=4))
    next(iterator)
    iterator.close()  # type: ignore[attr-defined]
    wait_for_threads()


def test_no_more_is_loaded_ahead_than_allowed() -> None:
    asked: list[int] = []

    class Counting(Squares):
        def __getitem__(self, i: int) -> Any:
            asked.append(i)
            return super().__getitem__(i)

    iterator = iter(DataLoader(Counting(100), 1, prefetch=3))
    next(iterator)
    time.sleep(0.2)
    assert max(asked) <= 4
    iterator.close()  # type: ignore[attr-defined]


def test_datasets(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", X)
    assert TensorDataset(np.load(tmp_path / "a.npy", mmap_mode="r"))[3][0] == 3 and isinstance(
        TensorDataset(X), Dataset
    )
    tokens = np.arange(11, dtype=np.uint16)
    (tmp_path / "tokens.bin").write_bytes(tokens.tobytes())
    for source in (tokens, tmp_path / "tokens.bin"):
        data = TokenDataset(source, 3)
        assert len(data) == 3 and data[2][0].tolist() == [6, 7, 8] and data[2][1].tolist() == [7, 8, 9]
    assert len(TokenDataset(tokens, 3, stride=1)) == 8 and TokenDataset(tokens, 3, stride=1)[-1][1].tolist() == [
        8,
        9,
        10,
    ]
    both = ConcatDataset([Subset(Squares(), [3, 4]), Squares(2)])
    assert len(both) == 4 and [both[i]["x"] for i in range(4)] == [3, 4, 0, 1]
    parts = random_split(Squares(), [0.55, 0.45])
    assert [len(p) for p in parts] == [6, 4] and sorted(p[i]["x"] for p in parts for i in range(len(p))) == list(
        range(10)
    )
    with pytest.raises(ValueError, match="add up to 9, the dataset has 10"):
        random_split(Squares(), [4, 5])
    with pytest.raises(ValueError, match="lengths are 0 or more"):
        random_split(Squares(), [-1, 11])
    with pytest.raises(ValueError, match="arrays of one common length"):
        TensorDataset(X, X[:3])
    with pytest.raises(ValueError, match="11 tokens are too few for a context of 11"):
        TokenDataset(tokens, 11)


def test_folders_of_images(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (5, 7, 3)).astype(np.uint8)
    for name in ("dog/b.png", "cat/1/a.png", "cat/z.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / name)
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    data = ImageFolder(tmp_path)
    assert data.classes == ["cat", "dog"] and [label for _, label in data.samples] == [0, 0, 1]
    np.testing.assert_allclose(data[0][0], pixels.transpose(2, 0, 1) / 255, rtol=1e-6)
    x, y = next(iter(DataLoader(ImageFolder(tmp_path, size=(4, 4), transform=lambda a: a - 0.5), 3)))
    assert x.shape == (3, 3, 4, 4) and x.dtype.name == "float32" and y.tolist() == [0, 0, 1] and x.min().item() >= -0.5
    (tmp_path / "dog" / "b.png").write_bytes(b"not a picture")
    with pytest.raises(ValueError, match=r"b\.png cannot be read as an image"):
        data[2]
    with pytest.raises(ValueError, match="holds no folders with images"):
        ImageFolder(tmp_path / "dog")


def test_arguments() -> None:
    for bad in (
        {"batch_size": 0},
        {"prefetch": 0},
        {"num_workers": -1},
        {"rank": 2, "world": 2},
        {"devices": ["CPU:0"] * 3, "rank": 0, "world": 2},
    ):
        with pytest.raises(ValueError, match="DataLoader:"):
            DataLoader(Squares(), **bad)  # type: ignore[arg-type]
    for bad in ({"seed": -1}, {"timeout_s": 0}):
        with pytest.raises(ValueError, match="seed must not be negative and timeout_s positive"):
            DataLoader(Squares(), **bad)  # type: ignore[arg-type]
    for bad in ({"batch_size": 2.5}, {"batch_size": None}, {"num_workers": "2"}, {"seed": None}):
        with pytest.raises(TypeError, match=r"DataLoader: \w+ is a whole number, not"):
            DataLoader(Squares(), **bad)  # type: ignore[arg-type]


class Scaled:
    """A dataset of lazy tensors."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return Tensor([float(i), 1.0]) * 2 + 1, i


@pytest.mark.parametrize("workers", [0, 2])
def test_lazy_samples_are_computed_before_a_batch_is_handed_out(workers: int) -> None:
    """They were a part of each step's graph, which was scheduled and compiled anew for each batch."""

    def stacked(samples: list[Any]) -> dict[str, Any]:
        return {"x": Tensor.stack(*[x for x, _ in samples]), "rows": [Tensor([float(i)]) + 1 for _, i in samples]}

    for batch in DataLoader(Scaled(), 3, num_workers=workers, collate_fn=stacked):
        assert all(is_stored(t.uop) for t in (batch["x"], *batch["rows"]))
        first = batch["rows"][0].item() - 1
        assert batch["x"].tolist() == [[2 * (first + i) + 1, 3.0] for i in range(3)]
    found = [(x.numpy().tolist(), i.numpy().tolist()) for x, i in DataLoader(Scaled(), 3, num_workers=workers)]
    assert found == [([[2.0 * i + 1, 3.0] for i in part], part) for part in ([0, 1, 2], [3, 4, 5])]
