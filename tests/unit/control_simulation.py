"""A policy's life in fast motion: noisy metrics, outages and true faults through verdicts and reducer."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from sixfold_api.control_status import Verdict
from sixfold_api.modes import Mode
from sixfold_api.policy import InferencePolicyStatus
from sixfold_operator.control.levels import active_modes, running_level, target
from sixfold_operator.control.model import Observed, Reading, Signal, Snapshot, State, Timing, View
from sixfold_operator.control.moments import seconds_since
from sixfold_operator.control.reducer import decide
from sixfold_operator.control.signals import BUILT_IN
from sixfold_operator.control.verdicts import observe
from sixfold_operator.control.view import remembered, state_of

START = datetime(2030, 1, 1, tzinfo=UTC)
TIMING = Timing(interval=60.0)
RETRY_LOOKS = 90
"""A human asks for everything again after so many looks on average, of those at which something is off; every other
time what was broken is mended."""
VIEW = View(
    ceiling=3,
    levels=(0, 1, 2, 3),
    modes=frozenset(Mode),
    spec_hash="a",
    timing=TIMING,
    ready_since=START,
    retry_token="",
)
USUAL = {  # signal -> (what it usually is, how it looks in a fault)
    "ErrorRate": (0.005, 0.3),
    "RequestP95": (8.0, 50.0),
    "TTFTP95": (0.6, 5.0),
    "AcceptanceRate": (0.7, 0.05),
    "ExitRate": (0.7, 0.02),
    "ShadowDisagreement": (0.01, 0.25),
}
LABELLED = {"ErrorRate": "level arm", "RequestP95": "level arm", "TTFTP95": "level arm", "AcceptanceRate": "level"}
"""What tells a signal's series apart; of the others nothing does, which is the harder case."""
MODE_OF = {"AcceptanceRate": Mode.SPECULATIVE, "ExitRate": Mode.EARLY_EXIT}
SIGNALS = tuple(signal for signal in BUILT_IN if signal.name in USUAL)
BY_NAME = {signal.name: signal for signal in SIGNALS}
SAMPLES = 400.0


@dataclass
class Fault:
    """Something truly broken: while what it needs runs, its signal breaches."""

    signal: str
    ends: datetime
    level: int
    """It is there from this level on; where a mode is at fault, while that is on."""
    looks: int = 0
    """Known verdicts since it was first seen to breach, in a row."""
    is_caught: bool = False

    def is_felt(self, state: State) -> bool:
        mode = MODE_OF.get(self.signal)
        if mode is not None:
            return mode in active_modes(state, VIEW)
        return running_level(state, VIEW) >= self.level


@dataclass
class Figures:
    """What came of it."""

    hours: int
    ticks: int = 0
    unknown: int = 0
    spikes: int = 0
    outages: int = 0
    restarts: int = 0
    faults: int = 0
    caught: int = 0
    over_before_seen: int = 0
    """Faults of which too little was seen: an outage, few samples, or the level was already lower."""
    worst_looks: int = 0
    worst_cooldown_seconds: float = 0.0
    missed: list[str] = field(default_factory=list)
    false_changes: list[str] = field(default_factory=list)
    downs: int = 0
    ups: int = 0
    rejected: int = 0
    flaps: list[str] = field(default_factory=list)
    """A level or mode that was left a third time within rejectWindow."""


