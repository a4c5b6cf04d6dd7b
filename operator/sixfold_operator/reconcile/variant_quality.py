"""What a preparation measured -> the conditions WithinBudget, DraftCompatible and ExitsCalibrated. Pure."""

from __future__ import annotations

from sixfold_api.exit_heads import ExitReport
from sixfold_api.precision import (
    DRAFT_KL_LIMIT,
    MAX_DRAFT_LATENCY_RATIO,
    MAX_DRAFT_PARAMETER_RATIO,
    DraftReport,
    QualityReport,
)
from sixfold_operator.reconcile.rollout import Verdict

TOKENIZER_MISMATCH = "TokenizerMismatch"
"""Reason of the preparation for a draft that can't understand its target's token ids."""


def budget_verdict(quality: QualityReport) -> Verdict:
    """Whether quantising cost no more than it may, with the figures."""
    unit = "%" if quality.metric == "perplexity" else " points"
    precisions = "one precision" if quality.tries == 1 else f"{quality.tries} precisions"
    message = (
        f"{quality.metric} {quality.prepared}, {quality.source} before: {quality.loss}{unit} lost of at most"
        f" {quality.budget}{unit}, on {quality.samples} held-out texts, after trying {precisions}"
    )
    return Verdict(True, "WithinBudget", message) if quality.within_budget else Verdict(False, "OverBudget", message)


def draft_verdict(draft: DraftReport) -> Verdict:
    """Whether a draft is likely to pay; what speaks against it is a warning, not a refusal."""
    figures = (
        f"against {draft.target}: {draft.latency_ratio} of its step time (at most {MAX_DRAFT_LATENCY_RATIO} pays),"
        f" {draft.parameter_ratio} of its parameters (at most {MAX_DRAFT_PARAMETER_RATIO}),"
        f" KL {draft.kl} (below {DRAFT_KL_LIMIT})"
    )
    reasons = [
        reason
        for reason, too_much in (
            ("DraftTooSlow", float(draft.latency_ratio) > MAX_DRAFT_LATENCY_RATIO),
            ("DraftTooLarge", float(draft.parameter_ratio) > MAX_DRAFT_PARAMETER_RATIO),
            ("DraftUnlike", float(draft.kl) >= DRAFT_KL_LIMIT),
            ("DraftDiffers", bool(draft.warnings)),
        )
        if too_much
    ]
    if not reasons:
        return Verdict(True, "Compatible", figures)
    return Verdict(False, reasons[0], "; ".join([*draft.warnings, figures]))


def exits_verdict(exits: ExitReport) -> Verdict:
    """Whether exits save layers and keep their promise on held-out text; what speaks against them is a warning."""
    choice = exits.calibrated
    if not choice.lets_texts_exit:
        message = (
            f"no exit behind any of {exits.layers} layers keeps the disagreement with the full model under"
            " exitHeads.maxDisagreement, so every text runs through all of them; the report beside the weights has"
            " each depth"
        )
        return Verdict(False, "NoSafeExit", message)
    bound, measured = _percent(choice.disagreement_bound), _percent(exits.disagreement)
    message = (
        f"exit rate {float(choice.exit_rate):.2f}, {float(choice.mean_layers):.1f} of {exits.layers} layers on average,"
        f" at most {bound} disagree (95%), {measured} on held-out text"
    )
    if float(exits.disagreement) > float(choice.disagreement_bound):
        advice = "the calibration text isn't like it: calibrate with more, or more typical, text"
        return Verdict(False, "BoundExceeded", f"{message}; {advice}")
    return Verdict(True, "Calibrated", message)


def _percent(fraction: str) -> str:
    return f"{100 * float(fraction):.3g}%"
