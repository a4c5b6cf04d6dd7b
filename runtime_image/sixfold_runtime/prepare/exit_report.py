"""The report on exit heads: the summary for the status, all figures as data, a plot of them, and tables for a log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sixfold_api.classification import ExitRule
from sixfold_api.exit_heads import ExitChoice, ExitHeads, ExitReport
from sixfold_runtime.modes.early_exit import Choice, choose
from sixfold_runtime.prepare.evaluate import decimal
from sixfold_runtime.prepare.exit_measures import Answers, HeldOut, calibration_error, held_out, surface
from sixfold_runtime.prepare.exit_plot import draw
from sixfold_runtime.prepare.exit_training import TrainedHead

PLOT = "exits.svg"
BUDGETS = (0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1)
"""Of disagreement, for which the report says what they would buy."""
_WIDTH = 120


@dataclass(frozen=True)
class Measured:
    """Heads, and what they say about text that they didn't learn from."""

    heads: Sequence[TrainedHead]
    calibration: Answers
    held_out: Answers


def make(measured: Measured, spec: ExitHeads) -> tuple[ExitReport, dict[str, Any]]:
    """Choose by both rules, and measure the calibrated choice on held-out text."""
    calibration = measured.calibration.calibration
    calibrated, quantile = (choose(calibration, rule) for rule in (ExitRule.CALIBRATED, ExitRule.QUANTILE))
    result = held_out(measured.held_out, calibrated.exits)
    report = ExitReport(
        layers=calibration.layers,
        calibrated=_choice(calibrated),
        quantile=_choice(quantile),
        samples=len(measured.held_out.labels),
        mean_layers=decimal(result.choice.mean_layers),
        disagreement=decimal(result.choice.disagreement),
        accuracy=decimal(result.accuracy),
        full_accuracy=decimal(result.full_accuracy),
        calibration_error=decimal(result.calibration_error),
    )
    content = {
        "layers": calibration.layers,
        "maxDisagreement": float(spec.max_disagreement),
        "lengthRelaxation": float(spec.length_relaxation),
        "depths": _depths(measured),
        "calibrated": _choice(calibrated).to_dict(),
        "quantile": _choice(quantile).to_dict(),
        "budgets": [
            {
                "maxDisagreement": budget,
                **_choice(choose(calibration, ExitRule.CALIBRATED, max_disagreement=budget)).to_dict(),
            }
            for budget in BUDGETS
        ],
        "surface": surface(measured.calibration),
        "fullAccuracy": round(measured.calibration.full_accuracy, 6),
        "heldOut": _held_out(result),
        "heldOutQuantile": _held_out(held_out(measured.held_out, quantile.exits)),
    }
    return report, content


def _choice(choice: Choice) -> ExitChoice:
    return ExitChoice(
        depths=sorted(choice.exits.thresholds),
        thresholds=[decimal(choice.exits.thresholds[depth]) for depth in sorted(choice.exits.thresholds)],
        exit_rate=decimal(choice.exit_rate),
        mean_layers=decimal(choice.mean_layers),
        disagreement=decimal(choice.disagreement),
        disagreement_bound=decimal(choice.disagreement_bound),
    )


def _held_out(result: HeldOut) -> dict[str, Any]:
    """`accuracyLoss` and its 95% interval are shares, paired by text."""
    return {
        "exitRate": round(result.choice.exit_rate, 6),
        "meanLayers": round(result.choice.mean_layers, 6),
        "disagreement": round(result.choice.disagreement, 6),
        "accuracy": round(result.accuracy, 6),
        "fullAccuracy": round(result.full_accuracy, 6),
        "accuracyLoss": round(result.loss, 6),
        "accuracyLossInterval": [round(end, 6) for end in result.interval],
        "calibrationError": round(result.calibration_error, 6),
        "textsByDepth": {str(depth): count for depth, count in result.exits.items()},
    }


def _depths(measured: Measured) -> list[dict[str, Any]]:
    """What each head is worth by itself, if all held-out texts left there."""
    answers = measured.held_out
    depths = []
    for index, (depth, head) in enumerate(zip(answers.calibration.depths, measured.heads, strict=True)):
        right = answers.predicted[:, index] == answers.labels
        confidences = answers.calibration.confidences[:, index]
        depths.append(
            {
                "depth": depth,
                "accuracy": round(float(right.mean()), 6),
                "agreement": round(float(answers.calibration.agrees[:, index].mean()), 6),
                "calibrationError": round(calibration_error(confidences, right), 6),
                "temperature": round(head.temperature, 6),
                "sharpness": round(head.sharpness, 6),
                "ridge": head.ridge,
            }
        )
    return depths


def plot(folder: Path, content: Mapping[str, Any]) -> None:
    """Draw the surface and the choice beside the weights."""
    (folder / PLOT).write_text(draw(content), encoding="utf-8")


def show(content: Mapping[str, Any], console: Console | None = None) -> None:
    """Tables of the heads, of the rules, and of what was measured on held-out text."""
    console = console or Console(stderr=True, width=_WIDTH, highlight=False)
    heads = _table("Exit heads, each on all held-out texts", ("layers", "accuracy", "agreement", "calibration error"))
    for row in content["depths"]:
        heads.add_row(
            f"{row['depth']} of {content['layers']}", f"{row['accuracy']:.1%}", f"{row['agreement']:.1%}",
            f"{row['calibrationError']:.3f}",
        )  # fmt: skip
    console.print(heads)
    rules = _table("Thresholds, on calibration text", ("rule", "exits", "leave early", "layers", "disagree", "at most"))
    for name in ("calibrated", "quantile"):
        rules.add_row(name, *_rule(content[name]))
    console.print(rules)
    result = content["heldOut"]
    low, high = result["accuracyLossInterval"]
    console.print(
        f"held out: {result['exitRate']:.1%} leave early, {result['meanLayers']:.2f} of {content['layers']} layers in "
        f"the mean, {result['disagreement']:.2%} disagree; accuracy {result['fullAccuracy']:.2%} -> "
        f"{result['accuracy']:.2%} (loss {100 * result['accuracyLoss']:.2f} points, 95% interval {100 * low:.2f} to "
        f"{100 * high:.2f})",
        soft_wrap=True,
    )
    if not content["calibrated"]["depths"]:
        console.print(
            f"no threshold keeps disagreement within {content['maxDisagreement']:.1%} at 95% confidence, so that every "
            "text runs through: add calibration text, or allow more disagreement",
            soft_wrap=True,
        )


def _rule(choice: Mapping[str, Any]) -> list[str]:
    exits = ", ".join(
        f"{depth}: {float(threshold):.3f}"
        for depth, threshold in zip(choice["depths"], choice["thresholds"], strict=True)
    )
    return [
        exits or "none", f"{float(choice['exitRate']):.1%}", f"{float(choice['meanLayers']):.2f}",
        f"{float(choice['disagreement']):.2%}", f"{float(choice['disagreementBound']):.2%}",
    ]  # fmt: skip


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=None)
    for column in columns:
        table.add_column(column, justify="left" if column in ("layers", "rule", "exits") else "right")
    return table
