"""Conditions as Kubernetes people know them, and the pure function that updates a list of them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from sixfold_api.base import StatusModel


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(StatusModel):
    """One observation about the object, with its reason."""

    type: Annotated[str, StringConstraints(max_length=64)]
    """What is observed, such as Ready."""
    status: ConditionStatus
    """True, False or Unknown."""
    reason: Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Za-z0-9]*$", max_length=64)]
    """One word for machines."""
    message: Annotated[str, StringConstraints(max_length=2048)] = ""
    """A sentence for people: what was seen and what to do."""
    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """metadata.generation of the spec that was looked at."""
    last_transition_time: Annotated[str, StringConstraints(max_length=32)] | None = None
    """When `status` last changed, RFC 3339 in UTC."""


Conditions = Annotated[
    list[Condition],
    Field(
        max_length=32,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    ),
]


def timestamp(moment: datetime) -> str:
    """RFC 3339 in UTC with seconds, as Kubernetes writes it."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def merge(previous: Iterable[Condition], current: Iterable[Condition], now: datetime) -> list[Condition]:
    """The new list, ordered by type. A condition that is no longer reported goes; one whose `status` stays
    keeps its transition time, so that an unchanged observation writes nothing."""
    before = {condition.type: condition for condition in previous}
    merged = []
    for condition in sorted(current, key=lambda c: c.type):
        old = before.get(condition.type)
        since = old.last_transition_time if old and old.status == condition.status else None
        merged.append(condition.model_copy(update={"last_transition_time": since or timestamp(now)}))
    return merged
