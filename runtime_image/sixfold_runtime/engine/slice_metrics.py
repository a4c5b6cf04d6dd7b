"""Series of task slices. The label `task` only ever holds names that the configuration has."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_TASK = ("namespace", "policy", "variant", "task")
_LOAD_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_RESIDENCY_BUCKETS = (0.1, 1, 10, 60, 300, 600, 1800, 2820, 3600, 7200, 14400, 43200, 86400)
"""47 minutes among them: so long a cold task stayed for a test script once."""


class SliceSeries:
    """Registered once a process."""

    def __init__(self, registry: CollectorRegistry, memory: Gauge) -> None:
        self.memory = memory
        self.loads = Counter(
            "sixfold_slice_loads",
            "Loads of task slices; result is ok or failed.",
            (*_TASK, "result"),
            registry=registry,
        )
        self.load_seconds = Histogram(
            "sixfold_slice_load_seconds",
            "Mapping and warming up a slice.",
            _TASK,
            buckets=_LOAD_BUCKETS,
            registry=registry,
        )
        self.residency_seconds = Histogram(
            "sixfold_slice_residency_seconds",
            "How long a slice had been in memory when it was unloaded.",
            _TASK,
            buckets=_RESIDENCY_BUCKETS,
            registry=registry,
        )
        self.age_seconds = Gauge(
            "sixfold_slice_age_seconds",
            "How long a slice has been in memory; 0 while it isn't.",
            _TASK,
            registry=registry,
        )
        self.resident_bytes = Gauge(
            "sixfold_slice_resident_bytes", "Bytes of a slice in memory; 0 while it isn't.", _TASK, registry=registry
        )
        self.single_tenant_seconds = Gauge(
            "sixfold_slice_single_tenant_seconds",
            "How long a slice that isn't pinned has been in memory for one tenant only; 0 where that isn't so.",
            _TASK,
            registry=registry,
        )
        self.requests = Counter(
            "sixfold_slice_requests",
            "Requests for a task: hit if its slice was in memory, miss if they had to wait for it.",
            (*_TASK, "result"),
            registry=registry,
        )


class SliceNumbers(Protocol):
    """Of a pool, read by Prometheus' thread."""

    @property
    def resident_bytes(self) -> int: ...

    def slice_bytes(self, task: str) -> int: ...

    def age_seconds(self, task: str) -> float: ...

    def single_tenant_seconds(self, task: str) -> float: ...


class SliceMetrics:
    """Of one model's pool."""

    def __init__(self, series: SliceSeries, labels: Mapping[str, str]) -> None:
        self._series = series
        self._labels = labels
        self._watched: set[str] = set()

    def loaded(self, task: str, seconds: float) -> None:
        self._series.loads.labels(**self._labels, task=task, result="ok").inc()
        self._series.load_seconds.labels(**self._labels, task=task).observe(seconds)

    def failed(self, task: str) -> None:
        self._series.loads.labels(**self._labels, task=task, result="failed").inc()

    def unloaded(self, task: str, resident_seconds: float) -> None:
        self._series.residency_seconds.labels(**self._labels, task=task).observe(resident_seconds)

    def requested(self, task: str, was_there: bool) -> None:
        self._series.requests.labels(**self._labels, task=task, result="hit" if was_there else "miss").inc()

    def watch(self, pool: SliceNumbers, tasks: set[str]) -> None:
        """Read the pool's numbers whenever Prometheus asks, for these tasks and no others."""
        series, labels = self._series, self._labels
        series.memory.labels(**labels, kind="slices").set_function(lambda: pool.resident_bytes)
        for gauge, read in (
            (series.resident_bytes, pool.slice_bytes),
            (series.age_seconds, pool.age_seconds),
            (series.single_tenant_seconds, pool.single_tenant_seconds),
        ):
            for task in self._watched - tasks:
                gauge.remove_by_labels({**labels, "task": task})
            for task in tasks - self._watched:
                gauge.labels(**labels, task=task).set_function(partial(read, task))
        self._watched = set(tasks)

    def unwatch(self) -> None:
        """The pool is gone, and nothing of the model may be kept in memory by its numbers."""
        self._series.memory.labels(**self._labels, kind="slices").set_function(lambda: 0.0)
        for gauge in (self._series.resident_bytes, self._series.age_seconds, self._series.single_tenant_seconds):
            for task in self._watched:
                gauge.remove_by_labels({**self._labels, "task": task})
        self._watched = set()
