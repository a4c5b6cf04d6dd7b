"""Tickets of a policy: those that exist, and what the plan says written to the API."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

from pydantic import ValidationError

from sixfold_api.names import POLICY_LABEL, TICKET_KIND
from sixfold_api.ticket import OptimizationTicketSpec, OptimizationTicketStatus
from sixfold_operator.builders.common import Manifest
from sixfold_operator.builders.ticket import ticket_manifest
from sixfold_operator.cache import Cache
from sixfold_operator.control.tickets import Ticket, TicketPlan
from sixfold_operator.kube import ApiError
from sixfold_operator.reconcile.children import is_controlled_by
from sixfold_operator.reconcile.context import Context
from sixfold_operator.reconcile.rollout import last_status
from sixfold_operator.reconcile.status_writer import Note, write_status

log = logging.getLogger(__name__)


def existing_tickets(cache: Cache, policy: Manifest) -> list[Ticket]:
    """Tickets that the policy owns, by name. One that this version can't read is left alone."""
    metadata = policy["metadata"]
    found = []
    for manifest in cache.tagged(TICKET_KIND, metadata["namespace"], f"policy/{metadata['name']}"):
        if "deletionTimestamp" in manifest["metadata"] or not is_controlled_by(manifest, metadata.get("uid", "")):
            continue
        try:
            spec = OptimizationTicketSpec.model_validate(manifest["spec"])
        except ValidationError as error:
            log.warning("ticket %s can't be read: %s", manifest["metadata"]["name"], error)
            continue
        found.append(Ticket(manifest["metadata"]["name"], spec, last_status(OptimizationTicketStatus, manifest)))
    return found


def with_sinks(plan: TicketPlan, existing: Iterable[Ticket], told: Callable[[Ticket], Ticket]) -> TicketPlan:
    """The plan with what sinks know of each ticket that is in the API already; new ones are told at the next look.

    Args:
        told: a ticket with what its sinks know in its status; asking sends them what they don't know.
    """
    before = {ticket.name: ticket.status for ticket in existing}
    now = tuple(told(ticket) if ticket.name in before else ticket for ticket in plan.now)
    changed = tuple(ticket for ticket in now if before.get(ticket.name, ticket.status) != ticket.status)
    return replace(plan, now=now, changed=changed)


async def write_tickets(context: Context, policy: Manifest, plan: TicketPlan) -> None:
    """Make, change and delete tickets. Raises ApiError; the next look does what was left."""
    for ticket in plan.opened:
        made = await context.kube.apply(ticket_manifest(policy, ticket), force=False)
        context.cache.put(made, written=("spec", "metadata"))
        advice = ticket.spec.recommendation.summary
        await write_status(context, made, ticket.status, [Note("TicketOpened", f"{ticket.spec.cause}: {advice}")])
    await asyncio.gather(*(_change(context, policy, ticket) for ticket in plan.changed))
    await asyncio.gather(*(_delete(context, policy, name) for name in plan.expired))


async def _change(context: Context, policy: Manifest, ticket: Ticket) -> None:
    live = context.cache.get(TICKET_KIND, policy["metadata"]["namespace"], ticket.name)
    if live is None:
        return
    before = last_status(OptimizationTicketStatus, live)
    notes = _notes(before, ticket.status)
    await write_status(context, live, ticket.status, list(notes))


def _notes(before: OptimizationTicketStatus, after: OptimizationTicketStatus) -> Iterable[Note]:
    if before.phase is not after.phase:
        yield Note(f"Ticket{after.phase}", f"The ticket is {after.phase.lower()}; it was {before.phase.lower()}")


async def _delete(context: Context, policy: Manifest, name: str) -> None:
    live = context.cache.get(TICKET_KIND, policy["metadata"]["namespace"], name)
    if live is None or live["metadata"].get("labels", {}).get(POLICY_LABEL) != policy["metadata"]["name"]:
        return
    try:
        await context.kube.delete(live)
    except ApiError as error:
        log.warning("ticket %s was not deleted: %s", name, error)
