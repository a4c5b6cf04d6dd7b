"""Metrics of streamed answers."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from sixfold_runtime.modes.streaming import Form

_POLICY = ("namespace", "policy")
_EVENTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class StreamMetrics:
    def __init__(self, registry: CollectorRegistry, where: tuple[str, str]) -> None:
        sent = Counter(
            "sixfold_stream_bytes",
            "Bytes of streamed answers before (raw) and after (sent) compression, by the form they travelled in.",
            (*_POLICY, "kind", "encoding"),
            registry=registry,
        )
        # Looking a label up costs more than compressing a token.
        self._bytes = {form: (sent.labels(*where, "raw", form), sent.labels(*where, "sent", form)) for form in Form}
        self._events = Histogram(
            "sixfold_stream_flush_events",
            "Events that were sent together: more than one where tokens come fast or the client reads slowly.",
            _POLICY,
            buckets=_EVENTS,
            registry=registry,
        ).labels(*where)
        self._cut = Counter(
            "sixfold_stream_cut",
            "Streams whose client read nothing.",
            _POLICY,
            registry=registry,
        ).labels(*where)

    def sent(self, form: Form, events: int, raw_bytes: int, sent_bytes: int) -> None:
        """One flush."""
        raw, sent = self._bytes[form]
        raw.inc(raw_bytes)
        sent.inc(sent_bytes)
        self._events.observe(events)

    def cut(self) -> None:
        self._cut.inc()
