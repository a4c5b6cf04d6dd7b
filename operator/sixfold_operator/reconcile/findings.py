"""What one look at a policy found."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from sixfold_api.effective import Effective
from sixfold_api.policy import InferencePolicySpec
from sixfold_api.runtime_config import CanaryConfig, PodState
from sixfold_operator.builders.common import Manifest
from sixfold_operator.reconcile.config_rollout import Reach
from sixfold_operator.reconcile.decided import Decided
from sixfold_operator.reconcile.rollout import Verdict


@dataclass
class Findings:
    """Everything that a policy's status is made of."""

    policy: Manifest
    spec: InferencePolicySpec
    effective: Effective
    reach: Reach
    variants: Verdict
    deployments: Mapping[str, Manifest | None]
    pods: Mapping[str, Sequence[Manifest]]
    states: Mapping[str, PodState]
    decided: Decided
    """What the control loop says."""
    warnings: Mapping[str, Verdict] = field(default_factory=dict)
    """Condition type -> what the variants lack that the policy asks for, though it is served."""
    missing_tasks: Mapping[str, Collection[str]] = field(default_factory=dict)
    """Variant -> tasks that the policy offers and the variant doesn't have."""
    canary: CanaryConfig | None = None
    """What a share of the requests runs."""
    conflicts: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    look_seconds: float | None = None
    """After how long to ask the gateways whether engines may sleep, or must wake."""
    unscaled: Verdict | None = None
    """Why nothing scales what the policy wants scaled."""
    unexposed: list[Verdict] = field(default_factory=list)
    """Ways in from outside that can't be opened."""
