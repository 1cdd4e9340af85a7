"""Counters, gauges and histograms in Prometheus' text format (version 0.0.4)."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from manygrad.llm.serve.scheduler import Report

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass
class LatencyHistogram:
    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    total: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.total += seconds

    def lines(self, name: str) -> Iterator[str]:
        so_far = 0
        for limit, count in zip((*SECONDS, "+Inf"), self.counts):
            so_far += count
            yield f'{name}_bucket{{le="{limit}"}} {so_far}'
        yield f"{name}_sum {self.total}"
        yield f"{name}_count {so_far}"


@dataclass
class Metrics:
    """Written by the event loop alone."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)  # by path and status
    prompt_tokens: int = 0
    written_tokens: int = 0
    first: LatencyHistogram = field(default_factory=LatencyHistogram)
    between: LatencyHistogram = field(default_factory=LatencyHistogram)

    def text(self, reports: Sequence[Report], placed: Mapping[int, int], waiting: int, slots: int, pages: int) -> str:
        """`reports` of the replicas, each with so many `slots` and `pages` and with the texts that it was given
        (`placed`); `waiting` texts are with none."""
        replicas = len(reports)
        lines = ["# TYPE llm_requests_total counter", "# HELP llm_requests_total answers by path and status"]
        for (path, status), count in sorted(self.requests.items()):
            lines.append(f'llm_requests_total{{path="{path}",status="{status}"}} {count}')
        for name, kind, value, meaning in [
            ("llm_prompt_tokens_total", "counter", self.prompt_tokens, "tokens of prompts"),
            ("llm_written_tokens_total", "counter", self.written_tokens, "tokens that were written"),
            ("llm_texts_running", "gauge", sum(r.running for r in reports), "texts that are being written"),
            ("llm_texts_waiting", "gauge", waiting, "texts that wait for a slot and pages"),
            ("llm_slots", "gauge", replicas * slots, "texts that can be written at once"),
            ("llm_pages", "gauge", replicas * pages, "pages for keys and values of texts"),
            ("llm_pages_free", "gauge", sum(r.pages for r in reports), "pages that no text has"),
        ]:
            lines += [f"# TYPE {name} {kind}", f"# HELP {name} {meaning}", f"{name} {value}"]
        for name, kind, values, meaning in [
            ("llm_replica_texts_running", "gauge", [r.running for r in reports], "texts that a replica writes"),
            ("llm_replica_texts_total", "counter", [placed.get(i, 0) for i in range(replicas)], "texts it was given"),
        ]:
            lines += [f"# TYPE {name} {kind}", f"# HELP {name} {meaning}"]
            lines += [f'{name}{{replica="{i}"}} {value}' for i, value in enumerate(values)]
        for name, histogram, meaning in [
            ("llm_first_token_seconds", self.first, "from a request to its first token"),
            ("llm_between_tokens_seconds", self.between, "between two tokens of a text"),
        ]:
            lines += [f"# TYPE {name} histogram", f"# HELP {name} {meaning}", *histogram.lines(name)]
        return "\n".join(lines) + "\n"
