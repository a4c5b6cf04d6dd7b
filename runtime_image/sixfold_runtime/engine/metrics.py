"""The engine's Prometheus metrics, in a registry of their own. Every label value comes from configured names."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeVar, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from sixfold_api.runtime_config import RuntimeConfig
from sixfold_runtime.engine.classification_metrics import ExitMetrics, ExitSeries
from sixfold_runtime.engine.kv_metrics import KVMetrics, KVSeries
from sixfold_runtime.engine.shadow_metrics import ShadowMetrics, ShadowSeries
from sixfold_runtime.engine.slice_metrics import SliceMetrics, SliceSeries
from sixfold_runtime.engine.speculation_metrics import WINDOW_DRAFTS, SpeculationSeries
from sixfold_runtime.engine.waste_metrics import FlopsMetrics, FlopsSeries
from sixfold_runtime.engine.work import Runner
from sixfold_runtime.settings import RuntimeSettings

_POLICY = ("namespace", "policy")
_VARIANT = (*_POLICY, "variant")
_WAIT_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_SWAP_BUCKETS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300)

_Metric = TypeVar("_Metric", Counter, Histogram)

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
        self.busy = Counter(
            "sixfold_engine_busy_seconds",
            "Seconds of computing, by the level in use.",
            (*_VARIANT, "level"),
            registry=registry,
        )
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
        self.speculation = SpeculationSeries(registry)
        self.swaps = SwapSeries(registry)
        self.exits = ExitSeries(registry)
        self.slices = SliceSeries(registry, self.memory)
        self.kv = KVMetrics(KVSeries(registry), self.labels)
        self.flops = FlopsSeries(registry)
        self.shadow = ShadowSeries(registry)
        self.reused = Counter(
            "sixfold_reused_tokens",
            "Tokens of prompts whose keys and values were found instead of computed.",
            (*_VARIANT, "level"),
            registry=registry,
        )
        self.generated = Counter(
            "sixfold_generated_tokens",
            "Tokens of answers: drafted ones that the target accepted, and the target's own.",
            (*_VARIANT, "level", "cause"),
            registry=registry,
        )
        self.buffer_wait = Histogram(
            "sixfold_buffer_wait_seconds",
            "How long logits waited for a free buffer of the sampler pipeline.",
            (*_VARIANT, "level"),
            buckets=_WAIT_BUCKETS,
            registry=registry,
        )
        self.non_finite = Counter(
            "sixfold_non_finite_logits",
            "Requests that failed because the model computed NaN or infinite logits for them.",
            _VARIANT,
            registry=registry,
        )
        self.sequence = Gauge("sixfold_config_sequence", "Sequence of the config in use.", _POLICY, registry=registry)
        self.level = Gauge("sixfold_level", "Rollback level in use.", _POLICY, registry=registry)

        self.level_in_use = 0
        self._models: dict[str, ModelMetrics] = {}

    def config_applied(self, config: RuntimeConfig) -> None:
        self.level_in_use = config.stable.level
        self.sequence.labels(**self.labels).set(config.sequence)
        self.level.labels(**self.labels).set(config.stable.level)

    def of(self, variant: str) -> ModelMetrics:
        """The series of the weights of one ModelVariant."""
        return self._models.setdefault(variant, ModelMetrics(self, variant))


class SwapSeries:
    """Exchanges of full and quantised weights. Their variant is the served model's own."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.seconds = Histogram(
            "sixfold_weight_swap_seconds",
            "From the level's change to the first step with the other weights.",
            _VARIANT,
            buckets=_SWAP_BUCKETS,
            registry=registry,
        )
        self.swaps = Counter("sixfold_weight_swaps", "Exchanges of weights.", (*_VARIANT, "result"), registry=registry)
        self.queued = Gauge(
            "sixfold_swap_queued_requests", "Requests that wait for other weights.", _VARIANT, registry=registry
        )


class Room(Protocol):
    """For keys and values of running requests; the counts may be read from any thread."""

    @property
    def kv_bytes(self) -> int: ...

    @property
    def kv_used_bytes(self) -> int: ...


