"""InferencePolicy: what the user wants from inference, and what the operator reports back."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from sixfold_api.analysis import (
    AnalysisSpec,
    Automation,
    CanarySpec,
    Remediation,
    ShadowSpec,
    TicketsSpec,
)
from sixfold_api.autoscaling import EngineAutoscalingSpec
from sixfold_api.base import ApiModel, Rule, SpecModel, StatusModel
from sixfold_api.batching import BatchingSpec
from sixfold_api.classification import EarlyExitSpec, EscalateSpec
from sixfold_api.conditions import Conditions
from sixfold_api.control_status import (
    CanaryStatus,
    ControlStatus,
    HistoryEntry,
    LevelStatus,
    SignalStatus,
    Suspension,
    TunedValue,
)
from sixfold_api.gateway import GatewaySpec
from sixfold_api.generation import GenerationSpec
from sixfold_api.modes import MAX_LEVEL, Mode, ModeState
from sixfold_api.names import DRAIN_SECONDS
from sixfold_api.pods import ConfigMapKeyRef, PodSettings, TLSSpec, VariantRef
from sixfold_api.scalars import (
    AcceleratorType,
    Compression,
    Decimal,
    Duration,
    ExtendedResource,
    FullWeights,
    RolloutStrategy,
    Unquoted,
    duration_seconds,
)
from sixfold_api.subgraphs import SubgraphsSpec


class Accelerator(ApiModel):
    """The device that an engine pod gets."""

    type: AcceleratorType
    """GPU or CPU."""
    count: Annotated[int, Field(ge=1, le=16), Unquoted] | None = None
    """Devices a pod; absent means 1. Only for GPU."""
    resource_name: ExtendedResource | None = None
    """Extended resource to request; absent means nvidia.com/gpu. A MIG slice or another vendor goes here."""

    rules = (
        Rule(
            "self.type == 'GPU' || (!has(self.count) && !has(self.resourceName))",
            "count and resourceName are for type: GPU; remove them or set type: GPU",
            lambda a: a.type is AcceleratorType.GPU or (a.count is None and a.resource_name is None),
        ),
    )


class EngineSpec(ApiModel):
    """A Deployment of engine pods."""

    replicas: Annotated[int, Field(ge=0, le=1000), Unquoted] | None = None
    """Engine pods; absent means 1. `kubectl scale` sets it; an autoscaler of your own on the policy needs it set to
    begin with."""
    autoscaling: EngineAutoscalingSpec | None = None
    """Pods by load, in place of replicas."""
    accelerator: Accelerator = Accelerator(type=AcceleratorType.GPU)
    """Absent means one nvidia.com/gpu a pod."""
    strategy: RolloutStrategy = RolloutStrategy.AUTO
    """How a changed pod template rolls out. Surge starts a new pod before an old one stops and needs a spare
    accelerator; Replace stops an old one first. Auto means Surge on CPU and for a lone GPU pod, else Replace."""
    startup_deadline: Duration = "30m"
    """How long a pod may take to load its models before it is started anew, as one whose storage hangs must be."""
    full_weights: FullWeights | None = None
    """Full weights beside quantised ones. Resident keeps both on the device: a level change takes no time and the
    memory is not saved. Swap exchanges them: requests wait meanwhile. Absent or Auto means Resident where both fit."""
    cost_per_hour: Annotated[Decimal, StringConstraints(pattern=r"^[0-9]{1,9}(\.[0-9]{1,6})?$")] | None = None
    """What a pod costs an hour, in quotes and in any currency: savings are told in it. Absent means that they are told
    in engine seconds."""
    pod: PodSettings = PodSettings()
    """Placement and size of the pods."""

    rules = (
        Rule(
            "!has(self.autoscaling) || !has(self.replicas)",
            "replicas and autoscaling exclude each other: remove one",
            lambda e: e.autoscaling is None or e.replicas is None,
        ),
        Rule(
            "!has(self.startupDeadline) || (duration(self.startupDeadline) >= duration('10s')"
            " && duration(self.startupDeadline) <= duration('24h'))",
            "startupDeadline must be between 10s and 24h",
            lambda e: 10.0 <= duration_seconds(e.startup_deadline) <= 86400.0,
        ),
    )


class ClassificationSpec(ApiModel):
    """Classification in one forward pass: /v1/classify."""

    variant_ref: VariantRef
    """The ModelVariant with task Classification or TokenClassification that answers."""
    engine: EngineSpec | None = None
    """A Deployment of its own for the classifier; absent means that spec.engine serves it too."""
    early_exit: EarlyExitSpec | None = None
    """Exits behind early layers; absent means that every text runs through all of them."""
    subgraphs: SubgraphsSpec | None = None
    """Task slices of the variant; absent means that its own head answers, and no task."""
    escalate: EscalateSpec | None = None
    """What happens to texts that no label is sure enough for; absent means that they get the best label."""

    rules = (
        Rule(
            "!has(self.engine) || !has(self.engine.fullWeights)",
            "fullWeights is for the engine that generates: remove it from classification.engine",
            lambda c: c.engine is None or c.engine.full_weights is None,
        ),
    )


class StreamingSpec(ApiModel):
    """How streamed answers travel. On from level 3."""

    compression: Compression = Compression.AUTO
    """Auto compresses for clients that accept zstd or gzip, or ask for X-Stream-Compression; Off never does."""
    level: Annotated[int, Field(ge=1, le=19), Unquoted] = 3
    """zstd level."""
    dictionary_config_map_ref: ConfigMapKeyRef | None = None
    """A zstd dictionary that `sixfold dictionary` trained on text like yours: short answers get smaller."""


class InferencePolicySpec(SpecModel):
    """One endpoint: which variants answer, on what hardware, with which cost-saving modes."""

    rollback_level: Annotated[int, Field(ge=0, le=MAX_LEVEL), Unquoted] = MAX_LEVEL
    """Ceiling of the cost-saving modes. 0: plain; 1: quantised weights; 2: speculative decoding too; 3: all.
    A change reaches every pod without a restart."""
    engine: EngineSpec = EngineSpec()
    """The Deployment that runs the models."""
    gateway: GatewaySpec = GatewaySpec()
    """The Deployment that takes the requests."""
    tls: TLSSpec | None = None
    """Absent means that gateway and engines speak in the clear, as pods of one network do."""
    drain_deadline: Duration | None = None
    """How long running requests may go on when their pod has to end, as in a rollout; what is left then ends with an
    error. A pod without requests ends at once. Absent means 2m."""
    generation: GenerationSpec | None = None
    """Text generation; absent means that the generation endpoints answer 404."""
    classification: ClassificationSpec | None = None
    """Classification; absent means that /v1/classify answers 404."""
    batching: BatchingSpec | None = None
    """Batches by length; absent means first come, first served."""
    streaming: StreamingSpec = StreamingSpec()
    """Compressed streaming."""
    automation: Automation = Automation.ENFORCE
    """Enforce rolls back and recovers by itself; Observe decides, and only reports what it would do."""
    remediation: Remediation = Remediation.TICKET_ONLY
    """TicketOnly asks before it tunes a value; AutoApply tunes, and keeps what proves itself."""
    retry_token: Annotated[str, StringConstraints(max_length=64)] | None = None
    """Change it to forget rejections, suspensions and roll-backs."""
    analysis: AnalysisSpec = AnalysisSpec()
    """How health and waste are watched."""
    canary: CanarySpec | None = None
    """Absent means that upward steps hold for all requests at once."""
    shadow: ShadowSpec | None = None
    """Absent means that no answer is computed twice."""
    tickets: TicketsSpec = TicketsSpec()
    """Where tickets go beside the cluster."""

    rules = (
        Rule(
            "has(self.generation) || has(self.classification)",
            "at least one of spec.generation and spec.classification is needed",
            lambda s: s.generation is not None or s.classification is not None,
        ),
        Rule(
            "!has(self.classification) || !has(self.classification.engine) || has(self.generation)",
            "spec.classification.engine is for policies that generate too; without spec.generation use spec.engine",
            lambda s: s.classification is None or s.classification.engine is None or s.generation is not None,
        ),
        Rule(
            "!has(self.classification) || !has(self.classification.escalate) || has(self.generation)",
            "classification.escalate hands texts to generation: add spec.generation or remove it",
            lambda s: s.classification is None or s.classification.escalate is None or s.generation is not None,
        ),
        Rule(
            "!has(self.engine) || !has(self.engine.fullWeights)"
            " || (has(self.generation) && has(self.generation.quantized))",
            "engine.fullWeights is for policies with generation.quantized; remove it",
            lambda s: (
                s.engine.full_weights is None or (s.generation is not None and s.generation.quantized is not None)
            ),
        ),
        Rule(
            "!has(self.drainDeadline) || (duration(self.drainDeadline) >= duration('1s')"
            " && duration(self.drainDeadline) <= duration('24h'))",
            "drainDeadline must be between 1s and 24h",
            lambda s: 1.0 <= s.drain_seconds <= 86400.0,
        ),
    )

    @property
    def drain_seconds(self) -> float:
        """How long running requests may go on when their pod has to end."""
        return DRAIN_SECONDS if self.drain_deadline is None else duration_seconds(self.drain_deadline)


def engines(spec: InferencePolicySpec) -> tuple[EngineSpec, ...]:
    """The Deployments of engine pods that a policy asks for: the engine's, and the classifier's where it has one."""
    classifier = spec.classification and spec.classification.engine
    return (spec.engine, classifier) if classifier else (spec.engine,)


class ModeStatus(StatusModel):
    """One mode and its state."""

    name: Mode
    """The mode."""
    state: ModeState
    """Active, Canary, BelowLevel, Suspended, Unsupported or Off."""
    reason: Annotated[str, StringConstraints(max_length=256)] = ""
    """Why it is not active."""


class ConfigStatus(StatusModel):
    """How far the current RuntimeConfig has reached."""

    sequence: Annotated[int, Field(ge=0, json_schema_extra={"format": "int64"}), Unquoted]
    """Sequence number of the RuntimeConfig in the ConfigMap."""
    pods: Annotated[int, Field(ge=0), Unquoted]
    """Ready pods of the policy."""
    applied: Annotated[int, Field(ge=0), Unquoted]
    """Pods among them that report this sequence."""


class EngineStatus(StatusModel):
    """Engine pods, as the scale subresource shows them."""

    replicas: Annotated[int, Field(ge=0), Unquoted] = 0
    """Pods that exist."""
    ready_replicas: Annotated[int, Field(ge=0), Unquoted] = 0
    """Pods that are ready."""
    selector: Annotated[str, StringConstraints(max_length=512)] = ""
    """Label selector of the pods."""
    full_weights: FullWeights | None = None
    """Resident or Swap, as the pods decided; absent without quantised weights."""


class InferencePolicyStatus(StatusModel):
    """What the operator observed. Written by it alone."""

    observed_generation: Annotated[int, Field(ge=0, json_schema_extra={"format": "int64"}), Unquoted] | None = None
    """metadata.generation that this status describes."""
    effective_level: Annotated[int, Field(ge=0, le=MAX_LEVEL), Unquoted] | None = None
    """The level that every ready pod reports; it keeps its last value while they differ."""
    level: LevelStatus | None = None
    """The level that was decided."""
    modes: Annotated[
        list[ModeStatus],
        Field(
            max_length=16,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        ),
    ] = []
    """What each mode does now, and why not if it doesn't."""
    config: ConfigStatus | None = None
    """How far the configuration has reached."""
    engine: EngineStatus | None = None
    """Engine pods."""
    suspended: Annotated[
        list[Suspension],
        Field(
            max_length=8,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["mode"]},
        ),
    ] = []
    """Modes that the operator turned off."""
    tuned: Annotated[
        list[TunedValue],
        Field(
            max_length=32,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["path"]},
        ),
    ] = []
    """Values in place of the spec's."""
    canary: CanaryStatus | None = None
    """What is being tried on a share of the requests."""
    signals: Annotated[
        list[SignalStatus],
        Field(
            max_length=128,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        ),
    ] = []
    """Each signal as it was judged last; its values are metrics of the operator."""
    history: Annotated[list[HistoryEntry], Field(max_length=10)] = []
    """The last decisions, newest first."""
    control: ControlStatus | None = None
    """What the control loop remembers."""
    conditions: Conditions = []
    """Ready, WorkloadReady, VariantsReady, ConfigApplied; Conflict, OpenGateway, WeightsFailed, SlicesFailed,
    DraftShortened, KVReuseDegraded, PartsNotFound, ExposureFailed, AutoscalingFailed, TasksMissing, EscalationUnused,
    RolledBack, TicketOpen, MetricsAvailable, SignalsUnknown, ShadowActive where they say something."""
