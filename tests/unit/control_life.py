"""A policy's life through the whole decision: counters that windows look back on, a spec that humans change, alerts,
pods that report; a look an interval, with the status written down and read again each time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from sixfold_api.conditions import Condition, ConditionStatus, timestamp
from sixfold_api.modes import Mode
from sixfold_api.policy import InferencePolicySpec, InferencePolicyStatus
from sixfold_operator.alerts import Heard
from sixfold_operator.control.levels import active_modes, effective_inputs, modes_at
from sixfold_operator.control.model import Reading, Signal, Snapshot
from sixfold_operator.control.signals import BUILT_IN
from sixfold_operator.control.view import remembered, state_of, view_of
from sixfold_operator.reconcile.context import Clock
from sixfold_operator.reconcile.decided import Decided, Watched
from sixfold_operator.reconcile.decisions import Decider

START = datetime(2030, 1, 1, tzinfo=UTC)
INTERVAL_SECONDS = 10
LABELS = {  # signal -> whether its series tell levels and arms apart, as in the built-in queries
    "ErrorRate": (True, True),
    "RequestP95": (True, True),
    "AcceptanceRate": (True, False),
    "ExitRate": (False, False),
    "ShadowDisagreement": (True, True),
    "ArmErrorRate": (True, True),
    "ArmRequestP95": (True, True),
    "RequestCost": (True, True),
}
LOW_IS_BAD = {signal.name for signal in BUILT_IN if not signal.is_high_bad}
SIGNALS = tuple(signal for signal in BUILT_IN if signal.name in LABELS)
SPEC: dict[str, Any] = {
    "generation": {
        "variantRef": {"name": "chat"},
        "quantized": {"variantRef": {"name": "chat-int8"}},
        "speculative": {"draftVariantRef": {"name": "tiny"}},
        "kvCacheReuse": {},
    },
    "classification": {"variantRef": {"name": "intents"}, "earlyExit": {}},
    "streaming": {"compression": "Off"},
    "rollbackLevel": 3,
}
ANALYSIS = {"interval": f"{INTERVAL_SECONDS}s", "initialDelay": "0s", "failureLimit": 3, "cooldown": "0s"}

Faulty = Callable[[frozenset[Mode]], set[str]]
"""Modes that are on -> signals of which everything is bad."""


def sound(modes: frozenset[Mode]) -> set[str]:
    return set()


@dataclass(frozen=True)
class _Span:
    """Requests of one arm between two looks, and the signals of which they all are bad."""

    begin: float
    end: float
    level: int
    arm: str
    bad: frozenset[str]


@dataclass
class Life:
    """One policy.

    Attributes:
        faulty: what is wrong with requests now.
        down: why Prometheus can't be asked.
        garbled: what becomes of its answer on the way.
        watches: whether there is a Prometheus.
    """

    analysis: Mapping[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    watches: bool = True
    hears: bool = False
    faulty: Faulty = sound
    alerts: dict[str, Heard] = field(default_factory=dict)
    requests: float = 500.0
    down: str = ""
    garbled: Callable[[Snapshot], Snapshot] = lambda snapshot: snapshot

    def __post_init__(self) -> None:
        self.now, self.seconds = START, 0.0
        self.document = {**SPEC, "analysis": {**ANALYSIS, **self.analysis}, **self.spec}
        ready = Condition(
            type="Ready", status=ConditionStatus.TRUE, reason="Ready", last_transition_time=timestamp(START)
        )
        self.status = InferencePolicyStatus(conditions=[ready])
        self._counted: list[_Span] = []
        self._spec = InferencePolicySpec.model_validate(self.document)
        self.told: list[tuple[float, str, str]] = []
        self.restart()
        self.decided = self.look()

    def restart(self) -> None:
        watched = Watched(
            signals=(lambda: SIGNALS) if self.watches else tuple,
            snapshot=lambda *_: self._snapshot() if self.watches else None,
            firing=lambda *_: self.alerts,
            hears=self.hears,
        )
        self._decider = Decider(watched, Clock(monotonic=lambda: self.seconds, now=lambda: self.now))

    def change(self, **fields: Any) -> Decided:
        """A human's change, which is looked at half a second later."""
        self.document = {**self.document, **fields}
        self._spec = InferencePolicySpec.model_validate(self.document)
        return self.look(seconds=0.5)

    def run(self, seconds: float) -> Life:
        for _ in range(round(seconds / INTERVAL_SECONDS)):
            self.look(INTERVAL_SECONDS)
        return self

    def rest(self) -> Life:
        """Long enough for every window to pass."""
        self.look(700.0)
        return self

    def look(self, seconds: float = 0.0) -> Decided:
        """Requests for so long, then a pass of the operator."""
        self._count(seconds)
        self.now += timedelta(seconds=seconds)
        self.seconds += seconds
        document = {"metadata": {"name": "bot", "namespace": "shop", "generation": 1}, "status": self.status.to_dict()}
        self.decided = self._decider.decide(json.loads(json.dumps(document)), self._spec, {}, lambda _: None)
        self.status = remembered(self.status, self.decided.state, self.decided.decisions)
        self.told += [(self.seconds, entry.decision, entry.reason) for entry in self.decided.decisions]
        return self.decided

    def why(self, signal: str) -> str:
        return next(item.why for item in self.decided.observed if item.name == signal)

    @property
    def level(self) -> int:
        return 3 if self.decided.state.level is None else self.decided.state.level.target

    @property
    def on(self) -> frozenset[Mode]:
        return active_modes(self.decided.state, self.decided.view)

    @property
    def downs(self) -> list[tuple[float, str, str]]:
        """What the operator took away by itself."""
        ours = ("Spec", "RetryToken", "Recovered", "Canary")
        return [each for each in self.told if each[1] in ("LevelChanged", "ModeSuspended") and each[2] not in ours]

    def _count(self, seconds: float) -> None:
        if not seconds:
            return
        state, view = state_of(self.status), view_of(self._spec, {}, self.status)
        stable, canary = effective_inputs(state, view)
        for arm, inputs in (("stable", stable), ("canary", canary)):
            if inputs is None:
                continue
            bad = frozenset(self.faulty(modes_at(inputs.target, view) - inputs.suspended.keys()))
            self._counted.append(_Span(self.seconds, self.seconds + seconds, inputs.target, arm, bad))
        longest = max(signal.window_seconds for signal in SIGNALS)
        self._counted = [span for span in self._counted if span.end > self.seconds - longest]

    def _snapshot(self) -> Snapshot:
        if self.down:
            return Snapshot(self.now, {}, {}, "PrometheusError", self.down)
        readings = {signal.name: tuple(self._readings(signal)) for signal in SIGNALS}
        return self.garbled(Snapshot(self.now, readings))

    def _readings(self, signal: Signal) -> list[Reading]:
        by_level, by_arm = LABELS[signal.name]
        series: dict[tuple[int | None, str | None], list[float]] = {}
        for span in self._counted:
            seconds = span.end - max(span.begin, self.seconds - signal.window_seconds)
            if seconds > 0:
                key = span.level if by_level else None, span.arm if by_arm else None
                counts = series.setdefault(key, [0.0, 0.0])
                counts[0] += seconds * (signal.name in span.bad)
                counts[1] += seconds
        at = self.now.timestamp()
        return [
            Reading(self._value(signal, bad / whole), self.requests, at, level, arm)
            for (level, arm), (bad, whole) in series.items()
        ]

    @staticmethod
    def _value(signal: Signal, bad_share: float) -> float:
        """Beyond the threshold as soon as a twentieth is bad."""
        if signal.name == "ArmErrorRate" or (signal.unit == "share" and signal.is_high_bad):
            return bad_share
        if signal.is_high_bad:
            return signal.threshold * (0.5 + 10 * bad_share) if signal.threshold else 0.5 + 10 * bad_share
        return max(0.0, signal.threshold * (1.5 - 10 * bad_share))
