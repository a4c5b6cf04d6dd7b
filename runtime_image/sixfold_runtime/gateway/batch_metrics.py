"""Prometheus series of the gateway's queue and of the batches that leave it."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from sixfold_api.gateway import Priority
from sixfold_runtime.modes.batching import Batch

_POLICY = ("namespace", "policy")
_WAIT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_REQUESTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)


class Outcome(StrEnum):
    """How a request left the queue."""

    SENT = "sent"
    EXPIRED = "expired"
    """Its deadline was over."""
    REFUSED = "refused"
    """The queue was full when it came."""
    DISPLACED = "displaced"
    """It made room for one of a tenant that had fewer in the full queue."""
    LEFT = "left"
    """The client didn't wait."""
    NO_ENGINE = "no_engine"
    """The engines that it waited for went away; another kind is looked for."""


class BatchMetrics:
    """While the mode DynamicBatching is on; without it nothing waits in the gateway."""

    def __init__(self, registry: CollectorRegistry, where: tuple[str, str], queued: Callable[[], int]) -> None:
        """`where` is namespace and policy; `queued` tells how many requests wait."""
        Gauge("sixfold_gateway_queue", "Requests that wait for a batch.", _POLICY, registry=registry).labels(
            *where
        ).set_function(queued)
        wait = Histogram(
            "sixfold_gateway_queue_wait_seconds",
            "How long requests waited for a batch, those that were sent.",
            (*_POLICY, "priority"),
            buckets=_WAIT_SECONDS,
            registry=registry,
        )
        self._wait = {priority: wait.labels(*where, priority.lower()) for priority in Priority}
        outcomes = Counter(
            "sixfold_gateway_queued",
            "Requests that left the queue, by how.",
            (*_POLICY, "outcome"),
            registry=registry,
        )
        self._outcomes = {outcome: outcomes.labels(*where, outcome.value) for outcome in Outcome}
        tokens = Counter(
            "sixfold_gateway_batch_tokens",
            "Tokens of batches as they are, and padded to the longest request of each batch.",
            (*_POLICY, "kind"),
            registry=registry,
        )
        self._actual_tokens, self._padded_tokens = (tokens.labels(*where, kind) for kind in ("actual", "padded"))
        self._requests = Histogram(
            "sixfold_gateway_batch_requests", "Requests of a batch.", _POLICY, buckets=_REQUESTS, registry=registry
        ).labels(*where)

    def waited(self, priority: Priority, seconds: float) -> None:
        self._wait[priority].observe(seconds)

    def left(self, outcome: Outcome) -> None:
        self._outcomes[outcome].inc()

    def batch(self, batch: Batch[Any, Any]) -> None:
        self._requests.observe(len(batch.keys))
        self._actual_tokens.inc(batch.actual_tokens)
        self._padded_tokens.inc(batch.padded_tokens)
