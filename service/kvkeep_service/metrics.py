"""What Prometheus is shown: counts of this process, gathered when it asks.

Names carry their unit last; no label names a tenant, a context or a question. What passes by
(answers, problems) is counted here; everything else is asked of its owner at each scrape.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvkeep_service.build_counts import LOSS_NATS, BuildCounts
from kvkeep_service.engine_counts import EngineCounts
from kvkeep_service.ports import AnswerEvent, CacheCounts, Worker, WorkerStats
from kvkeep_storage.disk_tier import DiskStats

# From a resident cache on a GPU to a cold one on a CPU.
_FIRST_TOKEN_SECONDS: Final = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """One registry for one application; nothing is shared with other libraries."""

    def __init__(
        self,
        worker: Worker,
        swept: Mapping[str, int],
        disk_stats: Callable[[], DiskStats] | None,
    ) -> None:
        """``swept`` is ``Upkeep.swept``; ``disk_stats`` is None where there is no disk tier."""
        self._registry = CollectorRegistry()
        self._problems = Counter(
            "kvkeep_problems_total",
            "Errors that routes have answered with, by code.",
            ["code"],
            registry=self._registry,
        )
        self._answers = Counter(
            "kvkeep_answers_total",
            "Whole answers, by where their cache was.",
            ["source"],
            registry=self._registry,
        )
        self._tokens = Counter(
            "kvkeep_tokens_total",
            "Tokens of whole answers: cached ones, read ones of questions, generated ones.",
            ["kind"],
            registry=self._registry,
        )
        self._first_token = Histogram(
            "kvkeep_first_token_seconds",
            "From the arrival of a question to its first token, by where its cache was.",
            ["source"],
            buckets=_FIRST_TOKEN_SECONDS,
            registry=self._registry,
        )
        self._registry.register(_Snapshot(worker, swept, disk_stats))

    def problem(self, code: str) -> None:
        """Count an error."""
        self._problems.labels(code).inc()

    def answered(self, answer: AnswerEvent) -> None:
        """Count a whole answer."""
        source = answer.timings.source
        self._answers.labels(source).inc()
        self._first_token.labels(source).observe(answer.timings.ttft_ms / 1000)
        self._tokens.labels("cached").inc(answer.cached_tokens)
        self._tokens.labels("question").inc(answer.prompt_tokens - answer.cached_tokens)
        self._tokens.labels("generated").inc(answer.completion_tokens)

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format, as of now."""
        return generate_latest(self._registry)


class _Snapshot(Collector):
    """Turns the counts that their owners keep into metrics."""

    def __init__(
        self,
        worker: Worker,
        swept: Mapping[str, int],
        disk_stats: Callable[[], DiskStats] | None,
    ) -> None:
        self._worker = worker
        self._swept = swept
        self._disk_stats = disk_stats

    def collect(self) -> Iterator[Metric]:
        """As ``Collector.collect``."""
        yield from _of_worker(self._worker.stats())
        yield from _of_engine(self._worker.engine_counts())
        yield from _of_builds(self._worker.build_counts())
        yield from _of_caches(self._worker.cache_counts())
        kernels = self._worker.model.kernels
        healthy = GaugeMetricFamily(
            "kvkeep_kernels_healthy",
            "1 when the kernels that should serve passed their test at the start.",
            labels=["backend"],
        )
        healthy.add_metric([kernels.backend], float(kernels.is_healthy))
        yield healthy
        yield from _of_sweeps(self._swept)
        if self._disk_stats is not None:
            yield from _of_disk(self._disk_stats())


def _of_worker(stats: WorkerStats) -> Iterator[Metric]:
    yield _gauge("resident_bytes", "K and V held in memory or being filled.", stats.resident_bytes)
    yield _gauge("resident_caches", "Caches a question would find.", stats.resident_caches)
    yield _gauge("host_bytes", "Caches kept in host memory for a GPU.", stats.host_bytes)
    yield _gauge("host_caches", "Caches whose rows are in host memory.", stats.host_caches)
    yield _gauge("pinned_caches", "Caches in use; 0 at idle.", stats.pinned_caches)
    yield _gauge("running_loads", "Caches being brought; 0 at idle.", stats.running_loads)
    yield _gauge("running_queries", "Questions in the engine.", stats.running_queries)
    yield _gauge("waiting_queries", "Questions that wait for the engine.", stats.waiting_queries)
    yield _gauge("sessions", "Answers that can be continued.", stats.sessions)
    yield _gauge("session_bytes", "K and V kept to continue answers.", stats.session_bytes)
    yield _gauge("running_builds", "Builds of this process.", stats.running_builds)
    yield _gauge(
        "reserved_bytes", "Kept free for builds and tails; 0 at idle.", stats.reserved_bytes
    )
    yield _gauge("engine_alive", "1 while the engine's thread runs.", stats.alive)


