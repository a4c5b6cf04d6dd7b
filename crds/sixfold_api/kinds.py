"""The kinds of the group: names, printer columns, subresources. One entry a kind."""

from __future__ import annotations

from dataclasses import dataclass

from sixfold_api.base import ApiModel, StatusModel
from sixfold_api.names import (
    POLICY_KIND,
    POLICY_PLURAL,
    TICKET_KIND,
    TICKET_PLURAL,
    VARIANT_KIND,
    VARIANT_PLURAL,
)
from sixfold_api.policy import InferencePolicySpec, InferencePolicyStatus
from sixfold_api.scalars import OUR_LONG_NAME_PATTERN, OUR_NAME_PATTERN
from sixfold_api.ticket import OptimizationTicketSpec, OptimizationTicketStatus
from sixfold_api.variant import ModelVariantSpec, ModelVariantStatus


@dataclass(frozen=True)
class Column:
    """A printer column. `wide` ones appear with `-o wide` only."""

    name: str
    json_path: str
    type: str = "string"
    wide: bool = False
    description: str = ""


@dataclass(frozen=True)
class Scale:
    """Paths of the scale subresource."""

    spec_replicas_path: str
    status_replicas_path: str
    label_selector_path: str


@dataclass(frozen=True)
class Kind:
    kind: str
    plural: str
    short_name: str
    description: str
    spec: type[ApiModel]
    status: type[StatusModel]
    columns: tuple[Column, ...]
    scale: Scale | None = None
    name_pattern: str = OUR_NAME_PATTERN

    @property
    def singular(self) -> str:
        return self.kind.lower()


def _condition(type_: str, field: str = "status") -> str:
    return f'.status.conditions[?(@.type=="{type_}")].{field}'


_AGE = Column("Age", ".metadata.creationTimestamp", "date")

POLICY = Kind(
    kind=POLICY_KIND,
    plural=POLICY_PLURAL,
    short_name="ipol",
    description="An inference endpoint: which model variants answer, on what hardware, with which cost-saving modes.",
    spec=InferencePolicySpec,
    status=InferencePolicyStatus,
    columns=(
        Column("Ceiling", ".spec.rollbackLevel", "integer", description="The user's level."),
        Column("Level", ".status.effectiveLevel", "integer", description="The level that every ready pod runs."),
        Column("Engines", ".status.engine.readyReplicas", "integer", description="Ready engine pods."),
        Column("Ready", _condition("Ready")),
        Column("Reason", _condition("Ready", "reason")),
        Column("Message", _condition("Ready", "message"), wide=True),
        _AGE,
    ),
    scale=Scale(".spec.engine.replicas", ".status.engine.replicas", ".status.engine.selector"),
)

VARIANT = Kind(
    kind=VARIANT_KIND,
    plural=VARIANT_PLURAL,
    short_name="mvar",
    description="One deployable form of a model: fetched, verified and ready to be served by policies.",
    spec=ModelVariantSpec,
    status=ModelVariantStatus,
    columns=(
        Column("Task", ".spec.task"),
        Column("Size", ".status.size", description="Bytes of the weights."),
        Column("Parameters", ".status.artifact.parameters", "integer"),
        Column("Precision", ".spec.precision.scheme", wide=True, description="How the weights are stored."),
        Column("Loss", ".status.quality.loss", wide=True, description="What quantising cost: percent or points."),
        Column(
            "Exits",
            ".status.exits.calibrated.exitRate",
            wide=True,
            description="Share of the calibration texts that exit early.",
        ),
        Column("Ready", _condition("Ready")),
        Column("Reason", _condition("Ready", "reason")),
        Column("Message", _condition("Ready", "message"), wide=True),
        _AGE,
    ),
)

TICKET = Kind(
    kind=TICKET_KIND,
    plural=TICKET_PLURAL,
    short_name="oticket",
    description="Waste that the operator saw: evidence, cause, what would end it and what that saves. Yours to decide.",
    spec=OptimizationTicketSpec,
    status=OptimizationTicketStatus,
    columns=(
        Column("Policy", ".spec.policyRef.name"),
        Column("Cause", ".spec.cause"),
        Column("Value", ".spec.evidence.value", description="Of the signal when the ticket was opened."),
        Column("Saving", ".spec.savingPerMonth", description="Estimate a month, in the currency of costPerHour."),
        Column("Decision", ".spec.decision"),
        Column("Phase", ".status.phase"),
        Column("Seen", ".status.occurrences", "integer", description="Occurrences."),
        Column("Recommendation", ".spec.recommendation.summary", wide=True),
        _AGE,
    ),
    name_pattern=OUR_LONG_NAME_PATTERN,
)

KINDS = (POLICY, VARIANT, TICKET)
