"""The Prometheus series of early exit. Every label value comes from configured names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from sixfold_runtime.modes.exit_drift import Drift

_VARIANT = ("namespace", "policy", "variant")
_CONFIDENCE_BUCKETS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.925, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999)
_REQUEST_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

CurrentDrift = Callable[[], Drift | None]


class ExitSeries:
    """Where texts leave a classifier. A task slice's texts are not counted: they never leave early."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.exits = Counter(
            "sixfold_exit",
            "Texts labelled by the model's own head or exit heads, by the layer after which they left, the last one "
            "included; the sum of depth times count over the count is the mean of layers run.",
            (*_VARIANT, "level", "depth"),
            registry=registry,
        )
        self.confidence = Histogram(
            "sixfold_exit_confidence",
            "Score of the likeliest label, of every text that was asked at this depth.",
            (*_VARIANT, "depth"),
            buckets=_CONFIDENCE_BUCKETS,
            registry=registry,
        )
        self.seconds = Histogram(
            "sixfold_exit_request_seconds",
            "From arrival in the engine to the label, of texts that left early and of those that ran through.",
            (*_VARIANT, "level", "exited"),
            buckets=_REQUEST_BUCKETS,
            registry=registry,
        )
        self.drift = DriftCollector()
        registry.register(self.drift)


class DriftCollector(Collector):
    """Computed when Prometheus asks; a model without enough texts has no series."""

    def __init__(self) -> None:
        self._models: dict[tuple[str, ...], CurrentDrift] = {}

    def watch(self, labels: Mapping[str, str], current: CurrentDrift) -> None:
        self._models[tuple(labels[name] for name in _VARIANT)] = current

    def collect(self) -> Iterator[GaugeMetricFamily]:
        lengths = GaugeMetricFamily(
            "sixfold_exit_length_drift",
            "Population stability index of the last texts' lengths against the calibration's: above 0.25, exits are "
            "used on other texts than they were calibrated on.",
            labels=_VARIANT,
        )
        rates = GaugeMetricFamily(
            "sixfold_exit_rate_drift",
            "Share of the last texts that left early, less the share on the calibration text.",
            labels=_VARIANT,
        )
        for labels, current in list(self._models.items()):
            if (drift := current()) is not None:
                lengths.add_metric(labels, drift.length_index)
                rates.add_metric(labels, drift.exit_rate_difference)
        yield lengths
        yield rates


class ExitMetrics:
    """The series of one model."""

    def __init__(self, series: ExitSeries, labels: Mapping[str, str]) -> None:
        """`labels`: namespace, policy and variant."""
        self._series = series
        self._labels = dict(labels)
        self._confidence: dict[int, Histogram] = {}
        self._left: dict[tuple[int, int, bool], tuple[Counter, Histogram]] = {}

    def left(self, level: int, depth: int, exited: bool, seconds: float) -> None:
        """A text got its label after `depth` layers, `seconds` after it arrived."""
        key = (level, depth, exited)
        children = self._left.get(key)
        if children is None:
            at = {**self._labels, "level": str(level)}
            children = self._left[key] = (
                self._series.exits.labels(**at, depth=str(depth)),
                self._series.seconds.labels(**at, exited=str(exited).lower()),
            )
        children[0].inc()
        children[1].observe(seconds)

    def asked(self, depth: int, confidences: Iterable[float]) -> None:
        """Confidences of the texts that were asked after `depth` layers; NaN ones are left out."""
        child = self._confidence.get(depth)
        if child is None:
            child = self._confidence[depth] = self._series.confidence.labels(**self._labels, depth=str(depth))
        for confidence in confidences:
            if not math.isnan(confidence):  # it would spoil the sum for ever
                child.observe(confidence)

    def watch_drift(self, current: CurrentDrift) -> None:
        """`current` is asked in Prometheus's thread."""
        self._series.drift.watch(self._labels, current)