class ModelMetrics:
    """The series of one model."""

    def __init__(self, metrics: EngineMetrics, variant: str) -> None:
        self._metrics = metrics
        self._labels = {**metrics.labels, "variant": variant}
        self._children: dict[tuple[object, ...], object] = {}
        self._drafts: deque[tuple[int, int]] = deque(maxlen=WINDOW_DRAFTS)
        self.exits = ExitMetrics(metrics.exits, self._labels)
        self.slices = SliceMetrics(metrics.slices, self._labels)
        self.shadow = ShadowMetrics(metrics.shadow, self._labels)
        self.flops = FlopsMetrics(metrics.flops, self._labels)

    def loaded(self, load_seconds: float, weight_bytes: int) -> None:
        self._metrics.load.labels(**self._labels).set(load_seconds)
        self._metrics.memory.labels(**self._labels, kind="weights").set(weight_bytes)

    def watch(self, runner: Callable[[], Runner | None]) -> None:
        """Read the counts of this runner whenever Prometheus asks; 0 while there is none."""

        def read(count: Callable[[Runner], int]) -> Callable[[], int]:
            def now() -> int:
                found = runner()
                return 0 if found is None else count(found)

            return now

        metrics, labels = self._metrics, self._labels
        metrics.running.labels(**labels).set_function(read(lambda found: found.running))
        metrics.waiting.labels(**labels).set_function(read(lambda found: found.waiting))
        metrics.memory.labels(**labels, kind="kv").set_function(read(lambda found: found.kv_bytes))

    def watch_room(self, runner: Callable[[], Room | None]) -> None:
        """Read what its requests have reserved, and what of it is in use, whenever Prometheus asks."""
        reserved, used = (self._metrics.memory.labels(**self._labels, kind=kind) for kind in ("reserved", "used"))
        reserved.set_function(lambda: 0 if (found := runner()) is None else found.kv_bytes)
        used.set_function(lambda: 0 if (found := runner()) is None else found.kv_used_bytes)

    def queued(self, seconds: float) -> None:
        self._metrics.queue_wait.labels(**self._labels).observe(seconds)

    def forward(self, phase: str, actual_tokens: int, padded_tokens: int) -> None:
        self._metrics.tokens.labels(**self._labels, phase=phase, kind="actual").inc(actual_tokens)
        self._metrics.tokens.labels(**self._labels, phase=phase, kind="padded").inc(padded_tokens)
        self._metrics.batch_tokens.labels(**self._labels, phase=phase).observe(padded_tokens)

    def busy(self, seconds: float) -> None:
        self._at(self._metrics.busy).inc(seconds)

    def ended(self, level: int, outcome: str) -> None:
        self._at(self._metrics.requests, level, outcome).inc()

    def released(self) -> None:
        """The weights are gone from memory."""
        self._metrics.memory.labels(**self._labels, kind="weights").set(0)

    # -- generation

    def reused(self, level: int, tokens: int) -> None:
        """A prompt of which so many tokens needn't be computed begins."""
        if tokens:
            self._at(self._metrics.reused, level).inc(tokens)

    def generated(self, level: int, accepted: int, target: int) -> None:
        """Tokens that an answer gained: `accepted` from the draft, `target` drawn from the target's own logits."""
        for cause, tokens in (("draft", accepted), ("target", target)):
            if tokens:
                self._at(self._metrics.generated, level, cause).inc(tokens)

    def non_finite(self) -> None:
        """A request failed because its logits were NaN or infinite."""
        self._metrics.non_finite.labels(**self._labels).inc()

    def buffer_wait(self, seconds: float) -> None:
        """A step's logits waited this long for a free slot of the sampler pipeline."""
        self._at(self._metrics.buffer_wait).observe(seconds)

    # -- speculation

    def speculated(self, level: int, drafted: int, accepted: int) -> None:
        """One row's draft was verified: its first `accepted` of `drafted` tokens stay. Not called without a draft."""
        series = self._metrics.speculation
        self._at(series.drafted, level).inc(drafted)
        for position in range(1, accepted + 1):
            self._at(series.accepted, level, str(position)).inc()
        if not self._drafts:
            series.acceptance_rate.labels(**self._labels).set_function(self._acceptance_rate)
        self._drafts.append((drafted, accepted))

    def draft_seconds(self, seconds: float) -> None:
        """A step spent this on drafting."""
        self._at(self._metrics.speculation.draft_seconds).observe(seconds)

    def verify_seconds(self, seconds: float) -> None:
        """A step with a draft spent this on the target's forward."""
        self._at(self._metrics.speculation.verify_seconds).observe(seconds)

    def draft_length(self, tokens: int) -> None:
        """A row was given this many draft tokens in a step; 0 where none pays."""
        self._at(self._metrics.speculation.draft_length).observe(tokens)

    def draft_device(self, is_cpu: bool) -> None:
        self._metrics.speculation.draft_on_cpu.labels(**self._labels).set(is_cpu)

    # -- exchanges of weights

    def swapped(self, seconds: float) -> None:
        self._metrics.swaps.seconds.labels(**self._labels).observe(seconds)
        self._metrics.swaps.swaps.labels(**self._labels, result="ok").inc()

    def swap_failed(self) -> None:
        self._metrics.swaps.swaps.labels(**self._labels, result="failed").inc()

    def watch_swap_queue(self, queued: Callable[[], int]) -> None:
        self._metrics.swaps.queued.labels(**self._labels).set_function(queued)

    def _at(self, metric: _Metric, level: int | None = None, *more: str) -> _Metric:
        """The series of a level; without one, of the level in use, since a step computes rows of several."""
        key = (metric, self._metrics.level_in_use if level is None else level, *more)
        child = self._children.get(key)
        if child is None:  # looking it up by labels costs as much as a small step's bookkeeping
            child = self._children[key] = metric.labels(*self._labels.values(), str(key[1]), *more)
        return cast(_Metric, child)

    def _acceptance_rate(self) -> float:
        drafts = tuple(self._drafts)
        drafted = sum(drafted for drafted, _ in drafts)
        return sum(accepted for _, accepted in drafts) / drafted if drafted else math.nan
