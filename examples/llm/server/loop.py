"""The model's loop: takes work, writes a token of every text, hands the tokens out, and again.

On several ranks all of them run it with the same work, which rank 0 tells (`Ranks.share`), and make the same tokens.
"""

from __future__ import annotations

from batch import Batch
from embed import Embedder
from server.desk import Desk, Vectors, Work
from server.ranks import Ranks


def run(batch: Batch, embedder: Embedder | None, ranks: Ranks, desk: Desk | None) -> None:
    """Until the desk is drained. `desk`: of rank 0, None elsewhere."""
    while True:
        free = batch.free, batch.pages.unpromised
        work = ranks.share(desk.take(*free, bool(batch.busy)) if desk is not None else Work())
        for key in work.cancel:
            batch.cancel(key)
        for key, request in work.admit:
            batch.admit(key, request)
        if work.stop:
            return
        for key, texts in work.embed:
            assert embedder is not None
            rows = embedder(texts)
            if desk is not None:
                desk.give([(key, Vectors(rows, sum(len(embedder.ids(t)) for t in texts)))])
        made = batch.step()
        if desk is not None:
            desk.running, desk.free_pages = batch.busy, len(batch.pages.free)
            desk.give([(m.key, m) for m in made])
