"""spec.generation: which weights answer, and how tokens are made cheaply."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from sixfold_api.base import ApiModel, Rule
from sixfold_api.kv_reuse import KVCacheReuseSpec
from sixfold_api.pods import VariantRef
from sixfold_api.scalars import Fraction, Quantity, Unquoted
from sixfold_api.subgraphs import SubgraphsSpec

MAX_DRAFT_TOKENS = 16


class DraftDevice(StrEnum):
    AUTO = "Auto"
    CPU = "CPU"
    TARGET = "Target"


class DraftLength(StrEnum):
    """How many tokens a draft proposes at a time."""

    COST_MODEL = "CostModel"
    STEP_DOWN = "StepDown"
    FIXED = "Fixed"


class Acceptance(StrEnum):
    LOSSLESS = "Lossless"
    THRESHOLD = "Threshold"


class Guard(StrEnum):
    COHERENCE = "Coherence"
    SINGLE_TOKEN = "SingleToken"


class Overlap(StrEnum):
    AUTO = "Auto"
    ALWAYS = "Always"


class QuantizedSpec(ApiModel):
    """Quantised weights, on from level 1."""

    variant_ref: VariantRef
    """The ModelVariant with task Generation and a precision that answers in place of the full one."""


class ThresholdSpec(ApiModel):
    """The lossy rule: a drafted token stays if the target finds it likely enough. Changes what the model says."""

    min_probability: Fraction = "0.1"
    """Least probability under the target of a token that stays."""
    guard: Guard = Guard.COHERENCE
    """Coherence rejects a token that is unlike the three before it; SingleToken drafts one token at a time."""
    min_cosine: Fraction | None = None
    """Least cosine between a token's embedding and the mean of the three before it; absent means 0.6."""

    rules = (
        Rule(
            "!has(self.minCosine) || !has(self.guard) || self.guard == 'Coherence'",
            "minCosine is for guard: Coherence; remove it",
            lambda t: t.min_cosine is None or t.guard is Guard.COHERENCE,
        ),
    )


class SpeculativeSpec(ApiModel):
    """Speculative decoding, on from level 2: a small model drafts, the target verifies several tokens at once."""

    draft_variant_ref: VariantRef
    """The ModelVariant that drafts. It must have the target's tokenizer."""
    draft_device: DraftDevice = DraftDevice.AUTO
    """Target: beside the target; CPU: in the same pod, on its CPUs. Auto measures both and takes the faster one."""
    num_tokens: Annotated[int, Field(ge=1, le=MAX_DRAFT_TOKENS), Unquoted] = 5
    """Most tokens drafted at a time."""
    length: DraftLength = DraftLength.COST_MODEL
    """CostModel drafts as many as pay, from measured times and acceptance, and none where none pays. StepDown drafts
    one less after each failure and starts over after five successes. Fixed always drafts numTokens."""
    acceptance: Acceptance = Acceptance.LOSSLESS
    """Lossless keeps the target's distribution (its exact tokens, if greedy). Threshold doesn't."""
    threshold: ThresholdSpec | None = None
    """Only for acceptance: Threshold."""

    rules = (
        Rule(
            "!has(self.threshold) || (has(self.acceptance) && self.acceptance == 'Threshold')",
            "threshold is for acceptance: Threshold; remove it or set acceptance",
            lambda s: s.threshold is None or s.acceptance is Acceptance.THRESHOLD,
        ),
    )


class SamplerPipelineSpec(ApiModel):
    """Sampling beside the model instead of after it, on from level 3."""

    workers: Annotated[int, Field(ge=1, le=16), Unquoted] = 1
    """Sampler threads in each engine pod."""
    overlap: Overlap = Overlap.AUTO
    """Auto samples in line where no GPU computes meanwhile, and says so; Always overlaps."""
    buffer_size: Quantity | None = None
    """Bytes of one of the two logits buffers; absent means what the largest batch needs."""


class GenerationSpec(ApiModel):
    """Text generation: /v1/chat/completions and /v1/completions."""

    variant_ref: VariantRef
    """The ModelVariant with task Generation that answers at full precision."""
    quantized: QuantizedSpec | None = None
    """Quantised weights; absent means that the full ones answer at every level."""
    speculative: SpeculativeSpec | None = None
    """Speculative decoding; absent means plain decoding."""
    kv_cache_reuse: KVCacheReuseSpec | None = None
    """Keys and values that are kept between requests; absent means that every prompt is computed anew."""
    sampler_pipeline: SamplerPipelineSpec | None = None
    """Overlapped sampling; absent means in line."""
    subgraphs: SubgraphsSpec | None = None
    """Task slices of the full-precision variant, put on whichever weights answer; absent means no tasks."""

    rules = (
        Rule(
            "!has(self.quantized) || self.quantized.variantRef.name != self.variantRef.name",
            "quantized.variantRef must be another variant than variantRef",
            lambda g: g.quantized is None or g.quantized.variant_ref != g.variant_ref,
        ),
        Rule(
            "!has(self.speculative) || self.speculative.draftVariantRef.name != self.variantRef.name",
            "speculative.draftVariantRef must be another, much smaller variant than variantRef",
            lambda g: g.speculative is None or g.speculative.draft_variant_ref != g.variant_ref,
        ),
    )
