"""`DataLoader`: batches of a dataset, each worker reading its own rows of the common batch.

The rule: `batch_size` counts the samples of one step over all workers. Every epoch has one order of the dataset, that
of (seed, epoch) with `shuffle`; step k takes its samples k·batch_size and on. On several workers a batch is cut as
`Tensor.shard` cuts dim 0, so the numbers of a run do not depend on how many workers there are. The last batch of an
epoch is smaller if the dataset does not divide (a mean over it is a mean over its samples), or left out with
`drop_last`; a TinyJit step has one shape, so give it `drop_last=True`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np

from manygrad.nn.data.collate import default_collate, mapped, realize
from manygrad.nn.data.dataset import Dataset, TensorDataset
from manygrad.nn.data.prefetch import prefetched
from manygrad.nn.data.randomness import draws, sample
from manygrad.tensor.engine import engine
from manygrad.tensor.tensor import Tensor


class DataLoader:
    """Iterating gives the batches of one epoch as Tensors (arrays of a sample; nested as the samples are).

    `devices`: a batch is one tensor of global shape, sharded over them along dim 0 (`manygrad.world.devices`: over all
    workers), of which each worker reads only its own rows. None: this worker's rows, on the default device. `rank`,
    `world`: which part this worker reads, by default its own. `num_workers` threads load up to `prefetch` batches
    ahead; 0 loads when asked. Each `iter()` begins an epoch, the next one after a `break` or an error as well; after
    `load_state_dict` the first one goes on where the state was taken. `state_dict()` says which batch comes next; it
    holds for any number of workers. A dataset that draws random numbers takes them from `nn.data.rng()`: they are the
    same ones in every run; one that draws them from somewhere else is loaded by one thread, so that their order is.

    Large: PyTorch's options.
    """

    def __init__(self, dataset: Dataset, batch_size: int = 1, shuffle: bool = False, seed: int = 0,
                 drop_last: bool = False, *, devices: Sequence[str] | None = None, rank: int | None = None,
                 world: int | None = None, collate_fn: Callable[[list[Any]], Any] = default_collate,
                 num_workers: int = 1, prefetch: int = 2, timeout_s: float = 120.0):  # fmt: skip
        for name, value in (
            ("batch_size", batch_size),
            ("num_workers", num_workers),
            ("prefetch", prefetch),
            ("seed", seed),
        ):
            if not isinstance(value, (int, np.integer)):
                raise TypeError(f"DataLoader: {name} is a whole number, not {value!r}")
        if seed < 0 or not timeout_s > 0:
            raise ValueError(
                f"DataLoader: seed must not be negative and timeout_s positive, got {seed} and {timeout_s}"
            )
        own_rank, own_world = engine().workers()
        self.rank, self.world = own_rank if rank is None else rank, own_world if world is None else world
        if batch_size < 1 or num_workers < 0 or prefetch < 1:
            raise ValueError(
                f"DataLoader: batch_size and prefetch must be positive and num_workers not negative, got {batch_size}, "
                f"{prefetch} and {num_workers}"
            )
        if not 0 <= self.rank < self.world:
            raise ValueError(f"DataLoader: rank {self.rank} is outside a world of {self.world}")
        self.dataset, self.batch_size, self.shuffle, self.seed, self.drop_last = (
            dataset,
            batch_size,
            shuffle,
            seed,
            drop_last,
        )
        self.devices = None if devices is None else tuple(devices)
        if self.devices is not None and len(self.devices) % self.world:
            raise ValueError(f"DataLoader: {len(self.devices)} devices do not divide among {self.world} workers")
        self.collate_fn, self.num_workers, self.prefetch, self.timeout_s = collate_fn, num_workers, prefetch, timeout_s
        self.epoch = self.position = 0  # of the batch that comes next
        self._begin = (0, 0)  # where the next iterator begins
        self._in_turn: bool | None = None  # whether the dataset is loaded by one thread; None: not known yet

    def __len__(self) -> int:
        """Batches of an epoch."""
        n = len(self.dataset)
        return n // self.batch_size if self.drop_last else -(-n // self.batch_size)

    def order(self, epoch: int) -> np.ndarray:
        """The dataset's rows in the order of an epoch."""
        n = len(self.dataset)
        return np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(n) if self.shuffle else np.arange(n)

    def part(self, size: int) -> range:
        """Which rows of a batch of `size` this worker reads: those that `shard` puts on its devices."""
        parts = len(self.devices) if self.devices is not None else self.world
        own = parts // self.world
        return range(-(-self.rank * own * size // parts), -(-(self.rank + 1) * own * size // parts))

    def __iter__(self) -> Iterator[Any]:
        """One epoch, or what is left of the one of a state that was loaded."""
        self.epoch, self.position = self._begin
        self._begin = (self.epoch + 1, 0)
        return self._batches(self.epoch, self.position)

    def _batches(self, epoch: int, first: int) -> Iterator[Any]:
        order = self.order(epoch)
        count = max(len(self) - first, 0)

        def load(i: int) -> tuple[int, Any]:
            rows = order[(first + i) * self.batch_size :][: self.batch_size]
            return len(rows), self._read(rows[self.part(len(rows)).start : self.part(len(rows)).stop], rows, epoch)

        batches = self._loaded(count, load)
        try:
            for i, (size, batch) in enumerate(batches):
                self.epoch, self.position = (epoch, first + i + 1) if i + 1 < count else (epoch + 1, 0)
                yield self._placed(batch, size)
            if count == 0:
                self.epoch, self.position = epoch + 1, 0
        finally:
            batches.close()

    def _loaded(self, count: int, load: Callable[[int], Any]) -> Generator[Any, None, None]:
        """load(0), load(1), ..., by as many threads as there are to be."""
        if self.num_workers == 0:
            yield from map(load, range(count))
            return
        begun = 0
        if self.num_workers > 1 and self._in_turn is None and count:  # (nothing else runs while this one is loaded)
            observed = lambda i: draws(lambda: load(i), self.dataset, self.collate_fn)  # noqa: E731
            ((value, self._in_turn),) = prefetched(1, observed, 1, 1, self.timeout_s)
            if self._in_turn:
                warnings.warn(
                    "DataLoader: the dataset draws from a random generator that threads share, so one thread loads it, "
                    f"not {self.num_workers}, and runs can be repeated; draw from nn.data.rng() to load it with all",
                    stacklevel=4,
                )
            yield value
            begun = 1
        threads = 1 if self._in_turn else self.num_workers
        yield from prefetched(count - begun, lambda i: load(i + begun), threads, self.prefetch, self.timeout_s)

    def _read(self, rows: np.ndarray, batch: np.ndarray, epoch: int) -> Any:
        """The samples `rows`, collated; of an empty part the arrays have no rows."""
        if isinstance(self.dataset, TensorDataset) and self.collate_fn is default_collate:
            return self.dataset.rows(rows)
        wanted = (rows if len(rows) else batch[:1]).tolist()
        try:
            with sample(self.seed, epoch, wanted[0]):
                many = getattr(self.dataset, "__getitems__", None)
                return self._collated(many(wanted) if many is not None else self._each(wanted, epoch), len(rows))
        except Exception as error:
            error.add_note(f"while loading the samples {wanted[:8]}{'...' if len(wanted) > 8 else ''}")
            if isinstance(error, StopIteration):  # (which a loop takes for the end of the epoch)
                raise RuntimeError(
                    "the dataset raised StopIteration; of a sample that is not there raise an IndexError"
                ) from error
            raise

    def _each(self, rows: list[int], epoch: int) -> list[Any]:
        found = []
        for i in rows:
            with sample(self.seed, epoch, i):
                found.append(self.dataset[i])
        return found

    def _collated(self, samples: list[Any], size: int) -> Any:
        out = self.collate_fn(samples)
        realize(out)
        return out if size else mapped(out, lambda a: a[:0])

    def _placed(self, batch: Any, size: int) -> Any:
        if self.devices is None:
            return mapped(batch, Tensor)
        devices, part = self.devices, self.part(size)

        def globally(a: np.ndarray) -> Tensor:
            """(size, ...) sharded. Other workers' rows are never read here, so they stay empty."""
            if len(part) == size:
                return Tensor(a).shard(devices, 0)
            whole = np.zeros((size, *a.shape[1:]), a.dtype)
            whole[part.start : part.stop] = a
            t = Tensor(whole)
            engine().differs_by_rank(t.uop)
            return t.shard(devices, 0)

        return mapped(batch, globally)

    # *** where it stands ***

    def _kind(self) -> dict[str, Any]:
        return {
            "samples": len(self.dataset),
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "drop_last": self.drop_last,
        }

    def state_dict(self) -> dict[str, Any]:
        """The next batch: {"epoch", "position", ...}. Batches loaded ahead but not taken do not count."""
        return {"epoch": self.epoch, "position": self.position, **self._kind()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on there; ValueError if dataset, batch size or order are not those of the state.
        Also on another number of workers."""
        wrong = [f"{k} is {v} here, {state.get(k)} in the state" for k, v in self._kind().items() if state.get(k) != v]
        if wrong:
            raise ValueError(f"DataLoader: {'; '.join(wrong)}")
        if not 0 <= state["position"] <= len(self) or state["epoch"] < 0:
            raise ValueError(
                f"DataLoader: epoch {state['epoch']}, position {state['position']} is outside epochs of {len(self)} "
                "batches"
            )
        self.epoch, self.position = self._begin = int(state["epoch"]), int(state["position"])

    def __repr__(self) -> str:
        return (
            f"DataLoader({len(self.dataset)} samples in batches of {self.batch_size}, epoch {self.epoch}, batch "
            f"{self.position} of {len(self)} next)"
        )
