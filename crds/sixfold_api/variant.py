"""ModelVariant: one deployable form of a model, and what its preparation found."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, StringConstraints

from sixfold_api.base import ApiModel, Rule, SpecModel, StatusModel
from sixfold_api.conditions import Conditions
from sixfold_api.exit_heads import ExitHeads, ExitReport, ExitTraining
from sixfold_api.pods import ClaimRef, PodSettings, SecretRef, VariantRef
from sixfold_api.precision import Adapter, DraftReport, Precision, QualityReport, Scheme, TextSource
from sixfold_api.scalars import Decimal, Duration, Task, duration_seconds
from sixfold_api.subgraphs import MAX_TASKS, SliceReport, SliceSpec
from sixfold_api.variant_rules import VARIANT_RULES

HUB_SCHEME = "hf://"
CLAIM_SCHEME = "pvc://"
DEFAULT_ACCURACY_BUDGET_POINTS = "0.5"
DEFAULT_PERPLEXITY_BUDGET_PERCENT = "1"
PERMANENT_FAILURE_EXIT_CODE = 2
"""How `sixfold prepare` ends when another try would find the same; 1 when it might not."""
URI_PATTERN = (
    r"^(hf://[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*@[0-9a-f]{40}"
    r"|pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[A-Za-z0-9_][A-Za-z0-9._-]*)+)$"
)


class Source(ApiModel):
    """Where the weights come from."""

    uri: Annotated[str, StringConstraints(max_length=512)] | None = None
    """hf://org/name@commit (a full commit, so that the weights can't move) or pvc://claim/path."""
    variant_ref: VariantRef | None = None
    """Another ModelVariant, whose prepared weights are the source."""

    rules = (
        Rule(
            "has(self.uri) != has(self.variantRef)",
            "source needs either uri or variantRef",
            lambda source: (source.uri is None) != (source.variant_ref is None),
        ),
        Rule(
            f"!has(self.uri) || self.uri.matches(r'{URI_PATTERN}')",
            "uri must be hf://org/name@commit with the 40 hex digits of a commit (a branch or tag could move),"
            " or pvc://claim/path",
            lambda source: source.uri is None or re.fullmatch(URI_PATTERN, source.uri) is not None,
        ),
    )

    @property
    def is_hub(self) -> bool:
        return self.uri is not None and self.uri.startswith(HUB_SCHEME)


class Preparation(ApiModel):
    """The Job that fetches, quantises, compares and verifies the weights, whatever of it the variant asks for."""

    deadline: Duration = "1h"
    """The Job fails after this time."""
    pod: PodSettings = PodSettings()
    """Placement and size of the Job's pod."""

    rules = (
        Rule(
            "!has(self.deadline) || (duration(self.deadline) >= duration('1s')"
            " && duration(self.deadline) <= duration('720h'))",
            "deadline must be between 1s and 720h",
            lambda p: 1 <= duration_seconds(p.deadline) <= 720 * 3600,
        ),
    )


class ModelVariantSpec(SpecModel):
    """What shapes the artifact can't change: make a new variant instead."""

    source: Source
    """Where the weights come from."""
    task: Task
    """Generation (a causal language model), Classification (a sequence classifier) or TokenClassification."""
    precision: Precision = Precision()
    """How the weights are stored; absent means as they come."""
    calibration: TextSource | None = None
    """Text of your own business that GPTQ or the thresholds of exit heads are calibrated on."""
    evaluation: TextSource | None = None
    """Held-out text, not the calibration's, that prepared weights, exits and drafts are measured on."""
    accuracy_budget_points: Decimal | None = None
    """Classification: most points of accuracy that quantising may cost; absent means 0.5."""
    perplexity_budget_percent: Decimal | None = None
    """Generation: most percent of perplexity that quantising may cost; absent means 1."""
    lora: Adapter | None = None
    """A LoRA adapter to put on the weights."""
    draft_for: VariantRef | None = None
    """The ModelVariant that this one is a draft for: they are compared, and DraftCompatible says how it went."""
    exit_heads: ExitHeads | None = None
    """Heads behind early layers of a classifier; a policy's earlyExit uses them."""
    slices: Annotated[
        list[SliceSpec],
        Field(
            max_length=MAX_TASKS,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        ),
    ] = []
    """Tasks on one shared trunk; a policy's subgraphs offer them."""
    artifact: ClaimRef | None = None
    """The claim that fetched or quantised weights are written to. A source that is used as it is needs none."""
    credentials_secret_ref: SecretRef | None = None
    """Secret with the entry `token` for a private hub repository. Mounted into the Job, never read by the operator."""
    preparation: Preparation = Preparation()
    """The preparation Job."""

    rules = VARIANT_RULES

    @property
    def quantises(self) -> bool:
        return self.precision.scheme is not Scheme.NONE

    @property
    def budget(self) -> str:
        """Most that quantising may cost: points of accuracy, or percent of perplexity."""
        if self.task is Task.CLASSIFICATION:
            return self.accuracy_budget_points or DEFAULT_ACCURACY_BUDGET_POINTS
        return self.perplexity_budget_percent or DEFAULT_PERPLEXITY_BUDGET_PERCENT

    @property
    def makes_slices(self) -> bool:
        return any(entry.is_made for entry in self.slices)

    @property
    def rewrites(self) -> bool:
        """Whether the preparation makes other files than the source's."""
        return self.quantises or self.lora is not None or self.exit_heads is not None or self.makes_slices

    @property
    def keeps_weights(self) -> bool:
        """Whether the source's weights answer, with heads or slices beside them at most."""
        retrains = self.exit_heads is not None and self.exit_heads.train is ExitTraining.TRUNK
        return not (self.source.is_hub or self.quantises or self.lora is not None or retrains)

    @property
    def writes(self) -> bool:
        """Whether the preparation makes a folder of its own instead of using the source in place."""
        return self.source.is_hub or self.rewrites


