"""What the operator tells pods, and what pods tell the operator.

`RuntimeConfig` travels in a ConfigMap and changes without a restart. `ServedModel` is part of the pod template:
a change rolls the pods. `PodState` is what a pod answers on /state.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field

from sixfold_api.analysis import HashBy
from sixfold_api.base import ApiModel, StatusModel
from sixfold_api.classification import KEPT_CHARACTERS_RULES, ExitRule, KeptCharacters, OtherScripts
from sixfold_api.gateway import Priority
from sixfold_api.generation import MAX_DRAFT_TOKENS, Acceptance, DraftDevice, DraftLength, Guard, Overlap
from sixfold_api.kv_reuse import KVStore
from sixfold_api.modes import MAX_LEVEL, Mode
from sixfold_api.scalars import Compression, FullWeights, Task


class ConfigModel(ApiModel):
    """Fields are only ever added; one that this version doesn't know is reported by the runtime, not refused."""

    model_config = ConfigDict(extra="allow")


class StreamingConfig(ConfigModel):
    compression: Compression
    level: Annotated[int, Field(ge=1, le=19)]


class RateLimitConfig(ConfigModel):
    """A gateway's own share of the policy's limit."""

    requests_per_second: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    burst: Annotated[int, Field(ge=1)]


class SpeculativeConfig(ConfigModel):
    num_tokens: Annotated[int, Field(ge=1, le=MAX_DRAFT_TOKENS)]
    length: DraftLength = DraftLength.COST_MODEL
    acceptance: Acceptance = Acceptance.LOSSLESS
    min_probability: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Of acceptance Threshold."""
    guard: Guard = Guard.COHERENCE
    min_cosine: Annotated[float, Field(ge=0, le=1)] = 0.6


class SamplerPipelineConfig(ConfigModel):
    workers: Annotated[int, Field(ge=1)]
    overlap: Overlap = Overlap.AUTO
    buffer_bytes: int | None = None
    """Of one of the two buffers; None is what the largest batch needs."""


class SanitizeConfig(ConfigModel):
    keep: KeptCharacters
    other_scripts: OtherScripts = OtherScripts.KEEP

    rules = KEPT_CHARACTERS_RULES


class EarlyExitConfig(ConfigModel):
    rule: ExitRule = ExitRule.CALIBRATED
    threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    """Of rule Fixed."""
    max_disagreement: Annotated[float, Field(ge=0, le=1)] | None = None
    """Of rule Calibrated; None is the variant's."""
    length_relaxation: Annotated[float, Field(ge=0, le=1)] | None = None
    """None is the variant's."""
    sanitize: SanitizeConfig | None = None


class EscalateConfig(ConfigModel):
    below_confidence: Annotated[float, Field(ge=0, le=1)]
    prompt_template: str
    max_tokens: Annotated[int, Field(ge=1)]


class TaskConfig(ConfigModel):
    name: str
    pinned: bool = False


class SubgraphsConfig(ConfigModel):
    """Task slices of one model. They answer at every level; what the mode decides is where they are meanwhile."""

    tasks: tuple[TaskConfig, ...]
    on_demand: bool
    """False: all stay in memory, because the mode is off."""
    cache_bytes: int | None = None
    """None is no limit."""


class KVReuseConfig(ConfigModel):
    store: KVStore
    ttl_seconds: Annotated[float, Field(gt=0)]
    max_bytes: Annotated[int, Field(ge=0)]
    """In Redis."""
    memory_bytes: Annotated[int, Field(ge=0)]
    """In a pod's own memory."""
    block_tokens: Annotated[int, Field(ge=1)]
    min_prompt_tokens: int | None = None
    """None is what the engine measures."""


class BatchingConfig(ConfigModel):
    max_batch_tokens: Annotated[int, Field(ge=1)]
    short_wait_seconds: Annotated[float, Field(ge=0)]
    long_wait_seconds: Annotated[float, Field(ge=0)]
    max_wait_seconds: Annotated[float, Field(ge=0)]
    max_queued_requests: Annotated[int, Field(ge=1)]


class TenantConfig(ConfigModel):
    name: str
    priority: Priority
    max_priority: Priority
    """The highest that X-Priority may ask for."""


class RequestLimits(ConfigModel):
    """Of one request, at the gateway."""

    max_bytes: Annotated[int, Field(ge=1)] = 4 * 2**20
    timeout_seconds: Annotated[float, Field(gt=0)] = 600.0


class ShadowConfig(ConfigModel):
    """Answers that are computed again at level 0, and compared."""

    sample_rate: Annotated[float, Field(ge=0, le=1)]