class World:
    """Makes the metrics. Seeded."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.faults: list[Fault] = []
        self.drift = dict.fromkeys(USUAL, 0.0)
        self.band_until = dict.fromkeys(USUAL, START)
        self.spike = dict.fromkeys(USUAL, 0)
        self.dark_until = self.quiet_until = START
        self.calm: set[str] = set()
        self.seen_at: dict[tuple[str, int], datetime] = {}
        self.runs: tuple[object, ...] = ()
        self.lingering: set[str] = set()

    def snapshot(self, state: State, view: View, now: datetime, figures: Figures) -> Snapshot:
        """Windows look back: what a fault did shows for a window, at its level, also when it is over."""
        runs = target(state, view), active_modes(state, view), view.retry_token
        if runs != self.runs:
            self.runs, self.lingering = runs, set()
        self.calm = {signal.name for signal in state.signals if not signal.failures}
        self._events(now, figures)
        if not self.faults and self.rng.random() < 1 / 240:
            self._break(state, now, figures)
        if now < self.dark_until:
            return Snapshot(at=now, reason="PrometheusError", message="connection refused")
        level = target(state, view)
        felt = {fault.signal for fault in self.faults if fault.is_felt(state)}
        self.lingering |= felt
        self.seen_at |= {(name, level): now for name in felt}
        self.band_until |= dict.fromkeys(felt, now)  # else the breach would go on after the fault: that is hysteresis
        shown = {signal.name for signal in SIGNALS if self._is_shown(signal, level, now)}
        self.lingering &= shown
        return Snapshot(at=now, readings={each.name: self._readings(each.name, shown, level, now) for each in SIGNALS})

    def _is_shown(self, signal: Signal, level: int, now: datetime) -> bool:
        levels = (level,) if signal.name in LABELLED else range(4)
        moments = [self.seen_at[signal.name, each] for each in levels if (signal.name, each) in self.seen_at]
        return any((now - at).total_seconds() < signal.window_seconds for at in moments)

    def _events(self, now: datetime, figures: Figures) -> None:
        rng, chance = self.rng, self.rng.random()
        if chance < 1 / 2000 and now >= self.dark_until:
            self.dark_until = now + timedelta(minutes=rng.randint(2, 60))
            figures.outages += 1
        elif chance < 2 / 2000:
            self.quiet_until = now + timedelta(minutes=rng.randint(30, 300))
        for name in USUAL:
            if self.spike[name]:
                self.spike[name] -= 1
            elif name in self.calm and now >= self.band_until[name] and rng.random() < 1 / 300:
                # Always shorter than failureLimit; a breach within the band would go on, which is what hysteresis is.
                self.spike[name] = rng.randint(1, TIMING.failure_limit - 1)
                figures.spikes += 1

    def _break(self, state: State, now: datetime, figures: Figures) -> None:
        level = running_level(state, VIEW)
        if level == 0:
            return
        ends = now + timedelta(minutes=self.rng.randint(60, 300))
        fault = Fault(self.rng.choice(list(USUAL)), ends, self.rng.randint(max(1, level - 1), level))
        if fault.is_felt(state):
            self.faults.append(fault)
            figures.faults += 1

    def _readings(self, name: str, felt: set[str], level: int, now: datetime) -> tuple[Reading, ...]:
        rng = self.rng
        usual, broken = USUAL[name]
        self.drift[name] = 0.98 * self.drift[name] + rng.gauss(0, 0.03)
        value = usual * math.exp(self.drift[name] if broken > usual else -abs(self.drift[name]) / 4)
        value = self._near_the_threshold(name, value, now)
        if name in felt or self.spike[name]:
            value = broken * math.exp(rng.gauss(0, 0.1))
        samples = 3.0 if now < self.quiet_until else SAMPLES * math.exp(rng.gauss(0, 0.2))
        labels = LABELLED.get(name, "")
        level_label, arm = level if "level" in labels else None, "stable" if "arm" in labels else None
        reading = Reading(value, samples, now.timestamp(), level_label, arm)
        chance = rng.random()
        if chance < 0.005:
            return (replace(reading, value=math.nan),)
        if chance < 0.008:
            return ()
        if chance < 0.010:
            return (reading, reading)
        if chance < 0.012:
            return (replace(reading, unix_seconds=now.timestamp() - 3600),)
        return (reading,)

    def _near_the_threshold(self, name: str, value: float, now: datetime) -> float:
        """For hours, now and then, just within the threshold."""
        signal = BY_NAME[name]
        is_free = now >= self.band_until[name] and name in self.calm and not self.spike[name]
        if is_free and self.rng.random() < 1 / 4000:
            self.band_until[name] = now + timedelta(minutes=self.rng.randint(30, 240))
        if now >= self.band_until[name] or signal.is_proportion:
            return value
        part = self.rng.uniform(0.91, 0.999)
        return signal.threshold * (part if signal.is_high_bad else 2 - part)


def simulate(hours: int, seed: int) -> Figures:
    """So many hours of one policy, a look a minute, an operator that restarts, a human who asks anew."""
    world, figures = World(seed), Figures(hours)
    view, now = VIEW, START
    state = decide(State(), view, (), None, now).state
    left: dict[str, list[datetime]] = {}
    human = random.Random(seed)
    for tick in range(int(hours * 3600 / TIMING.interval)):
        now += timedelta(seconds=TIMING.interval)
        figures.ticks += 1
        is_off = state.suspended or target(state, view) < view.ceiling
        if is_off and human.random() < 1 / RETRY_LOOKS:
            view, left = replace(view, retry_token=str(tick)), {}
            state = decide(state, view, (), None, now).state
            is_mended = human.random() < 1 / 2
            for fault in world.faults:
                fault.looks, fault.ends = 0, now if is_mended else fault.ends
        if tick % 500 == 499:
            state = _restarted(state)
            figures.restarts += 1
        world.faults = [fault for fault in world.faults if _goes_on(fault, now, figures)]
        snapshot = world.snapshot(state, view, now, figures)
        off = {entry.mode for entry in state.suspended}
        settling = state.control.settling
        observed = observe(SIGNALS, snapshot, {}, state.signals, target(state, view), now, off, settling)
        figures.unknown += sum(item.verdict is Verdict.UNKNOWN for item in observed)
        before, outcome = state, decide(state, view, observed, None, now)
        state = outcome.state
        _account(world, before, state, observed, now, figures)
        _count_left(before, state, left, now, figures)
    figures.over_before_seen += sum(not fault.is_caught for fault in world.faults)
    return figures


def _goes_on(fault: Fault, now: datetime, figures: Figures) -> bool:
    if now < fault.ends:
        return True
    figures.over_before_seen += not fault.is_caught
    return False


def _account(
    world: World, before: State, after: State, observed: tuple[Observed, ...], now: datetime, figures: Figures
) -> None:
    """Was something changed, was there a reason, and was it changed as soon as it had to be?"""
    lost = active_modes(before, VIEW) - active_modes(after, VIEW)
    figures.downs += bool(lost)
    assert before.level is not None and after.level is not None
    figures.rejected += len(after.level.rejected) > len(before.level.rejected)
    figures.ups += bool(active_modes(after, VIEW) - active_modes(before, VIEW))
    verdicts = {item.name: item.verdict for item in observed}
    felt = [fault for fault in world.faults if fault.is_felt(before)]
    breached = {fault.signal for fault in felt} | world.lingering
    if lost and not any(verdicts[name] is Verdict.BREACH for name in breached):
        figures.false_changes.append(f"{now}: {sorted(lost)} without a fault")
    cooling = seconds_since(before.control.changed_at, now) < TIMING.cooldown
    for fault in felt:
        verdict = verdicts[fault.signal]
        if verdict is Verdict.UNKNOWN:
            continue
        fault.looks = fault.looks + 1 if verdict is Verdict.BREACH else 0
        waits = cooling and fault.signal != "ShadowDisagreement"
        if lost:
            if fault.looks > TIMING.failure_limit:
                late = (fault.looks - TIMING.failure_limit) * TIMING.interval
                figures.worst_cooldown_seconds = max(figures.worst_cooldown_seconds, late)
            else:
                figures.worst_looks = max(figures.worst_looks, fault.looks)
            figures.caught += not fault.is_caught
            fault.is_caught, fault.looks = True, 0
        elif fault.looks >= TIMING.failure_limit and not waits:
            figures.missed.append(f"{now}: {fault.signal} breached {fault.looks} times")


def _count_left(before: State, after: State, left: dict[str, list[datetime]], now: datetime, figures: Figures) -> None:
    new = [record for record in after.control.breaches if record not in before.control.breaches]
    for record in new:
        moments = left.setdefault(record.subject, [])
        moments.append(now)
        recent = [at for at in moments if (now - at).total_seconds() <= TIMING.reject_window]
        if len(recent) > 2:
            figures.flaps.append(f"{now}: {record.subject}")


def _restarted(state: State) -> State:
    status = remembered(InferencePolicyStatus(), state, ())
    return state_of(InferencePolicyStatus.model_validate(json.loads(json.dumps(status.to_dict()))))
