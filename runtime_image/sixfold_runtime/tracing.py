"""OpenTelemetry traces of requests, in gateway and engine alike; without a collector nothing of it is imported.

    request                    gateway: from arrival to the last byte; a child of the client's span if it names one
      batch                    gateway: waiting for a batch, or for an engine
      queue                    engine: from arrival until it began
      prefill, decode          engine: up to the first token, and from there to the last
      classify                 engine: the forwards of a text

The collector and everything else is set by the standard's own variables: OTEL_EXPORTER_OTLP_ENDPOINT (OTLP over HTTP
with protobuf), OTEL_EXPORTER_OTLP_HEADERS, OTEL_TRACES_SAMPLER. No prompt, answer or key is in an attribute.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from sixfold_api.runtime_config import Role
from sixfold_runtime.settings import RuntimeSettings

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
TRACEPARENT_HEADER = "traceparent"
FLUSH_MILLISECONDS = 3000
"""How long a process that ends waits for its collector."""
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})", re.ASCII)

Attributes = Mapping[str, str | int | float | bool]


def tracing_for(role: Role, settings: RuntimeSettings) -> Tracing | None:
    """The traces of a process; None where no collector is named."""
    return Tracing(role, settings) if any(map(os.environ.get, ENDPOINTS)) else None


class Tracing:
    """Sends spans to the collector, in a thread of its own; one that is slow or gone costs spans, and no more."""

    def __init__(self, role: Role, settings: RuntimeSettings) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create(
            {
                "service.name": f"sixfold-{role}",
                "service.instance.id": settings.pod,
                "k8s.namespace.name": settings.namespace,
                "sixfold.policy": settings.policy,
            }
        )
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("sixfold")

    def request(self, traceparent: str, attributes: Attributes) -> RequestTrace:
        """A request has arrived, with this header ("" for none)."""
        from opentelemetry.trace import SpanKind

        span = self._tracer.start_span("request", _parent(traceparent), SpanKind.SERVER, attributes)
        return RequestTrace(self, span)

    def record(
        self, name: str, traceparent: str, begin_seconds: float, end_seconds: float, attributes: Attributes
    ) -> None:
        """A part of a request is over; times are of time.time()."""
        span = self._tracer.start_span(
            name, _parent(traceparent), attributes=attributes, start_time=_nanoseconds(begin_seconds)
        )
        if (error := attributes.get("error.type")) is not None:
            _fail(span, str(error))
        span.end(_nanoseconds(end_seconds))

    def close(self) -> None:
        """Send what waits; blocks for a moment."""
        self._provider.force_flush(FLUSH_MILLISECONDS)
        self._provider.shutdown()


class RequestTrace:
    """One request in the gateway.

    Attributes:
        traceparent: for those who work for it; "" where it is not sampled.
    """

    def __init__(self, tracing: Tracing, span: Span) -> None:
        self._tracing, self._span = tracing, span
        context = span.get_span_context()
        is_sampled = span.is_recording()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-01" if is_sampled else ""

    def part(self, name: str, begin_seconds: float, attributes: Attributes) -> None:
        """A part of it is over now; `begin_seconds` is of time.time()."""
        if self.traceparent:
            self._tracing.record(name, self.traceparent, begin_seconds, time.time(), attributes)

    def end(self, attributes: Attributes, error: str) -> None:
        """It is over; `error` is one word, or ""."""
        self._span.set_attributes(dict(attributes))
        if error:
            self._span.set_attribute("error.type", error)
            _fail(self._span, error)
        self._span.end()


def _parent(traceparent: str) -> Context:
    """The W3C header as a context; an empty one where it isn't such a header."""
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    found = _TRACEPARENT.fullmatch(traceparent.strip())
    if found is None:
        return Context()
    trace_id, span_id, flags = (int(part, 16) for part in found.groups())
    span = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags & TraceFlags.SAMPLED))
    return set_span_in_context(NonRecordingSpan(span), Context()) if span.is_valid else Context()


def _fail(span: Span, error: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_status(Status(StatusCode.ERROR, error))


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
