"""How a variant's weights are stored, and what decides whether they are good enough."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from sixfold_api.base import ApiModel, Rule, StatusModel
from sixfold_api.scalars import Decimal, Fraction, NoFloat, OurName, Unquoted

CLAIM_FILE_PATTERN = r"^pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[A-Za-z0-9_][A-Za-z0-9._-]*)+$"
DEFAULT_SAMPLES = 128
MAX_DRAFT_LATENCY_RATIO = 0.2
MAX_DRAFT_PARAMETER_RATIO = 0.1
DRAFT_KL_LIMIT = 0.15
"""What a draft must keep to so that it pays: ratios up to the first two, a divergence below the third."""
_BITS = (2, 3, 4, 8)
_GROUP_SIZES = (-1, 32, 64, 128, 256, 512, 1024)


class Scheme(StrEnum):
    NONE = "None"
    GPTQ = "GPTQ"
    INT8 = "INT8"


Bits = Annotated[int, Field(ge=2, le=8), Unquoted, NoFloat]
GroupSize = Annotated[int, Field(ge=-1, le=1024), Unquoted, NoFloat]

_BITS_RULE = Rule(
    "!has(self.bits) || self.bits in [2, 3, 4, 8]",
    "bits must be 2, 3, 4 or 8",
    lambda p: p.bits is None or p.bits in _BITS,
)
_GROUP_RULE = Rule(
    "!has(self.groupSize) || self.groupSize in [-1, 32, 64, 128, 256, 512, 1024]",
    "groupSize must be 32, 64, 128, 256, 512, 1024, or -1 for the whole row",
    lambda p: p.group_size is None or p.group_size in _GROUP_SIZES,
)


class ModulePrecision(ApiModel):
    """Another precision for some modules."""

    match: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.*]+$", max_length=128)]
    """Name or end of the name of the modules, such as `o_proj` or `layers.0.*`; `*` stands for anything."""
    bits: Bits | None = None
    """Absent means as for the others."""
    group_size: GroupSize | None = None
    """Absent means as for the others."""
    full: Annotated[bool, Field(strict=True)] = False
    """Leave these modules in full precision."""

    rules = (
        _BITS_RULE,
        _GROUP_RULE,
        Rule(
            "has(self.full) && self.full ? !has(self.bits) && !has(self.groupSize)"
            " : has(self.bits) || has(self.groupSize)",
            "say either full: true, or bits or groupSize",
            lambda m: m.full is (m.bits is None and m.group_size is None),
        ),
    )


class Precision(ApiModel):
    """How weights are stored. GPTQ (Frantar et al., arXiv 2210.17323) is made from calibration text; INT8 rounds
    each output channel and suits CPUs."""

    scheme: Scheme = Scheme.NONE
    """None, GPTQ or INT8."""
    bits: Bits | None = None
    """GPTQ: 2, 3, 4 or 8; absent means 4."""
    group_size: GroupSize | None = None
    """GPTQ: weights that share a scale; absent means 128, -1 the whole row."""
    desc_act: Annotated[bool, Field(strict=True)] | None = None
    """GPTQ: take columns in the order of their activations; absent means true."""
    sym: Annotated[bool, Field(strict=True)] | None = None
    """GPTQ: without zero points; absent means false."""
    damp_percent: Fraction | None = None
    """GPTQ: damping of the Hessian; absent means 0.01."""
    modules: Annotated[list[ModulePrecision], Field(max_length=32)] = []
    """GPTQ: modules with a precision of their own; the first that matches counts. Embeddings and the output head
    always stay as they are."""

    rules = (
        _BITS_RULE,
        _GROUP_RULE,
        Rule(
            "(has(self.scheme) && self.scheme == 'GPTQ') || (!has(self.bits) && !has(self.groupSize)"
            " && !has(self.descAct) && !has(self.sym) && !has(self.dampPercent)"
            " && (!has(self.modules) || size(self.modules) == 0))",
            "bits, groupSize, descAct, sym, dampPercent and modules are for scheme: GPTQ; remove them",
            lambda p: (
                p.scheme is Scheme.GPTQ
                or ((p.bits, p.group_size, p.desc_act, p.sym, p.damp_percent) == (None,) * 5 and not p.modules)
            ),
        ),
    )


class TextSource(ApiModel):
    """Text on a claim: JSON lines, each with `text`, or with `messages` of a chat, and `label` for a classifier."""

    uri: Annotated[str, StringConstraints(max_length=512)]
    """pvc://claim/path.jsonl"""
    samples: Annotated[int, Field(ge=8, le=65536), Unquoted] | None = None
    """How many lines to use, the first ones; absent means 128, and all of them for exit heads and task slices."""

    rules = (
        Rule(
            f"self.uri.matches(r'{CLAIM_FILE_PATTERN}')",
            "uri must be pvc://claim/path of a JSONL file",
            lambda source: re.fullmatch(CLAIM_FILE_PATTERN, source.uri) is not None,
        ),
    )


class Adapter(ApiModel):
    """A LoRA adapter in PEFT's format."""

    uri: Annotated[str, StringConstraints(max_length=512)]
    """pvc://claim/path of its folder."""

    rules = (
        Rule(
            f"self.uri.matches(r'{CLAIM_FILE_PATTERN}')",
            "uri must be pvc://claim/path of the adapter's folder",
            lambda adapter: re.fullmatch(CLAIM_FILE_PATTERN, adapter.uri) is not None,
        ),
    )


class QualityReport(StatusModel):
    """The prepared weights against the source's, on text that neither calibration nor training saw."""

    metric: Annotated[str, StringConstraints(max_length=32)]
    """perplexity or accuracy."""
    source: Decimal
    """Of the source weights."""
    prepared: Decimal
    """Of the prepared weights."""
    loss: Decimal
    """What was lost: percent of perplexity, or points of accuracy."""
    budget: Decimal
    """Most that may be lost."""
    samples: Annotated[int, Field(ge=1)]
    """Held-out texts that were measured."""
    tries: Annotated[int, Field(ge=1)] = 1
    """Precisions that were tried; the report beside the weights has each."""
    kl: Decimal | None = None
    """Generation: mean KL divergence (nats a token) of the prepared weights from the source's."""

    @property
    def within_budget(self) -> bool:
        return float(self.loss) <= float(self.budget)


class DraftReport(StatusModel):
    """A draft against its target."""

    target: OurName
    """The ModelVariant that it drafts for."""
    latency_ratio: Decimal
    """Seconds of a decode step over the target's, one thread; at most 0.2 pays."""
    parameter_ratio: Decimal
    """Parameters over the target's; at most 0.1 pays."""
    kl: Decimal
    """Mean KL divergence (nats a token) of the draft from the target on held-out text; below 0.15 pays."""
    warnings: Annotated[list[Annotated[str, StringConstraints(max_length=256)]], Field(max_length=8)] = []
    """What keeps it from paying, with the figures."""
