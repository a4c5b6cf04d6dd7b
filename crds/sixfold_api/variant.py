"""ModelVariant: one deployable form of a model, and what its preparation found."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, StringConstraints

from sixfold_api.base import ApiModel, Rule, SpecModel, StatusModel
from sixfold_api.conditions import Conditions
from sixfold_api.pods import ClaimRef, PodSettings, SecretRef
from sixfold_api.scalars import Duration, Task, duration_seconds

HUB_SCHEME = "hf://"
CLAIM_SCHEME = "pvc://"
PERMANENT_FAILURE_EXIT_CODE = 2
"""How `sixfold prepare` ends when another try would find the same; 1 when it might not."""
URI_PATTERN = (
    r"^(hf://[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*@[0-9a-f]{40}"
    r"|pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[A-Za-z0-9_][A-Za-z0-9._-]*)+)$"
)


class Source(ApiModel):
    """Where the weights come from."""

    uri: Annotated[str, StringConstraints(max_length=512)]
    """hf://org/name@commit (a full commit, so that the weights can't move) or pvc://claim/path."""

    rules = (
        Rule(
            f"self.uri.matches(r'{URI_PATTERN}')",
            "uri must be hf://org/name@commit with the 40 hex digits of a commit (a branch or tag could move),"
            " or pvc://claim/path",
            lambda source: re.fullmatch(URI_PATTERN, source.uri) is not None,
        ),
    )


class Preparation(ApiModel):
    """The Job that fetches and verifies the weights."""

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
    """Generation (a causal language model) or Classification (a sequence classifier)."""
    artifact: ClaimRef | None = None
    """The claim that fetched weights are written to. Needed for hf://; a pvc:// source is used in place."""
    credentials_secret_ref: SecretRef | None = None
    """Secret with the entry `token` for a private hub repository. Mounted into the Job, never read by the operator."""
    preparation: Preparation = Preparation()
    """The preparation Job."""

    rules = (
        Rule(
            "!self.source.uri.startsWith('hf://') || has(self.artifact)",
            "an hf:// source needs artifact.claimName: the claim that the weights are written to",
            lambda v: not v.source.uri.startswith(HUB_SCHEME) or v.artifact is not None,
        ),
        Rule(
            "!self.source.uri.startsWith('pvc://') || !has(self.artifact)",
            "a pvc:// source is used in place: remove artifact",
            lambda v: not v.source.uri.startswith(CLAIM_SCHEME) or v.artifact is None,
        ),
        Rule(
            "self.source.uri.startsWith('hf://') || !has(self.credentialsSecretRef)",
            "credentialsSecretRef is for hf:// sources: remove it",
            lambda v: v.source.uri.startswith(HUB_SCHEME) or v.credentials_secret_ref is None,
        ),
        Rule(
            "self.source == oldSelf.source && self.task == oldSelf.task && has(self.artifact) == has(oldSelf.artifact)"
            " && (!has(self.artifact) || self.artifact == oldSelf.artifact)",
            "source, task and artifact are immutable: create another ModelVariant and point the policy to it",
        ),
    )


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
    job_name: Annotated[str, StringConstraints(max_length=63)] | None = None
    """The preparation Job."""
    conditions: Conditions = []
    """Ready and Prepared."""


class PreparationFailure(StatusModel):
    """Why a preparation can't succeed."""

    reason: Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Za-z0-9]*$", max_length=64)]
    """One word, used as the reason of the condition Prepared."""
    message: Annotated[str, StringConstraints(max_length=1024)]
    """What was wrong, in which file, and what to do."""


class PreparationSummary(StatusModel):
    """The Job's termination message (at most 4 KiB): facts, or the failure."""

    facts: ArtifactFacts | None = None
    failure: PreparationFailure | None = None
