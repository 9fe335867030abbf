"""What `GET /metrics` shows. Plain numbers, put into Prometheus's form when asked: a request touches a dozen of them.
All belong to the event loop's thread."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add_to(self, family: HistogramMetricFamily, *labels: str) -> None:
        bounds = [*map(str, self._bounds), "+Inf"]
        family.add_metric(labels, list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)


class Metrics(Collector):
    """One registry an app, so that several live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests: Counter[tuple[str, int]] = Counter()
        """By route and status."""
        self.rejected: Counter[str] = Counter()
        """By reason."""
        self.cache: Counter[str] = Counter()
        """Queries answered from the cache (hit), by a search under way (shared), by one of their own (miss)."""
        self.queries = 0
        self.dropped = 0
        self.failed = 0
        self.queue_depth = 0
        self.batch_size = Histogram(_SIZES)
        self.queue_seconds = Histogram(_SECONDS)
        self.request_seconds = Histogram(_SECONDS)
        self.stage_seconds: dict[str, Histogram] = {}
        self.registry.register(self)

    def stage(self, name: str) -> Histogram:
        """Seconds of a batch in one of the retriever's stages."""
        return self.stage_seconds.setdefault(name, Histogram(_SECONDS))

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("retriever_requests", "Requests by route and status", labels=["route", "status"])
        for (route, status), count in self.requests.items():
            requests.add_metric([route, str(status)], count)
        yield requests
        yield _counted("retriever_rejected", "Refused requests by reason", "reason", self.rejected)
        kinds = {"hit": 0, "shared": 0, "miss": 0}
        yield _counted("retriever_cache", "Queries by how they were answered", "result", {**kinds, **self.cache})
        yield CounterMetricFamily("retriever_queries", "Queries received", value=self.queries)
        yield CounterMetricFamily("retriever_dropped_queries", "Queries nobody waited for any more", value=self.dropped)
        yield CounterMetricFamily("retriever_failed_queries", "Queries the retriever failed on", value=self.failed)
        yield GaugeMetricFamily("retriever_queue_depth", "Queries waiting", value=self.queue_depth)
        sizes = HistogramMetricFamily("retriever_batch_size", "Queries searched together")
        self.batch_size.add_to(sizes)
        yield sizes
        seconds = HistogramMetricFamily(
            "retriever_seconds",
            "Seconds by stage: a request's wait in the queue, a batch's stages, a whole request",
            labels=["stage"],
        )
        stages = {"queue": self.queue_seconds, **self.stage_seconds, "request": self.request_seconds}
        for stage, histogram in stages.items():
            histogram.add_to(seconds, stage)
        yield seconds


def _counted(name: str, what: str, label: str, counts: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, what, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family
