"""The gateway's Prometheus metrics. Labels hold configured names only, never what a caller wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily

from sixfold_runtime.config import ConfigStore
from sixfold_runtime.gateway.pool import Pool
from sixfold_runtime.gateway.stream_metrics import StreamMetrics
from sixfold_runtime.modes.sanitize import SanitizeResult
from sixfold_runtime.settings import RuntimeSettings

_POLICY = ("namespace", "policy")
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_FIRST_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8)
_ENGINE_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_ANSWER_TOKENS = tuple(2**power for power in range(12))
_REQUEST_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class RequestLabels(NamedTuple):
    """What every metric of a request is labelled with, beside the policy."""

    variant: str
    task: str
    slice: str
    """The task slice that was asked for; empty for none."""
    level: str
    arm: str


_REQUEST = (*_POLICY, *RequestLabels._fields)


class GatewayMetrics:
    """All metrics of one gateway, in a registry of its own: one process may run a gateway and an engine."""

    def __init__(self, settings: RuntimeSettings, config: ConfigStore, pool: Pool, waiting: Callable[[], int]) -> None:
        """`waiting` tells how many requests wait for an engine to become ready."""
        self.registry = CollectorRegistry()
        self._where = (settings.namespace, settings.policy)
        ProcessCollector(registry=self.registry)
        self.registry.register(_Gauges(self._where, config, pool, waiting))
        self._requests = Counter(
            "sixfold_requests",
            "Requests by outcome and length of the prompt (of several, of the longest).",
            (*_REQUEST, "length_bucket", "outcome"),
            registry=self.registry,
        )
        self._first_token = self._histogram(
            "sixfold_time_to_first_token_seconds", "From the request's arrival to the first token.", _FIRST_SECONDS
        )
        self._next_token = self._histogram(
            "sixfold_inter_token_latency_seconds", "Between tokens of one answer.", _TOKEN_SECONDS
        )
        self._next_token_of: dict[RequestLabels, Histogram] = {}
        """Of the labels so far: looking a series up takes longer than all else that is done for a token here."""
        self._request = self._histogram(
            "sixfold_request_seconds", "From the request's arrival to the end of the answer.", _REQUEST_SECONDS
        )
        self._engine = Histogram(
            "sixfold_request_engine_seconds",
            "Engine time of a request, or of the part of it that another model computed, as engines report it.",
            (*_POLICY, "variant", "task", "level", "arm", "length_bucket"),
            buckets=_ENGINE_SECONDS,
            registry=self.registry,
        )
        self._answer_tokens = Histogram(
            "sixfold_answer_tokens",
            "Tokens of an answer to a client's prompt.",
            (*_POLICY, "variant", "level", "arm"),
            buckets=_ANSWER_TOKENS,
            registry=self.registry,
        )
        self.streams = StreamMetrics(self.registry, self._where)
        self._rate_limited = Counter(
            "sixfold_rate_limited", "Requests over a key's rate.", _POLICY, registry=self.registry
        ).labels(*self._where)
        self._sanitized = Counter(
            "sixfold_sanitized_requests",
            "Texts that the sanitiser saw: changed, unchanged, or left alone (other_script, would_be_empty).",
            (*_POLICY, "result"),
            registry=self.registry,
        )
        self._escalated = Counter(
            "sixfold_escalated",
            "Texts that no label was sure enough for: labelled by the generating model, unlabelled by it, or failed.",
            (*_POLICY, "result"),
            registry=self.registry,
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, _REQUEST, buckets=buckets, registry=self.registry)

    def request(self, labels: RequestLabels, length_bucket: str, outcome: str, seconds: float) -> None:
        """One request ended. Refused ones don't count into the latency: they would make it look better."""
        # Errors are there from the first request on, at 0: a rate misses the first increase of a series that begins.
        self._requests.labels(*self._where, *labels, length_bucket, "error")
        self._requests.labels(*self._where, *labels, length_bucket, outcome).inc()
        if outcome == "ok":
            self._request.labels(*self._where, *labels).observe(seconds)

    def engine_seconds(self, labels: RequestLabels, length_bucket: str, seconds: float) -> None:
        """What engines spent on a request; nothing is counted where none said so."""
        if seconds > 0:
            where = (labels.variant, labels.task, labels.level, labels.arm, length_bucket)
            self._engine.labels(*self._where, *where).observe(seconds)

    def answer(self, labels: RequestLabels, tokens: int) -> None:
        """A generated answer of so many tokens is complete."""
        self._answer_tokens.labels(*self._where, labels.variant, labels.level, labels.arm).observe(tokens)

    def first_token(self, labels: RequestLabels, seconds: float) -> None:
        self._first_token.labels(*self._where, *labels).observe(seconds)

    def next_tokens(self, labels: RequestLabels, tokens: int, seconds: float) -> None:
        """`tokens` came together, `seconds` after the ones before."""
        histogram = self._next_token_of.get(labels)
        if histogram is None:
            histogram = self._next_token_of[labels] = self._next_token.labels(*self._where, *labels)
        for _ in range(tokens):
            histogram.observe(seconds / tokens)

    def rate_limited(self) -> None:
        self._rate_limited.inc()

    def sanitized(self, result: SanitizeResult) -> None:
        self._sanitized.labels(*self._where, result.value).inc()

    def escalated(self, result: str) -> None:
        """`labelled`, `unlabelled` or `failed`."""
        self._escalated.labels(*self._where, result).inc()


class _Gauges:
    """Values that are read when someone asks."""

    def __init__(self, where: tuple[str, str], config: ConfigStore, pool: Pool, waiting: Callable[[], int]) -> None:
        self._waiting = waiting
        self._where = where
        self._config = config
        self._pool = pool

    def collect(self) -> Iterator[GaugeMetricFamily]:
        current = self._config.current
        for name, text, value in (
            ("sixfold_config_sequence", "Sequence of the configuration in use.", current.sequence),
            ("sixfold_config_refused", "1 while the newest configuration is refused.", int(bool(self._config.error))),
            ("sixfold_level", "Rollback level in use.", current.stable.level),
            ("sixfold_gateway_engines_connected", "Engine pods with a connection.", self._pool.connected),
            ("sixfold_gateway_engines_ready", "Connected engine pods that take requests.", self._pool.ready),
            ("sixfold_gateway_waiting", "Requests that wait for an engine to become ready.", self._waiting()),
        ):
            family = GaugeMetricFamily(name, text, labels=_POLICY)
            family.add_metric(self._where, value)
            yield family
