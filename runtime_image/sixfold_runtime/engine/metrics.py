"""The engine's Prometheus metrics, in a registry of their own. Every label value comes from configured names."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from sixfold_api.runtime_config import RuntimeConfig
from sixfold_runtime.settings import RuntimeSettings

_POLICY = ("namespace", "policy")
_VARIANT = (*_POLICY, "variant")
_WAIT_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)

PREFILL, DECODE, CLASSIFY = "prefill", "decode", "classify"


class EngineMetrics:
    """All series of an engine process."""

    def __init__(self, settings: RuntimeSettings) -> None:
        self.registry = registry = CollectorRegistry()
        self.labels = {"namespace": settings.namespace, "policy": settings.policy}
        self.requests = Counter(
            "sixfold_engine_requests",
            "Requests that ended in the engine; outcome is stop, length, classified, cancelled or a failure's code.",
            (*_VARIANT, "level", "outcome"),
            registry=registry,
        )
        self.running = Gauge("sixfold_requests_running", "Requests being computed.", _VARIANT, registry=registry)
        self.waiting = Gauge("sixfold_requests_waiting", "Requests in the queue.", _VARIANT, registry=registry)
        self.tokens = Counter(
            "sixfold_tokens",
            "Token positions of all forwards: actual ones, and padded ones (actual and padding together).",
            (*_VARIANT, "phase", "kind"),
            registry=registry,
        )
        self.busy = Counter("sixfold_engine_busy_seconds", "Seconds of computing.", _VARIANT, registry=registry)
        self.queue_wait = Histogram(
            "sixfold_queue_wait_seconds",
            "From arrival in the engine to the first forward.",
            _VARIANT,
            buckets=_WAIT_BUCKETS,
            registry=registry,
        )
        self.batch_tokens = Histogram(
            "sixfold_batch_tokens",
            "Token positions of a forward, padding included.",
            (*_VARIANT, "phase"),
            buckets=_TOKEN_BUCKETS,
            registry=registry,
        )
        self.memory = Gauge("sixfold_memory_bytes", "Bytes held.", (*_VARIANT, "kind"), registry=registry)
        self.load = Gauge("sixfold_model_load_seconds", "Seconds that loading took.", _VARIANT, registry=registry)
        self.sequence = Gauge("sixfold_config_sequence", "Sequence of the config in use.", _POLICY, registry=registry)
        self.level = Gauge("sixfold_level", "Rollback level in use.", _POLICY, registry=registry)

    def config_applied(self, config: RuntimeConfig) -> None:
        self.sequence.labels(**self.labels).set(config.sequence)
        self.level.labels(**self.labels).set(config.stable.level)

    def of(self, variant: str) -> ModelMetrics:
        return ModelMetrics(self, variant)


class ModelMetrics:
    """The series of one model."""

    def __init__(self, metrics: EngineMetrics, variant: str) -> None:
        self._metrics = metrics
        self._labels = {**metrics.labels, "variant": variant}

    def loaded(self, load_seconds: float, weight_bytes: int) -> None:
        self._metrics.load.labels(**self._labels).set(load_seconds)
        self._metrics.memory.labels(**self._labels, kind="weights").set(weight_bytes)

    def watch(self, running: Callable[[], int], waiting: Callable[[], int], kv_bytes: Callable[[], int]) -> None:
        """Read these whenever Prometheus asks."""
        self._metrics.running.labels(**self._labels).set_function(running)
        self._metrics.waiting.labels(**self._labels).set_function(waiting)
        self._metrics.memory.labels(**self._labels, kind="kv").set_function(kv_bytes)

    def queued(self, seconds: float) -> None:
        self._metrics.queue_wait.labels(**self._labels).observe(seconds)

    def forward(self, phase: str, actual_tokens: int, padded_tokens: int) -> None:
        self._metrics.tokens.labels(**self._labels, phase=phase, kind="actual").inc(actual_tokens)
        self._metrics.tokens.labels(**self._labels, phase=phase, kind="padded").inc(padded_tokens)
        self._metrics.batch_tokens.labels(**self._labels, phase=phase).observe(padded_tokens)

    def busy(self, seconds: float) -> None:
        self._metrics.busy.labels(**self._labels).inc(seconds)

    def ended(self, level: int, outcome: str) -> None:
        self._metrics.requests.labels(**self._labels, level=str(level), outcome=outcome).inc()
