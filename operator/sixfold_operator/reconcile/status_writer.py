"""Writing a status only when it changes, and telling people in Events what changed."""

from __future__ import annotations

import logging
import uuid
from datetime import datetime
from typing import Any, NamedTuple

from sixfold_api.base import StatusModel
from sixfold_api.conditions import Condition, ConditionStatus, timestamp
from sixfold_operator.builders.common import Manifest
from sixfold_operator.kube import FIELD_MANAGER, ApiError
from sixfold_operator.reconcile.context import Context
from sixfold_operator.reconcile.rollout import last_status

log = logging.getLogger(__name__)

MESSAGE_CHARACTERS = 1024
ALARMS = (
    "Conflict",
    "WeightsFailed",
    "SlicesFailed",
    "DraftShortened",
    "KVReuseDegraded",
    "PartsNotFound",
    "ExposureFailed",
    "AutoscalingFailed",
    "TasksMissing",
    "EscalationUnused",
    "RolledBack",
    "SignalsUnknown",
    "TicketOpen",
)
"""Conditions that are bad news while they are True."""
UNDER_WAY = {"Preparing", "RollingOut", "PodsNotReady", "NotCreated", "Waiting", "VariantNotReady", "ScaledToZero"}
"""Reasons that say `not yet`, no cause for alarm."""


class Note(NamedTuple):
    """One Event about a decision or a finding."""

    reason: str
    message: str
    warning: bool = False


def transition_notes(before: list[Condition], after: list[Condition], types: tuple[str, ...]) -> list[Note]:
    """A note for each condition of `types` whose status or reason changed, or that appeared."""
    known = {condition.type: (condition.status, condition.reason) for condition in before}
    notes = []
    for condition in after:
        if condition.type in types and known.get(condition.type) != (condition.status, condition.reason):
            healthy = (condition.status is ConditionStatus.TRUE) != (condition.type in ALARMS)
            reason = condition.type if healthy else condition.reason
            notes.append(Note(reason, condition.message, not healthy and condition.reason not in UNDER_WAY))
    return notes


def normal_form(status: StatusModel) -> dict[str, Any]:
    """The status as a dict in which the order of map lists doesn't matter."""
    document = status.to_dict()
    for field, key in (
        ("conditions", "type"),
        ("modes", "name"),
        ("signals", "name"),
        ("suspended", "mode"),
        ("tuned", "path"),
        ("sinks", "name"),
    ):
        if field in document:
            document[field] = sorted(document[field], key=lambda entry: entry[key])
    return document


async def write_status(context: Context, owner: Manifest, status: StatusModel, notes: list[Note]) -> bool:
    """Write the status if it differs from the one that `owner` has, then post the notes. True if it was written."""
    before = last_status(type(status), owner)
    wanted = normal_form(status)
    if "status" in owner and normal_form(before) == wanted:
        return False
    metadata = owner["metadata"]
    manifest = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "metadata": {"name": metadata["name"], "namespace": metadata["namespace"], "uid": metadata["uid"]},
        "status": wanted,
    }
    try:
        context.cache.put(await context.kube.apply_status(manifest), written=("status",))
    except ApiError as error:
        if error.status == 404:
            return False
        raise
    for note in notes:
        await _post(context, owner, note)
    return True


async def _post(context: Context, owner: Manifest, note: Note) -> None:
    """Events tell people; nothing depends on them, so a refused one (the namespace is going) is only logged."""
    about = {"kind": owner["kind"], "namespace": owner["metadata"]["namespace"], "name": owner["metadata"]["name"]}
    log.info("%s: %s", note.reason, note.message, extra={"fields": about})
    try:
        await context.kube.create_event(event(owner, note, context.clock.now()))
    except ApiError as error:
        log.warning("the event was not posted: %s", error, extra={"fields": about})


def event(owner: Manifest, note: Note, now: datetime) -> Manifest:
    """A core/v1 Event about `owner`."""
    metadata = owner["metadata"]
    involved = {key: metadata[key] for key in ("name", "namespace", "uid", "resourceVersion")}
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{metadata['name']}.{uuid.uuid4().hex[:16]}", "namespace": metadata["namespace"]},
        "involvedObject": {"apiVersion": owner["apiVersion"], "kind": owner["kind"], **involved},
        "type": "Warning" if note.warning else "Normal",
        "reason": note.reason,
        "message": note.message[:MESSAGE_CHARACTERS],
        "source": {"component": FIELD_MANAGER},
        "reportingComponent": FIELD_MANAGER,
        "firstTimestamp": timestamp(now),
        "lastTimestamp": timestamp(now),
        "count": 1,
    }