def _of_engine(counts: EngineCounts) -> Iterator[Metric]:
    seconds = CounterMetricFamily(
        "kvkeep_engine_seconds", "Seconds of the engine's thread, by work.", labels=["work"]
    )
    seconds.add_metric(["answers"], counts.answer_seconds)
    seconds.add_metric(["builds"], counts.build_seconds)
    yield seconds
    steps = CounterMetricFamily(
        "kvkeep_gpu_steps", "Decoding steps on a GPU, by how they ran.", labels=["kind"]
    )
    steps.add_metric(["replayed"], counts.steps.replayed)
    steps.add_metric(["launched"], counts.steps.launched)
    yield steps
    failed = counts.steps.graphs_failed
    yield _counter("graphs_failed", "1 once steps are replayed from no graph any more.", failed)
    yield _counter("out_of_memory", "Forwards that found no memory.", counts.out_of_memory)
    yield _counter("shed_answers", "Answers ended for want of memory.", counts.shed)


def _of_builds(counts: BuildCounts) -> Iterator[Metric]:
    ended = CounterMetricFamily(
        "kvkeep_builds", "Builds that ended, by how: committed, or a code.", labels=["outcome"]
    )
    for outcome, count in counts.ended.items():
        ended.add_metric([outcome], count)
    seconds = CounterMetricFamily(
        "kvkeep_build_seconds", "Seconds of committed builds, by phase.", labels=["phase"]
    )
    for phase, spent in counts.seconds.items():
        seconds.add_metric([phase.removesuffix("_s")], spent)
    names = [*map(str, LOSS_NATS), "+Inf"]
    lost = HistogramMetricFamily(
        "kvkeep_build_loss_nats",
        "What committed builds lost at their ratio, nats per token, where it was measured.",
        buckets=list(zip(names, accumulate(counts.losses), strict=True)),
        sum_value=counts.loss_sum,
    )
    yield from (ended, seconds, lost)


def _of_caches(counts: CacheCounts) -> Iterator[Metric]:
    yield _counter("cache_hits", "Questions whose cache was in memory.", counts.hits)
    misses = CounterMetricFamily(
        "kvkeep_cache_misses", "Questions whose cache was not in memory, by why.", labels=["reason"]
    )
    for reason, count in counts.misses.items():
        misses.add_metric([reason], count)
    yield misses
    yield _counter("cache_evictions", "Caches given up for the memory budget.", counts.evictions)
    loads = CounterMetricFamily(
        "kvkeep_loads", "Caches brought to memory, by where from.", labels=["source"]
    )
    seconds = CounterMetricFamily(
        "kvkeep_load_seconds", "Seconds of these loads, added up.", labels=["source"]
    )
    size_bytes = CounterMetricFamily(
        "kvkeep_load_bytes", "Bytes that these loads read.", labels=["source"]
    )
    for source, load in counts.loads.items():
        loads.add_metric([source], load.loads)
        seconds.add_metric([source], load.seconds)
        size_bytes.add_metric([source], load.read_bytes)
    failures = CounterMetricFamily(
        "kvkeep_load_failures", "Loads that failed, by the error's code.", labels=["code"]
    )
    for code, failed in counts.failures.items():
        failures.add_metric([code], failed)
    yield from (loads, seconds, size_bytes, failures)


def _of_sweeps(swept: Mapping[str, int]) -> Iterator[Metric]:
    removed = CounterMetricFamily(
        "kvkeep_swept", "What sweeps have removed from the store.", labels=["what"]
    )
    for what, count in swept.items():
        if what != "freed_bytes":
            removed.add_metric([what], count)
    yield removed
    yield _counter("swept_bytes", "Bytes that sweeps have freed.", swept.get("freed_bytes", 0))


def _of_disk(stats: DiskStats) -> Iterator[Metric]:
    yield _gauge("disk_bytes", "Bytes of the disk cache.", stats.size_bytes)
    yield _gauge("disk_budget_bytes", "Most bytes it may hold.", stats.budget_bytes)
    yield _gauge("disk_entries", "Files of the disk cache.", stats.entries)
    yield _gauge("disk_filling", "Files being fetched into it; 0 at idle.", stats.filling)
    yield _counter("disk_hits", "Reads answered by a whole copy on disk.", stats.hits)
    yield _counter("disk_misses", "Reads that had to go to the store.", stats.misses)
    yield _counter("disk_evictions", "Files given up for its budget.", stats.evictions)
    yield _counter("disk_errors", "Trouble of the disk, which costs a copy.", stats.errors)
    yield _counter("disk_forgotten", "Generations dropped for wrong bytes.", stats.forgotten)
    moved = CounterMetricFamily(
        "kvkeep_disk_read_bytes", "Bytes read through the disk cache, by origin.", labels=["origin"]
    )
    seconds = CounterMetricFamily(
        "kvkeep_disk_read_seconds", "Seconds of these reads, added up.", labels=["origin"]
    )
    for origin, size_bytes, spent in (
        ("disk", stats.disk_bytes, stats.disk_seconds),
        ("store", stats.store_bytes, stats.store_seconds),
    ):
        moved.add_metric([origin], size_bytes)
        seconds.add_metric([origin], spent)
    yield from (moved, seconds)


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"kvkeep_{name}", help_text, value=value)


def _counter(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(f"kvkeep_{name}", help_text, value=value)
