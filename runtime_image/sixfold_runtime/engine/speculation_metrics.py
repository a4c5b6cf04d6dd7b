"""Series of speculative decoding."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_VARIANT = ("namespace", "policy", "variant")
_FORWARD_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
_DRAFT_BUCKETS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
WINDOW_DRAFTS = 256
"""The acceptance rate is that of this many last drafts."""


class SpeculationSeries:
    """What drafting costs and brings."""

    def __init__(self, registry: CollectorRegistry) -> None:
        stepped = (*_VARIANT, "level")
        self.drafted = Counter(
            "sixfold_draft_tokens", "Tokens that the draft model proposed.", stepped, registry=registry
        )
        self.accepted = Counter(
            "sixfold_accepted_tokens",
            "Drafted tokens that the target accepted, by their position in the draft (the first is 1).",
            (*stepped, "position"),
            registry=registry,
        )
        self.draft_seconds = Histogram(
            "sixfold_draft_seconds",
            "Time of drafting, a step.",
            stepped,
            buckets=_FORWARD_BUCKETS,
            registry=registry,
        )
        self.verify_seconds = Histogram(
            "sixfold_verify_seconds",
            "Time of the target's forward over a draft, a step.",
            stepped,
            buckets=_FORWARD_BUCKETS,
            registry=registry,
        )
        self.draft_length = Histogram(
            "sixfold_draft_length_tokens",
            "Tokens drafted for a row in a step; 0 is a step without a draft while speculation is on.",
            stepped,
            buckets=_DRAFT_BUCKETS,
            registry=registry,
        )
        self.acceptance_rate = Gauge(
            "sixfold_acceptance_rate",
            f"Accepted of drafted tokens over the last {WINDOW_DRAFTS} drafts; absent before the first.",
            _VARIANT,
            registry=registry,
        )
        self.draft_on_cpu = Gauge(
            "sixfold_draft_on_cpu", "1 where the draft computes on the CPU.", _VARIANT, registry=registry
        )
