"""Series of useful and wasted floating-point operations."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter

from sixfold_runtime.waste import Cause

_LABELS = ("namespace", "policy", "variant", "level", "arm", "outcome", "cause", "estimated")


class FlopsSeries:
    """Of all models."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.flops = Counter(
            "sixfold_flops",
            "Floating-point operations (a multiply-add is 2) of requests that ended, by the analytic model; useful and "
            "wasted together are what was computed; estimated marks waste that a mode which is off would have avoided.",
            _LABELS,
            registry=registry,
        )


class FlopsMetrics:
    """Of one model."""

    def __init__(self, series: FlopsSeries, labels: Mapping[str, str]) -> None:
        """`labels` are namespace, policy and variant."""
        self._series, self._labels = series, tuple(labels[name] for name in _LABELS[:3])
        self._children: dict[tuple[int, str, Cause | None, bool], Counter] = {}

    def add(self, level: int, arm: str, flops: int, cause: Cause | None = None, *, estimated: bool = False) -> None:
        """Count operations of a request: useful ones without a cause, else wasted ones. Nothing is done for 0.

        Args:
            level, arm: of the request.
            estimated: a mode that is off, or a configuration that isn't in use, would have avoided them.
        """
        if not flops:
            return
        key = level, arm, cause, estimated
        child = self._children.get(key)
        if child is None:
            outcome = "useful" if cause is None else "wasted"
            values = (str(level), arm, outcome, cause or "", str(estimated).lower())
            child = self._children[key] = self._series.flops.labels(*self._labels, *values)
        child.inc(flops)
