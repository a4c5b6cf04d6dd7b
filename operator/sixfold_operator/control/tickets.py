"""Waste that lasts -> tickets: opened, seen again, applied, resolved. Pure.

There is one ticket a policy, cause and variant, whichever signal found it. A resolved one that comes back is opened
again and counts an occurrence; a dismissed one stays dismissed until a human says otherwise. One that was applied and
didn't help gives way to another with the next recommendation.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from sixfold_api.conditions import Condition, ConditionStatus, merge, timestamp
from sixfold_api.control_status import TunedValue, Verdict
from sixfold_api.merge_patch import contains
from sixfold_api.names import ticket_name
from sixfold_api.policy import InferencePolicySpec
from sixfold_api.scalars import duration_seconds
from sixfold_api.ticket import (
    Cause,
    Decision,
    Evidence,
    OptimizationTicketSpec,
    OptimizationTicketStatus,
    Phase,
    PolicyRef,
)
from sixfold_api.tuning import spec_value, why_not_tunable
from sixfold_operator.control.moments import seconds_since
from sixfold_operator.control.recommendations import recommend
from sixfold_operator.control.waste import FLOP_CAUSES, Facts, Waste, fingerprint, is_seen, seconds_text

MOST_TICKETS = 50
"""Of one policy; the resolved ones that are longest at rest go first."""
KEPT_SECONDS = 30 * 86400.0
"""How long a resolved ticket stays."""
HOURS_A_MONTH = 730.0


@dataclass(frozen=True)
class Ticket:
    """One that exists."""

    name: str
    spec: OptimizationTicketSpec
    status: OptimizationTicketStatus


@dataclass(frozen=True)
class TicketPlan:
    """What to do.

    Attributes:
        opened: tickets to make.
        changed: tickets whose status changes.
        approved: values that a human approved and that don't hold yet.
        expired: names of tickets to delete.
        now: all tickets as they are afterwards.
    """

    opened: tuple[Ticket, ...] = ()
    changed: tuple[Ticket, ...] = ()
    approved: tuple[TunedValue, ...] = ()
    expired: tuple[str, ...] = ()
    now: tuple[Ticket, ...] = field(default=())

    @property
    def open(self) -> tuple[Ticket, ...]:
        """Those that wait for somebody, the dearest first."""
        waiting = [ticket for ticket in self.now if ticket.status.phase is Phase.OPEN]
        return tuple(sorted(waiting, key=lambda ticket: (-float(ticket.spec.saving_per_month or 0), ticket.name)))


def plan(
    spec: InferencePolicySpec, wastes: Sequence[Waste], facts: Facts, existing: Sequence[Ticket], now: datetime
) -> TicketPlan:
    """The next state of a policy's tickets.

    Args:
        wastes: waste signals as they were judged now; empty between two looks, when only decisions are followed.
    """
    by_print = {ticket.spec.fingerprint: ticket for ticket in existing}
    opened, after = [], []
    breaching = _breaching(wastes, facts)
    for print_, waste in breaching.items():
        if print_ not in by_print:
            opened.append(_opened(spec, waste, facts, print_, now))
    approved: list[TunedValue] = []
    for ticket in existing:
        status = _seen(ticket, ticket.spec.fingerprint in breaching, _verdict(ticket, wastes), facts, now)
        status, tuned = _decided(ticket.spec, status, spec, facts, ticket.name, now)
        approved += tuned
        after.append(Ticket(ticket.name, ticket.spec, status))
    expired = (*_expired(after, now), *_spent(after, breaching, facts, now))
    kept = [ticket for ticket in after if ticket.name not in expired]
    before = {ticket.name: ticket.status for ticket in existing}
    changed = tuple(ticket for ticket in kept if ticket.status != before[ticket.name])
    return TicketPlan(tuple(opened), changed, tuple(approved), expired, (*kept, *opened))


def open_message(tickets: Sequence[Ticket]) -> str:
    """For the condition TicketOpen: how many wait, and the dearest."""
    first = tickets[0]
    saving = f", about {first.spec.saving_per_month} a month" if first.spec.saving_per_month else ""
    count = "1 ticket is open" if len(tickets) == 1 else f"{len(tickets)} tickets are open"
    return f"{count}; {first.name}: {first.spec.cause}{saving}. {first.spec.recommendation.summary}"


def saving_per_month(waste: Waste, spec: InferencePolicySpec, facts: Facts) -> str | None:
    """What ending the waste saves a month: the wasted share of the engine seconds that are spent now, at costPerHour.

    An estimate: operations stand for time. Of an idle accelerator it is one pod. None where it can't be told.
    """
    cost = _cost_per_hour(spec, waste.variant)
    if cost is None:
        return None
    if waste.cause is Cause.IDLE_ACCELERATOR:
        saved = cost if facts.pods is not None and facts.pods > 1 else None
    elif waste.cause in FLOP_CAUSES and facts.busy_pods is not None:
        share = facts.wasted.get((waste.cause, waste.variant), waste.value or 0.0)
        saved = share * facts.busy_pods * cost
    else:
        saved = None
    return None if saved is None or not math.isfinite(saved) else f"{saved * HOURS_A_MONTH:.2f}"


def _cost_per_hour(spec: InferencePolicySpec, variant: str | None) -> float | None:
    classification = spec.classification
    is_classifier = classification is not None and variant == classification.variant_ref.name
    engine = classification.engine if classification is not None and is_classifier else None
    cost = (engine or spec.engine).cost_per_hour
    return None if cost is None else float(cost)


def _breaching(wastes: Iterable[Waste], facts: Facts) -> dict[str, Waste]:
    """Fingerprint -> the waste that was seen often enough; of several signals the one furthest over its threshold."""
    found: dict[str, Waste] = {}
    for waste in wastes:
        if is_seen(waste, facts.timing.failure_limit):
            print_ = fingerprint(facts.namespace, facts.policy, waste.cause, waste.variant)
            known = found.get(print_)
            if known is None or _excess(waste) > _excess(known):
                found[print_] = waste
    return found


def _excess(waste: Waste) -> float:
    return abs((waste.value or 0.0) - (waste.threshold or 0.0))


def _verdict(ticket: Ticket, wastes: Iterable[Waste]) -> Verdict:
    """Of the signal that a ticket was opened for. One that breaches for another cause is healthy as to this one."""
    own = [waste.verdict for waste in wastes if waste.signal == ticket.spec.evidence.signal]
    if not own or Verdict.UNKNOWN in own:
        return Verdict.UNKNOWN
    return Verdict.OK


def _opened(spec: InferencePolicySpec, waste: Waste, facts: Facts, print_: str, now: datetime) -> Ticket:
    evidence = Evidence(
        signal=waste.signal,
        query=waste.query,
        value=_decimal(waste.value),
        threshold=_decimal(waste.threshold),
        window=seconds_text(waste.window_seconds),
        cell=waste.cell,
    )
    ticket = OptimizationTicketSpec(
        policy_ref=PolicyRef(name=facts.policy),
        fingerprint=print_,
        cause=waste.cause,
        variant=waste.variant,
        evidence=evidence,
        recommendation=recommend(waste.cause, spec, facts, waste.variant),
        saving_per_month=saving_per_month(waste, spec, facts),
    )
    moment = timestamp(now)
    status = OptimizationTicketStatus(phase=Phase.OPEN, first_seen=moment, last_seen=moment, occurrences=1)
    return Ticket(ticket_name(facts.policy, print_), ticket, status)


def _seen(ticket: Ticket, breaches: bool, verdict: Verdict, facts: Facts, now: datetime) -> OptimizationTicketStatus:
    """What the signal says: once more, still, or no longer."""
    status, moment = ticket.status, timestamp(now)
    if breaches:
        is_back = status.healthy_since is not None
        phase = Phase.OPEN if status.phase is Phase.RESOLVED else status.phase
        again = {"occurrences": status.occurrences + 1, "last_seen": moment} if is_back else {}
        return status.model_copy(update={"phase": phase, "healthy_since": None, **again})
    if verdict is Verdict.OK and status.healthy_since is None:
        status = status.model_copy(update={"healthy_since": moment})
    healthy_seconds = 0.0 if status.healthy_since is None else seconds_since(status.healthy_since, now)
    is_over = status.healthy_since is not None and healthy_seconds >= facts.timing.recover_after
    if verdict is Verdict.OK and is_over and status.phase in (Phase.OPEN, Phase.APPLIED):
        return status.model_copy(update={"phase": Phase.RESOLVED})
    return status


def _decided(
    ticket: OptimizationTicketSpec,
    status: OptimizationTicketStatus,
    spec: InferencePolicySpec,
    facts: Facts,
    name: str,
    now: datetime,
) -> tuple[OptimizationTicketStatus, list[TunedValue]]:
    """What a human said, and what the spec says already."""
    if ticket.decision is Decision.DISMISSED:
        return status.model_copy(update={"phase": Phase.DISMISSED, "conditions": []}), []
    if status.phase is Phase.DISMISSED:
        status = status.model_copy(update={"phase": Phase.OPEN})
    advice = ticket.recommendation
    is_in_spec = advice.patch is not None and contains({"spec": spec.to_dict()}, advice.patch)
    is_tuned = any(entry.path == advice.path and entry.value == advice.value for entry in facts.tuned)
    if is_in_spec or is_tuned:
        where = "spec has it" if is_in_spec else "status.tuned has it"
        return _applied(status, ConditionStatus.TRUE, "Applied", f"The policy's {where}", now), []
    if ticket.decision is not Decision.APPROVED or status.phase is Phase.RESOLVED:
        return status.model_copy(update={"phase": _not_applied(status.phase), "conditions": []}), []
    if advice.path is None or advice.value is None:
        return _applied(status, ConditionStatus.FALSE, *_yours(advice.patch is not None, facts.policy, name), now), []
    problem = why_not_tunable(spec, advice.path, advice.value)
    if not problem and (advice.path, advice.value) in facts.rejected:
        problem = "it was tried and taken back; change spec.retryToken to have it tried again"
    if problem:
        return _applied(status, ConditionStatus.FALSE, "CannotApply", problem, now), []
    tuned = TunedValue(
        path=advice.path,
        value=advice.value,
        base=spec_value(spec, advice.path) or "",
        ticket=name,
        since=timestamp(now),
    )
    return status, [tuned]


def _not_applied(phase: Phase) -> Phase:
    """A change that was taken back is open again."""
    return Phase.OPEN if phase is Phase.APPLIED else phase


def _yours(has_patch: bool, policy: str, name: str) -> tuple[str, str]:
    if not has_patch:
        return "AdviceOnly", "There is nothing to apply: see recommendation.summary"
    return "YoursToApply", (
        f"Only tunable values are applied by approval. Apply this one: kubectl patch ipol {policy} --type=merge -p"
        f' "$(kubectl get oticket {name} -o jsonpath={{.spec.recommendation.patch}})"'
    )


def _applied(
    status: OptimizationTicketStatus, state: ConditionStatus, reason: str, message: str, now: datetime
) -> OptimizationTicketStatus:
    phase = status.phase
    if phase is not Phase.RESOLVED:
        phase = Phase.APPLIED if state is ConditionStatus.TRUE else Phase.OPEN
    condition = Condition(type="Applied", status=state, reason=reason, message=message)
    conditions = merge(status.conditions, [condition], now)
    return status.model_copy(update={"phase": phase, "conditions": conditions})


def _expired(tickets: Sequence[Ticket], now: datetime) -> tuple[str, ...]:
    """Resolved ones that are old, or too many."""
    resolved = [
        (seconds_since(ticket.status.healthy_since, now), ticket.name)
        for ticket in tickets
        if ticket.status.phase is Phase.RESOLVED and ticket.status.healthy_since is not None
    ]
    old = {name for seconds, name in resolved if seconds > KEPT_SECONDS}
    spare = sorted(resolved, reverse=True)[: max(0, len(tickets) - MOST_TICKETS)]
    return tuple(sorted(old | {name for _, name in spare}))


def _spent(tickets: Sequence[Ticket], breaching: Collection[str], facts: Facts, now: datetime) -> tuple[str, ...]:
    """Those whose recommendation holds for long already, and whose waste goes on: another one takes their place."""
    return tuple(
        ticket.name
        for ticket in tickets
        if ticket.spec.fingerprint in breaching
        and any(
            entry.type == "Applied"
            and entry.status is ConditionStatus.TRUE
            and seconds_since(entry.last_transition_time, now) >= facts.timing.recover_after + _lag_seconds(ticket)
            for entry in ticket.status.conditions
        )
    )


def _lag_seconds(ticket: Ticket) -> float:
    """So long a signal still shows what was before a change."""
    return 2 * duration_seconds(ticket.spec.evidence.window)


def _decimal(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "0"
    return f"{max(-999_999_999.0, min(999_999_999.0, value)):.4f}".rstrip("0").rstrip(".") or "0"
