"""Waste that was seen -> tickets, and values that were approved or are tried. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from sixfold_api.control_status import TunedValue
from sixfold_api.names import ENGINE
from sixfold_api.policy import InferencePolicySpec
from sixfold_operator.control.answers import FOUND
from sixfold_operator.control.figures import REQUEST_COST, busy_share
from sixfold_operator.control.levels import rejections
from sixfold_operator.control.memory import is_cooling
from sixfold_operator.control.model import Outcome, Signal, State, View
from sixfold_operator.control.ramp import begin_tuned
from sixfold_operator.control.recovery import health
from sixfold_operator.control.settling import settle
from sixfold_operator.control.tickets import Ticket, plan
from sixfold_operator.control.tuning import step
from sixfold_operator.control.waste import Facts, rejected_values, wasted_shares, wastes
from sixfold_operator.reconcile.decided import Decided
from sixfold_operator.reconcile.inputs import Find
from sixfold_operator.reconcile.quality_bounds import exit_variants

Place = tuple[str, str]


def act_on_waste(
    decided: Decided,
    place: Place,
    spec: InferencePolicySpec,
    signals: Sequence[Signal],
    variant: Find,
    tickets: Sequence[Ticket],
    working: Mapping[str, int],
    now: datetime,
) -> Decided:
    """The policy's tickets after this look, with the values that follow from approval or from tuning."""
    facts = _facts(decided, place, spec, variant, working, signals)
    found = wastes(signals, decided.observed, decided.state.signals, decided.snapshot, now.hour)
    planned = plan(spec, found, facts, tickets, now)
    state, view = decided.state, decided.view
    outcome = Outcome(state)
    if planned.approved and state.control.trial is None and not is_cooling(state, view, now):
        outcome = _begin(state, view, planned.approved[0], now)
    elif decided.observed and view.enforce:
        verdict = health(state, decided.observed)
        outcome = step(state, view, spec, found, facts, decided.snapshot, now, verdict)
    return replace(
        decided,
        state=outcome.state,
        decisions=(*decided.decisions, *outcome.decisions),
        tickets=planned,
    )


def _begin(state: State, view: View, tuned: TunedValue, now: datetime) -> Outcome:
    """One approved value a look; a human's approval needs no trial."""
    outcome = begin_tuned(state, view, tuned, now)
    return Outcome(settle(state, outcome.state, view, now), outcome.decisions)


def _facts(
    decided: Decided,
    place: Place,
    spec: InferencePolicySpec,
    variant: Find,
    working: Mapping[str, int],
    signals: Sequence[Signal],
) -> Facts:
    state, view, snapshot = decided.state, decided.view, decided.snapshot
    known = snapshot if snapshot is not None and snapshot.reason == FOUND else None
    share = None if known is None else busy_share(known)
    rejected = rejected_values([(entry.path, entry.value) for entry in rejections(state, view)])
    acceptance = next((entry.value for entry in decided.observed if entry.name == "AcceptanceRate"), None)
    return Facts(
        namespace=place[0],
        policy=place[1],
        timing=view.timing,
        exit_variants=exit_variants(spec, variant),
        target=view.ceiling if state.level is None else state.level.target,
        suspended=frozenset(entry.mode for entry in state.suspended),
        tuned=state.tuned,
        rejected=rejected,
        acceptance=acceptance,
        wasted=wasted_shares(known),
        busy_pods=None if share is None else share * sum(working.values()),
        pods=working.get(ENGINE),
        cost_window_seconds=next((each.window_seconds for each in signals if each.name == REQUEST_COST), 0.0),
    )
