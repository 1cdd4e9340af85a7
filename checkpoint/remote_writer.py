"""Writes a checkpoint to remote storage, where a folder cannot be renamed at once.

1. Each rank writes its parts to `DIR/parts-00000010.JOB.ATTEMPT/`, then a description of them, `part-00001.json`.
2. Rank 0 waits for the descriptions of all ranks, and writes `DIR/step-00000010/index.json`, which names these files.
   That is the commit: an object that is put at once is there whole or not at all, and where a store is worse than that
   the checksum of the index says so.
3. It writes `committed` beside the parts, which the other ranks wait to see.
"""

from __future__ import annotations

import json
import re
import warnings
from contextlib import suppress

from manygrad.checkpoint.disk_errors import errors_of
from manygrad.checkpoint.index import NAME, encode, merged, read_index
from manygrad.checkpoint.pruning import to_be_removed
from manygrad.checkpoint.reader import Saved, committed
from manygrad.checkpoint.store import RemoteStore, remote_store
from manygrad.checkpoint.writer import Attempt, Snapshot, part_name
from manygrad.errors import CheckpointError, OtherRankFailed

DONE = "committed"
_PARTS = re.compile(r"parts-(\d+)\.(.+)\.(\d+)")


class RemoteAttempt(Attempt):
    """One save into the URL `folder`."""

    def write(self, snapshot: Snapshot) -> str:
        name = f"{snapshot.step:08d}"
        at = f"{self.folder}/parts-{name}.{self.job}.{self.number}"
        store = remote_store(self.folder)
        try:
            with errors_of("saving", at):
                self._clear_remote(store)
                store.make_folder(at)
                data: list[memoryview] = []
                about = snapshot.part_file(data.append)
                store.write(f"{at}/{part_name(self.rank)}", data)
                store.write(f"{at}/part-{self.rank:05d}.json", [memoryview(json.dumps(about).encode())])
                return self._commit_remote(store, at, snapshot) if self.rank == 0 else self._wait_until_done(store, at)
        except OtherRankFailed:
            raise
        except BaseException:
            with suppress(OSError):
                store.write(f"{at}/failed-{self.rank:05d}", [memoryview(b"failed")])
            raise

    def look(self, at: str) -> dict[str, int]:
        return remote_store(self.folder).sizes(at)

    def _commit_remote(self, store: RemoteStore, at: str, snapshot: Snapshot) -> str:
        pieces = [f"part-{rank:05d}.json" for rank in range(self.size)]
        self._wait(at, lambda there: all(p in there for p in pieces))
        read = [json.loads(store.read(f"{at}/{p}")) for p in pieces]
        index = merged(read, snapshot.step, snapshot.state)
        above = f"../{at.rpartition('/')[2]}/"
        index["files"] = {above + file: about for file, about in index["files"].items()}
        for t in index["tensors"].values():
            for part in t["parts"]:
                part["file"] = above + part["file"]
        again = [s for s in committed(self.folder) if s.step == snapshot.step]
        path = f"{self.folder}/step-{snapshot.step:08d}" + (f".{again[0].revision + 1}" if again else "")
        store.make_folder(path)
        store.write(f"{path}/{NAME}", [memoryview(encode(index))])
        store.write(f"{at}/{DONE}", [memoryview(path.encode())])
        if self.keep is not None:
            try:
                self._prune_remote(store)
            except OSError as e:
                warnings.warn(f"older checkpoints in {self.folder} could not be removed: {e}", stacklevel=2)
        return path

    def _wait_until_done(self, store: RemoteStore, at: str) -> str:
        self._wait(at, lambda there: DONE in there)
        return store.read(f"{at}/{DONE}").decode()

    def _clear_remote(self, store: RemoteStore) -> None:
        """Takes away the parts of attempts that were cut short."""
        if self.rank:
            return
        try:
            names = store.names(self.folder)
        except FileNotFoundError:
            return
        for name in names:
            found = _PARTS.fullmatch(name)
            if found is None or (found[2] == self.job and int(found[3]) >= self.number):
                continue
            with suppress(OSError, CheckpointError):
                if DONE not in store.sizes(f"{self.folder}/{name}") and not self._is_used(name, int(found[1])):
                    store.remove(f"{self.folder}/{name}")

    def _is_used(self, parts: str, step: int) -> bool:
        """Whether a checkpoint has these parts. CheckpointError: that cannot be read."""
        saved = [s for s in committed(self.folder) if s.step == step]
        return any(file.startswith(f"../{parts}/") for s in saved for file in read_index(s.path)["files"])

    def _prune_remote(self, store: RemoteStore) -> None:
        """Removes all but the newest `keep` whole ones, the index first: a half is never taken for a checkpoint."""

        def remove(saved: Saved) -> None:
            folders: set[str] = set()
            with suppress(CheckpointError):
                folders = {file.split("/")[1] for file in read_index(saved.path)["files"]}
            store.remove(saved.path)
            for folder in folders:
                store.remove(f"{self.folder}/{folder}/{DONE}")
                store.remove(f"{self.folder}/{folder}")

        assert self.keep is not None
        for saved in to_be_removed(self.folder, self.keep, verify=False):
            remove(saved)