class EffectiveConfig(ConfigModel):
    """The settings that a pod obeys."""

    level: Annotated[int, Field(ge=0, le=MAX_LEVEL)]
    active_modes: tuple[Mode | str, ...]
    streaming: StreamingConfig
    rate_limit: RateLimitConfig | None = None
    speculative: SpeculativeConfig | None = None
    """None while the mode is off."""
    sampler_pipeline: SamplerPipelineConfig | None = None
    """None while the mode is off."""
    kv_reuse: KVReuseConfig | None = None
    """None while the mode is off."""
    batching: BatchingConfig | None = None
    """None while the mode is off."""
    tenants: tuple[TenantConfig, ...] = ()
    """Those whose priority isn't Normal."""
    request_limits: RequestLimits = RequestLimits()
    demo_page: bool = False
    early_exit: EarlyExitConfig | None = None
    """None while the mode is off."""
    classification_subgraphs: SubgraphsConfig | None = None
    """None where the classifier has no tasks."""
    generation_subgraphs: SubgraphsConfig | None = None
    """None where the generating model has no tasks."""
    escalate: EscalateConfig | None = None
    """No mode: on at every level."""
    shadow: ShadowConfig | None = None
    """None where no answer is computed twice."""
    may_sleep: bool = False
    """Engines go while nobody asks: requests wait until they are back."""

    def is_active(self, mode: Mode) -> bool:
        return mode in self.active_modes


class SetBy(StrEnum):
    """Which of the layers set a value; later ones win."""

    DEFAULT = "Default"
    SPEC = "Spec"
    TUNED = "Tuned"
    SUSPENDED = "Suspended"
    LEVEL = "Level"


class Provenance(ConfigModel):
    """One effective value and where it comes from."""

    path: str
    """JSON pointer into the policy's spec."""
    value: str
    set_by: SetBy | str
    why: str = ""


STABLE, CANARY = "stable", "canary"
"""Arms."""


class CanaryConfig(ConfigModel):
    """What a share of the requests runs instead.

    Settings of a whole process (the sampler pipeline, batching, where task slices are) are the stable arm's for all:
    they change when the canary is promoted.
    """

    percent: Annotated[int, Field(ge=1, le=99)]
    hash_by: HashBy = HashBy.CONVERSATION
    config: EffectiveConfig


class RuntimeConfig(ConfigModel):
    """Content of `config.json` in the ConfigMap <policy>-runtime."""

    sequence: Annotated[int, Field(ge=0)]
    """Grows with every change: max(last + 1, unix milliseconds)."""
    stable: EffectiveConfig
    canary: CanaryConfig | None = None
    provenance: tuple[Provenance, ...] = ()
    """Of the stable arm."""

    def of(self, arm: str) -> EffectiveConfig:
        """What a request of an arm obeys; a canary that has just ended is stable."""
        return self.canary.config if arm == CANARY and self.canary is not None else self.stable


class WeightSet(ApiModel):
    """Other weights of a served model."""

    name: str
    """Name of the ModelVariant."""
    path: str
    """Folder in the container."""
    digest: str = ""
    """Digest that the preparation recorded."""


class Draft(WeightSet):
    """The model that drafts for a served model."""

    device: DraftDevice = DraftDevice.AUTO


class ServedModel(ApiModel):
    """One model that an engine pod loads."""

    name: str
    """Name of the ModelVariant."""
    task: Task
    path: str
    """Folder in the container."""
    digest: str = ""
    """Digest that the preparation recorded; the engine keys caches by it."""
    quantized: WeightSet | None = None
    """What answers in place of these weights while the mode Quantized is on."""
    full_weights: FullWeights = FullWeights.AUTO
    """Where these weights are meanwhile."""
    draft: Draft | None = None
    """What drafts while the mode Speculative is on."""


class Role(StrEnum):
    GATEWAY = "gateway"
    ENGINE = "engine"
    ALL = "all"


class ModelState(StatusModel):
    name: str
    task: Task
    ready: bool
    error: str = ""
    weights: str = ""
    """Name of the ModelVariant whose weights new requests get."""
    full_weights: FullWeights | None = None
    """Resident or Swap; None without quantised weights."""
    swap_seconds: float | None = None
    """How long the last exchange of weights took."""
    weights_error: str = ""
    """Why the weights that the level asks for can't be loaded; those that ran before go on."""
    draft_shortened: str = ""
    """Why drafts are shorter than the policy allows: memory."""
    slice_errors: dict[str, str] = {}
    """Tasks that the policy offers and that can't be served, with the reasons; the others are served."""


class PodState(StatusModel):
    """What /state answers. The operator derives ConfigApplied and effectiveLevel from it."""

    role: Role
    pod: str
    ready: bool
    sequence: int
    """Sequence of the RuntimeConfig in use; 0 before the first."""
    level: int
    config_error: str = ""
    """Why the newest config.json was refused; the last good one stays in use."""
    unknown_fields: tuple[str, ...] = ()
    """Fields of config.json that this image doesn't know: the operator is newer."""
    unsupported: dict[Mode, str] = {}
    """Modes that are on but can't run in this pod, with the reason."""
    models: tuple[ModelState, ...] = ()
    tenants: int | None = None
    """Tenants with an API key; None where the gateway is open, and in engines."""
    shadow_off: str = ""
    """Why this pod doesn't compute answers again although the configuration says so; "" where it does."""
    not_found: tuple[str, ...] = ()
    """What the policy names and this pod doesn't find, in sentences; it serves without."""
    idle_seconds: float | None = None
    """Since the last request ended, 0 while one runs or waits; None in engines."""
