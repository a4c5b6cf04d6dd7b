"""Tickets: opened once, seen again, applied, resolved; and what is recommended always fits the policy's schema."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sixfold_api.control_status import TunedValue, Verdict
from sixfold_api.merge_patch import contains, merged
from sixfold_api.modes import Mode
from sixfold_api.policy import InferencePolicySpec
from sixfold_api.ticket import Cause, Decision, OptimizationTicketSpec, Phase
from sixfold_api.tuning import why_not_tunable
from sixfold_operator.control.model import Timing
from sixfold_operator.control.recommendations import recommend
from sixfold_operator.control.tickets import MOST_TICKETS, Ticket, TicketPlan, open_message, plan, saving_per_month
from sixfold_operator.control.waste import Facts, Waste

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
TIMING = Timing(failure_limit=3, recover_after=600.0)
FULL: dict[str, Any] = {
    "engine": {"costPerHour": "2.50", "replicas": 2},
    "generation": {
        "variantRef": {"name": "chat"},
        "speculative": {"draftVariantRef": {"name": "tiny"}, "numTokens": 8},
        "kvCacheReuse": {},
    },
    "classification": {
        "variantRef": {"name": "intent"},
        "subgraphs": {"tasks": [{"name": "ner"}, {"name": "topic", "pinned": True}], "cacheSize": "8Mi"},
    },
    "batching": {},
}
CHAT: dict[str, Any] = {"engine": {"costPerHour": "2.50"}, "generation": {"variantRef": {"name": "chat"}}}


def spec(document: dict[str, Any]) -> InferencePolicySpec:
    return InferencePolicySpec.model_validate(document)


def facts(**changes: Any) -> Facts:
    return Facts(**{"namespace": "shop", "policy": "bot", "timing": TIMING, "busy_pods": 0.5, "pods": 2, **changes})


def waste(cause: Cause = Cause.RECOMPUTED_PREFIX, verdict: Verdict = Verdict.BREACH, **changes: Any) -> Waste:
    given = {"signal": "WastedFlops", "variant": "chat", "failures": 3, "value": 0.8, "threshold": 0.65, "query": "up"}
    return Waste(**{"cause": cause, "verdict": verdict, **given, **changes})


def after(found: TicketPlan) -> list[Ticket]:
    return list(found.now)


def look(
    document: dict[str, Any], wastes: list[Waste], tickets: list[Ticket], minutes: float = 0.0, **known: Any
) -> TicketPlan:
    return plan(spec(document), wastes, facts(**known), tickets, NOW + timedelta(minutes=minutes))


def deciding(ticket: Ticket, decision: Decision) -> Ticket:
    return Ticket(ticket.name, ticket.spec.model_copy(update={"decision": decision}), ticket.status)


def test_waste_that_lasts_opens_one_ticket_whichever_signal_found_it() -> None:
    both = [waste(), waste(signal="RecomputedPrefix", value=0.9, threshold=0.3)]
    (ticket,) = look(CHAT, both, []).opened
    assert (ticket.spec.cause, ticket.spec.variant, ticket.status.phase) == ("RecomputedPrefix", "chat", Phase.OPEN)
    assert ticket.spec.evidence.signal == "RecomputedPrefix"
    assert ticket.name == f"bot-{ticket.spec.fingerprint}"
    assert ticket.spec.recommendation.patch == {"spec": {"generation": {"kvCacheReuse": {"store": "Memory"}}}}
    assert OptimizationTicketSpec.model_validate(ticket.spec.to_dict()) == ticket.spec
    assert look(CHAT, both, [ticket]).opened == ()
    assert look(CHAT, both, [ticket]).changed == ()


@pytest.mark.parametrize("changes", [{"failures": 2}, {"verdict": Verdict.OK}, {"verdict": Verdict.UNKNOWN}])
def test_what_does_not_last_opens_none(changes: dict[str, Any]) -> None:
    assert look(CHAT, [waste(**changes)], []) == TicketPlan()


def test_health_resolves_and_a_return_opens_it_again() -> None:
    tickets = after(look(CHAT, [waste()], []))
    healthy = [waste(verdict=Verdict.OK, failures=0)]
    tickets = after(look(CHAT, healthy, tickets, 1))
    assert tickets[0].status.phase is Phase.OPEN
    unknown = [waste(verdict=Verdict.UNKNOWN, failures=0)]
    assert look(CHAT, unknown, tickets, 30).changed == ()
    tickets = after(look(CHAT, healthy, tickets, 12))
    assert tickets[0].status.phase is Phase.RESOLVED
    tickets = after(look(CHAT, [waste()], tickets, 20))
    assert (tickets[0].status.phase, tickets[0].status.occurrences) == (Phase.OPEN, 2)
    assert tickets[0].status.last_seen == "2026-01-01T12:20:00Z"
    assert look(CHAT, [waste()], tickets, 21).changed == ()


def test_a_breach_for_another_cause_is_health_for_this_one() -> None:
    tickets = after(look(CHAT, [waste()], []))
    other = [waste(Cause.PADDING)]
    found = look(CHAT, other, tickets, 1)
    assert [ticket.spec.cause for ticket in found.opened] == ["Padding"]
    assert found.changed[0].status.healthy_since is not None


def test_a_dismissed_ticket_stays_closed_until_a_human_opens_it() -> None:
    (ticket,) = after(look(CHAT, [waste()], []))
    (dismissed,) = after(look(CHAT, [waste()], [deciding(ticket, Decision.DISMISSED)], 1))
    assert dismissed.status.phase is Phase.DISMISSED
    assert look(CHAT, [waste()], [dismissed], 2).changed == ()
    (again,) = after(look(CHAT, [waste()], [deciding(dismissed, Decision.PENDING)], 3))
    assert again.status.phase is Phase.OPEN


def test_an_approved_tunable_is_handed_on_until_it_holds() -> None:
    draft = waste(Cause.REJECTED_DRAFT)
    (ticket,) = after(look(FULL, [draft], [], acceptance=0.3))
    assert ticket.spec.recommendation.path == "/generation/speculative/numTokens"
    approved = deciding(ticket, Decision.APPROVED)
    (tuned,) = look(FULL, [draft], [approved], 1).approved
    assert (tuned.path, tuned.base, tuned.ticket) == (ticket.spec.recommendation.path, "8", ticket.name)
    held = look(FULL, [draft], [approved], 2, tuned=(tuned,))
    assert held.approved == ()
    assert held.changed[0].status.phase is Phase.APPLIED
    rejected = look(FULL, [draft], [approved], 3, rejected=frozenset({(tuned.path, tuned.value)}))
    (condition,) = rejected.changed[0].status.conditions
    assert (rejected.approved, condition.status, condition.reason) == ((), "False", "CannotApply")


def test_an_approved_patch_is_the_users_to_apply() -> None:
    (ticket,) = after(look(CHAT, [waste()], []))
    approved = deciding(ticket, Decision.APPROVED)
    found = look(CHAT, [waste()], [approved], 1)
    (condition,) = found.changed[0].status.conditions
    assert (found.approved, condition.reason) == ((), "YoursToApply")
    assert "kubectl patch ipol bot" in condition.message
    patched = merged({"spec": CHAT}, ticket.spec.recommendation.patch)["spec"]
    (applied,) = after(look(patched, [waste()], [approved], 2))
    assert applied.status.phase is Phase.APPLIED


def test_what_was_applied_and_did_not_help_gives_way_to_the_next_recommendation() -> None:
    draft = waste(Cause.REJECTED_DRAFT)
    (ticket,) = after(look(FULL, [draft], [], acceptance=0.3))
    advice = ticket.spec.recommendation
    tuned = TunedValue(path=advice.path or "", value=advice.value or "", base="8", since="2026-01-01T12:00:00Z")
    (applied,) = after(look(FULL, [draft], [ticket], 1, tuned=(tuned,), acceptance=0.3))
    assert applied.status.phase is Phase.APPLIED
    assert look(FULL, [draft], [applied], 15, tuned=(tuned,), acceptance=0.3).expired == ()  # the signal lags behind
    spent = look(FULL, [draft], [applied], 32, tuned=(tuned,), acceptance=0.3)
    assert (spent.expired, spent.now) == ((ticket.name,), ())
    (following,) = look(FULL, [draft], [], 33, tuned=(tuned,), acceptance=0.3).opened
    assert following.spec.recommendation.value != advice.value


def test_what_ending_waste_saves() -> None:
    shares = {(Cause.RECOMPUTED_PREFIX, "chat"): 0.6}
    assert saving_per_month(waste(), spec(CHAT), facts(wasted=shares)) == f"{0.6 * 0.5 * 2.5 * 730:.2f}"
    assert saving_per_month(waste(Cause.IDLE_ACCELERATOR), spec(CHAT), facts(pods=2)) == f"{2.5 * 730:.2f}"
    assert saving_per_month(waste(Cause.IDLE_ACCELERATOR), spec(CHAT), facts(pods=1)) is None
    free = {"generation": CHAT["generation"]}
    assert saving_per_month(waste(), spec(free), facts()) is None
    assert saving_per_month(waste(), spec(CHAT), facts(busy_pods=None)) is None


def test_the_condition_names_the_dearest() -> None:
    cheap, dear = (
        look(CHAT, [waste(cause)], [], wasted={(cause, "chat"): share}).opened[0]
        for cause, share in ((Cause.PADDING, 0.1), (Cause.RECOMPUTED_PREFIX, 0.7))
    )
    message = open_message(TicketPlan(now=(cheap, dear)).open)
    assert message.startswith(f"2 tickets are open; {dear.name}: RecomputedPrefix, about 638.75 a month")


def test_old_and_surplus_tickets_go() -> None:
    (ticket,) = after(look(CHAT, [waste()], []))
    done = ticket.status.model_copy(update={"phase": Phase.RESOLVED, "healthy_since": "2025-11-01T00:00:00Z"})
    assert look(CHAT, [], [Ticket(ticket.name, ticket.spec, done)]).expired == (ticket.name,)
    fresh = done.model_copy(update={"healthy_since": "2026-01-01T11:00:00Z"})
    many = [Ticket(f"bot-{number}", ticket.spec, fresh) for number in range(MOST_TICKETS + 3)]
    assert len(look(CHAT, [], many).expired) == 3


SPECS = st.sampled_from([FULL, CHAT, {"classification": {"variantRef": {"name": "intent"}}}]) | st.builds(
    lambda tokens, size, batch, level: {
        "rollbackLevel": level,
        "generation": {
            "variantRef": {"name": "chat"},
            "speculative": {"draftVariantRef": {"name": "tiny"}, "numTokens": tokens},
            "kvCacheReuse": {"memorySize": size},
        },
        "batching": {"maxBatchTokens": batch},
    },
    st.integers(1, 16),
    st.sampled_from(["1Mi", "256Mi", "300Gi", "900Gi", "5e8"]),
    st.sampled_from([16, 128, 1024, 65536, 1_000_000]),
    st.integers(0, 3),
)


@settings(max_examples=300, deadline=None)
@given(
    document=SPECS,
    cause=st.sampled_from(list(Cause)),
    variant=st.sampled_from([None, "chat", "intent", "ner", "nobody"]),
    suspended=st.sets(st.sampled_from(list(Mode)), max_size=2),
    target=st.integers(0, 3),
    acceptance=st.none() | st.floats(0, 1),
    exits=st.booleans(),
)
def test_whatever_is_recommended_fits_the_schema(
    document: dict[str, Any],
    cause: Cause,
    variant: str | None,
    suspended: set[Mode],
    target: int,
    acceptance: float | None,
    exits: bool,
) -> None:
    policy = spec(document)
    known = facts(
        suspended=frozenset(suspended),
        target=min(target, policy.rollback_level),
        acceptance=acceptance,
        exit_variants=frozenset({"intent"} if exits else ()),
    )
    advice = recommend(cause, policy, known, variant)
    assert advice.summary
    if advice.patch is not None:
        patched = merged({"spec": document}, advice.patch)["spec"]
        InferencePolicySpec.model_validate(patched)
        assert not contains({"spec": policy.to_dict()}, advice.patch)
    if advice.path is not None and advice.value is not None:
        assert why_not_tunable(policy, advice.path, advice.value) == ""


def test_a_value_that_was_taken_back_is_not_recommended_again() -> None:
    first = recommend(Cause.REJECTED_DRAFT, spec(FULL), facts(acceptance=0.3), "chat")
    assert first.path is not None and first.value is not None
    again = recommend(
        Cause.REJECTED_DRAFT, spec(FULL), facts(acceptance=0.3, rejected=frozenset({(first.path, first.value)})), "chat"
    )
    assert (again.path, again.value) != (first.path, first.value)
    held = TunedValue(path=first.path, value=first.value, base="8", since="2026-01-01T00:00:00Z")
    further = recommend(Cause.REJECTED_DRAFT, spec(FULL), facts(acceptance=0.3, tuned=(held,)), "chat")
    assert further.value != first.value
