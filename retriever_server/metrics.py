"""What `GET /metrics` shows, in Prometheus form. One registry an app, so that several live in one process."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "retriever_requests", "Requests by route and status", ["route", "status"], registry=self.registry
        )
        self.rejected = Counter("retriever_rejected", "Refused requests by reason", ["reason"], registry=self.registry)
        self.queries = Counter("retriever_queries", "Queries received", registry=self.registry)
        cache = Counter(
            "retriever_cache",
            "Queries answered from the cache (hit), by a search under way (shared), by one of their own (miss)",
            ["result"],
            registry=self.registry,
        )
        self.cache_hits = cache.labels("hit")
        self.cache_shared = cache.labels("shared")
        self.cache_misses = cache.labels("miss")
        seconds = Histogram(
            "retriever_seconds",
            "Seconds by stage: a request's wait in the queue, a batch's search, a whole request",
            ["stage"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.queue_seconds = seconds.labels("queue")
        self.search_seconds = seconds.labels("search")
        self.request_seconds = seconds.labels("request")
        self.batch_size = Histogram(
            "retriever_batch_size", "Queries searched together", buckets=_SIZES, registry=self.registry
        )
        self.queue_depth = Gauge("retriever_queue_depth", "Queries waiting", registry=self.registry)
        self.dropped = Counter(
            "retriever_dropped_queries", "Queries nobody waited for any more", registry=self.registry
        )
        self.failed = Counter("retriever_failed_queries", "Queries the retriever failed on", registry=self.registry)

    def render(self) -> bytes:
        return generate_latest(self.registry)
