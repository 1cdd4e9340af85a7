"""The model's loop: tells what was written, takes work, writes a token of every text, and again.

On several ranks all of them run it in step. Rank 0 hears what each replica has written (`Ranks.gather`) and tells all
what comes and goes (`Ranks.share`). The ranks of a replica make the same tokens; vectors are made by all ranks
together.
"""

from __future__ import annotations

from manygrad.llm.embedder import Embedder
from manygrad.llm.engine.batch import Batch, SampledToken
from manygrad.llm.serve.ranks import Ranks
from manygrad.llm.serve.scheduler import EmbedRequest, Report, Scheduler, StepWork


def run(batch: Batch, embedder: Embedder | None, ranks: Ranks, scheduler: Scheduler | None) -> None:
    """Until the scheduler is drained. `batch`: of this rank's replica; `scheduler`: of rank 0, None elsewhere."""
    made: list[SampledToken] = []
    while True:
        reports = ranks.gather(report(batch, made))
        if scheduler is not None:
            scheduler.hear(reports)
        work = ranks.share(scheduler.take() if scheduler is not None else StepWork())
        for key in work.cancel:
            batch.cancel(key)
        for replica, key, request in work.admit:
            if replica == ranks.replica:
                batch.admit(key, request)
        if work.stop:
            return
        for key, texts in work.embed:
            assert embedder is not None
            rows = embedder(texts)
            if scheduler is not None:
                scheduler.give([(key, EmbedRequest(rows, sum(map(len, texts))))])
        made = batch.step()


def report(batch: Batch, made: list[SampledToken]) -> Report:
    return Report(tuple(made), batch.busy, batch.free, batch.pages.unpromised, len(batch.pages.free))
