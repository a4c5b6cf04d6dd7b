"""Parts that both kinds share: how pods of the user's cluster are shaped, and references."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from sixfold_api.base import ApiModel, Rule
from sixfold_api.scalars import DropNulls, LabelKey, LabelValue, ObjectName, OurName, Quantity, Unquoted


class VariantRef(ApiModel):
    name: OurName
    """Name of a ModelVariant in the same namespace."""


class SecretRef(ApiModel):
    name: ObjectName
    """Name of a Secret in the same namespace."""


class TLSSpec(ApiModel):
    """Encryption between gateway and engines, each of which proves itself to the other (mutual TLS)."""

    secret_ref: SecretRef
    """Secret with ca.crt, tls.crt and tls.key, as cert-manager writes them. The certificate is for server and client
    authentication and names <policy>-engine, and <policy>-classifier where that has pods of its own. A rotated one is
    used from the next connection on, without a restart. Without the Secret they don't speak, and never in the clear."""


class KeyRef(ApiModel):
    """An entry of a ConfigMap or a Secret in the same namespace."""

    name: ObjectName
    """Name of the object."""
    key: Annotated[str, StringConstraints(pattern=r"^[-._a-zA-Z0-9]+$", min_length=1, max_length=253)]
    """Name of the entry."""


SecretKeyRef = KeyRef
ConfigMapKeyRef = KeyRef


class ClaimRef(ApiModel):
    claim_name: ObjectName
    """Name of a PersistentVolumeClaim in the same namespace."""


class TolerationOperator(StrEnum):
    EXISTS = "Exists"
    EQUAL = "Equal"


class TaintEffect(StrEnum):
    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class Toleration(ApiModel):
    """A toleration, as in a pod."""

    key: LabelKey | None = None
    """Taint key; absent with operator Exists tolerates every taint."""
    operator: TolerationOperator | None = None
    """Exists or Equal (the default)."""
    value: LabelValue | None = None
    """Taint value for operator Equal."""
    effect: TaintEffect | None = None
    """Absent matches every effect."""
    toleration_seconds: Annotated[int, Field(ge=0, le=2**31 - 1), Unquoted] | None = None
    """How long a NoExecute taint is tolerated."""

    rules = (
        Rule(
            "has(self.key) || (has(self.operator) && self.operator == 'Exists')",
            "a toleration without a key needs operator: Exists",
            lambda t: t.key is not None or t.operator is TolerationOperator.EXISTS,
        ),
        Rule(
            "!has(self.value) || !has(self.operator) || self.operator != 'Exists'",
            "a toleration with operator: Exists takes no value; remove it or set operator: Equal",
            lambda t: t.value is None or t.operator is not TolerationOperator.EXISTS,
        ),
        Rule(
            "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
            "tolerationSeconds is for effect: NoExecute",
            lambda t: t.toleration_seconds is None or t.effect is TaintEffect.NO_EXECUTE,
        ),
    )


ResourceMap = Annotated[dict[LabelKey, Quantity], Field(max_length=16), DropNulls]


class Resources(ApiModel):
    """Requests and limits of the main container. The accelerator is added by `accelerator`."""

    requests: ResourceMap | None = None
    """What the scheduler reserves."""
    limits: ResourceMap | None = None
    """What the container may use at most."""


class PodSettings(ApiModel):
    """How the pods are placed and sized. A change here rolls them."""

    resources: Resources | None = None
    """Requests and limits of the main container."""
    node_selector: Annotated[dict[LabelKey, LabelValue], Field(max_length=32), DropNulls] | None = None
    """Labels that a node must have."""
    tolerations: Annotated[list[Toleration], Field(max_length=32)] | None = None
    """Taints that the pods tolerate."""
    image_pull_secrets: Annotated[list[SecretRef], Field(max_length=16)] | None = None
    """Secrets for pulling the runtime image."""
    runtime_class_name: ObjectName | None = None
    """RuntimeClass, such as `nvidia`."""
    priority_class_name: ObjectName | None = None
    """PriorityClass of the pods."""
