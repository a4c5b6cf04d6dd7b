"""Rules over several fields of a ModelVariant's spec: what belongs together, and what can't change."""

from __future__ import annotations

from sixfold_api.base import Rule
from sixfold_api.precision import Scheme, TextSource
from sixfold_api.scalars import Task

_QUANTISES = "(has(self.precision) && has(self.precision.scheme) && self.precision.scheme != 'None')"
_MAKES_SLICES = "(has(self.slices) && self.slices.exists(s, has(s.checkpoint) || has(s.training)))"
_REWRITES = f"{_QUANTISES} || has(self.lora) || has(self.exitHeads) || {_MAKES_SLICES}"
_IMMUTABLE = (
    "source",
    "task",
    "precision",
    "calibration",
    "evaluation",
    "accuracyBudgetPoints",
    "perplexityBudgetPercent",
    "lora",
    "draftFor",
    "exitHeads",
    "slices",
    "artifact",
)


def _unchanged(name: str) -> str:
    """CEL: an optional field is as it was."""
    return f"has(self.{name}) == has(oldSelf.{name}) && (!has(self.{name}) || self.{name} == oldSelf.{name})"


def _uris(*texts: TextSource | None) -> list[str]:
    return [text.uri for text in texts if text is not None]


VARIANT_RULES = (
    Rule(
        "!(has(self.source.uri) && self.source.uri.startsWith('hf://')) || has(self.artifact)",
        "an hf:// source needs artifact.claimName: the claim that the weights are written to",
        lambda v: not v.source.is_hub or v.artifact is not None,
    ),
    Rule(
        f"!({_REWRITES}) || has(self.artifact)",
        "precision, lora, exitHeads and slices that are made need artifact.claimName: the claim that the new"
        " weights are written to",
        lambda v: not v.rewrites or v.artifact is not None,
    ),
    Rule(
        f"(has(self.source.uri) && self.source.uri.startsWith('hf://')) || {_REWRITES} || !has(self.artifact)",
        "these weights are used in place: remove artifact",
        lambda v: v.writes or v.artifact is None,
    ),
    Rule(
        "(has(self.source.uri) && self.source.uri.startsWith('hf://')) || !has(self.credentialsSecretRef)",
        "credentialsSecretRef is for hf:// sources: remove it",
        lambda v: v.source.is_hub or v.credentials_secret_ref is None,
    ),
    Rule(
        f"has(self.calibration) == (({_QUANTISES} && self.precision.scheme == 'GPTQ') || has(self.exitHeads))",
        "calibration is needed for precision.scheme: GPTQ and for exitHeads, and only there",
        lambda v: (v.calibration is not None) == (v.precision.scheme is Scheme.GPTQ or v.exit_heads is not None),
    ),
    Rule(
        f"has(self.evaluation) == ({_QUANTISES} || has(self.draftFor) || has(self.exitHeads))",
        "evaluation is needed with precision, draftFor or exitHeads, and only there",
        lambda v: (v.evaluation is not None) == (v.quantises or v.draft_for is not None or v.exit_heads is not None),
    ),
    Rule(
        f"(!has(self.accuracyBudgetPoints) || ({_QUANTISES} && self.task == 'Classification'))"
        f" && (!has(self.perplexityBudgetPercent) || ({_QUANTISES} && self.task == 'Generation'))",
        "accuracyBudgetPoints is for a quantised classifier, perplexityBudgetPercent for a quantised generator",
        lambda v: (
            (v.accuracy_budget_points is None or (v.quantises and v.task is Task.CLASSIFICATION))
            and (v.perplexity_budget_percent is None or (v.quantises and v.task is Task.GENERATION))
        ),
    ),
    Rule(
        "self.task == 'Generation' || (!has(self.lora) && !has(self.draftFor))",
        "lora and draftFor are for task: Generation; remove them",
        lambda v: v.task is Task.GENERATION or (v.lora is None and v.draft_for is None),
    ),
    Rule(
        f"self.task != 'TokenClassification' || !({_QUANTISES})",
        "precision is for Generation and Classification; remove it",
        lambda v: v.task is not Task.TOKEN_CLASSIFICATION or not v.quantises,
    ),
    Rule(
        "self.task == 'Classification' || !has(self.exitHeads)",
        "exitHeads are for task: Classification; remove them",
        lambda v: v.task is Task.CLASSIFICATION or v.exit_heads is None,
    ),
    Rule(
        f"!({_QUANTISES}) || (!has(self.exitHeads) && (!has(self.slices) || size(self.slices) == 0))",
        "exitHeads and slices belong to the weights that answer: quantise in one ModelVariant, and take it as"
        " source.variantRef of another",
        lambda v: not v.quantises or (v.exit_heads is None and not v.slices),
    ),
    Rule(
        "!has(self.calibration) || !has(self.evaluation) || self.calibration.uri != self.evaluation.uri",
        "evaluation must be held-out text: another file than calibration",
        lambda v: v.calibration is None or v.evaluation is None or v.calibration.uri != v.evaluation.uri,
    ),
    Rule(
        "!has(self.exitHeads)"
        " || ((!has(self.calibration) || self.calibration.uri != self.exitHeads.training.uri)"
        " && (!has(self.evaluation) || self.evaluation.uri != self.exitHeads.training.uri))",
        "exitHeads.training must be another file than calibration and evaluation: heads are too sure of text that"
        " they have learned",
        lambda v: v.exit_heads is None or v.exit_heads.training.uri not in _uris(v.calibration, v.evaluation),
    ),
    Rule(
        "!has(self.slices) || self.slices.all(s, self.slices.exists_one(other, other.name == s.name))",
        "each slice needs a name of its own",
        lambda v: len({entry.name for entry in v.slices}) == len(v.slices),
    ),
    Rule(
        "!has(self.slices) || self.slices.all(s, !has(s.task) || ((s.task == 'Generation')"
        " == (self.task == 'Generation')))",
        "slices of a generating trunk generate, and slices of a classifier classify",
        lambda v: all(s.task is None or (s.task is Task.GENERATION) == (v.task is Task.GENERATION) for s in v.slices),
    ),
    Rule(
        " && ".join(_unchanged(name) for name in _IMMUTABLE),
        "what shapes the weights is immutable: create another ModelVariant and point the policy to it",
    ),
)