class ArtifactFacts(StatusModel):
    """What the preparation found out about the weights."""

    digest: Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$", max_length=71)]
    """SHA-256 over names and contents of the files that a model is made of."""
    size_bytes: Annotated[int, Field(ge=0, json_schema_extra={"format": "int64"})]
    """Bytes of the weight files."""
    parameters: Annotated[int, Field(ge=0, json_schema_extra={"format": "int64"})]
    """Number of parameters."""
    architecture: Annotated[str, StringConstraints(max_length=128)]
    """Model class, such as LlamaForCausalLM."""
    dtype: Annotated[str, StringConstraints(max_length=32)]
    """Data type of most parameters, such as bfloat16."""
    context_tokens: Annotated[int, Field(ge=1)]
    """Longest sequence that the model takes."""
    vocabulary_tokens: Annotated[int, Field(ge=1)]
    """Size of the tokenizer's vocabulary."""
    tokenizer_fingerprint: Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$", max_length=71)]
    """SHA-256 of the tokenizer: variants with the same one understand each other's token ids."""
    scheme: Scheme = Scheme.NONE
    """How the weights are stored."""
    labels: Annotated[list[Annotated[str, StringConstraints(max_length=63)]], Field(max_length=256)] = []
    """Labels of a classifier, in the order of its head; cut after 256."""


class ArtifactStatus(ArtifactFacts):
    """Where the verified weights lie."""

    claim_name: Annotated[str, StringConstraints(max_length=253)]
    """PersistentVolumeClaim that holds them."""
    path: Annotated[str, StringConstraints(max_length=512)]
    """Folder inside the claim."""


class ModelVariantStatus(StatusModel):
    """What the operator observed. Written by it alone."""

    observed_generation: Annotated[int, Field(ge=0, json_schema_extra={"format": "int64"})] | None = None
    """metadata.generation that this status describes."""
    artifact: ArtifactStatus | None = None
    """The verified weights; absent until they are."""
    size: Annotated[str, StringConstraints(max_length=16)] | None = None
    """Bytes of the weights for people, such as 7.1 MiB."""
    quality: QualityReport | None = None
    """What quantising cost."""
    draft: DraftReport | None = None
    """How this draft compares to its target."""
    exits: ExitReport | None = None
    """What early exits save and cost."""
    slices: Annotated[list[SliceReport], Field(max_length=MAX_TASKS)] = []
    """Task slices that can be offered."""
    job_name: Annotated[str, StringConstraints(max_length=63)] | None = None
    """The preparation Job."""
    conditions: Conditions = []
    """Ready and Prepared; WithinBudget where weights were quantised, DraftCompatible for a draft, ExitsCalibrated
    with exit heads."""


class PreparationFailure(StatusModel):
    """Why a preparation can't succeed."""

    reason: Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Za-z0-9]*$", max_length=64)]
    """One word, used as the reason of the condition Prepared."""
    message: Annotated[str, StringConstraints(max_length=1024)]
    """What was wrong, in which file, and what to do."""


class PreparationSummary(StatusModel):
    """The Job's termination message (at most 4 KiB): facts, or the failure, and what was measured either way."""

    facts: ArtifactFacts | None = None
    quality: QualityReport | None = None
    draft: DraftReport | None = None
    exits: ExitReport | None = None
    slices: list[SliceReport] = []
    failure: PreparationFailure | None = None
