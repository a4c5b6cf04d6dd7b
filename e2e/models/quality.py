"""Measures what the prepared sentiment model answers, through the engine as it is served: a table, then one JSON line.

    .venv/bin/python e2e/models/quality.py FOLDER    # with exits.safetensors and slices/, as `sixfold prepare` writes
    it

Held-out film reviews and the texts of three other domains: accuracy through all layers and with early exit, layers run,
disagreement with the full model against the bound that was calibrated, calibration error, and the drift that the
engine's metrics show. Then the tasks of the slices. No text here was trained or calibrated on.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch starts its threads
sys.path.insert(0, str(Path(__file__).parent))

from paired import accuracy, calibration_error, difference, macro_f1
from prepared import PreparationFailedError, prepared_example
from progress import CONSOLE, Stage
from reviews import LABELS, Review, splits
from rich.console import Console
from rich.table import Table
from tasks import glosses, sentences

from sixfold_runtime.prepare.files import REPORT
from sixfold_runtime.sdk import Classification, InferenceEngine

DOMAINS = {"heldout": "film reviews", "amazon": "product reviews", "tweets": "tweets", "nyt": "editorials"}
TEXTS_A_CALL = 250
TABLES = Console(stderr=True, width=max(CONSOLE.width, 130))
DRIFTS = {"length_drift": "sixfold_exit_length_drift", "exit_rate_drift": "sixfold_exit_rate_drift"}


@dataclass(frozen=True)
class DomainFigures:
    """Of one domain. Shares, not percent; ``loss`` is full accuracy less that with exits, with its 95% interval.

    ``length_drift`` and ``exit_rate_drift`` are the engine's gauges after the domain's last texts; ``exits`` counts
    texts by layers run.
    """

    texts: int
    full_accuracy: float
    accuracy: float
    loss: float
    loss_low: float
    loss_high: float
    mcnemar_p: float
    mean_layers: float
    disagreement: float
    full_calibration_error: float
    calibration_error: float
    length_drift: float | None
    exit_rate_drift: float | None
    exits: dict[int, int]


@dataclass(frozen=True)
class TaskFigures:
    """Of a slice. ``baseline`` always answers the label that is commonest in training; ``texts`` may be words."""

    texts: int
    accuracy: float
    macro_f1: float
    baseline: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="a prepared model; absent: the example variant")
    parser.add_argument("--max-disagreement", type=float, help="share; absent: as it was prepared")
    parser.add_argument("--texts", type=int, help="at most so many of each domain; absent: all")
    options = parser.parse_args()
    chosen = {} if options.max_disagreement is None else {"max_disagreement": options.max_disagreement}
    folder = options.folder or prepared_example()
    calibrated = json.loads((folder / REPORT).read_text())["exits"]["calibrated"]
    with InferenceEngine(folder, device="cpu", **chosen) as engine:
        domains = {name: measure_domain(engine, name, splits()[name][: options.texts]) for name in DOMAINS}
        tasks = measure_category(engine) | measure_pos(engine)
    for table in (domain_table(domains), task_table(tasks)):
        TABLES.print(table)
    CONSOLE.print(f"as prepared: at most {calibrated['disagreementBound']} of labels differ, at 95% confidence")
    print(json.dumps({name: asdict(it) for name, it in (domains | tasks).items()} | {"calibrated": calibrated}))


def measure_domain(engine: InferenceEngine, name: str, reviews: Sequence[Review]) -> DomainFigures:
    """Ask for every text twice: through all layers, and with early exit."""
    texts = [review.text for review in reviews]
    truth = [LABELS[review.label] for review in reviews]
    full = answers(f"{DOMAINS[name]}, all layers", texts, lambda part: engine.classify(part))
    early = answers(f"{DOMAINS[name]}, early exit", texts, lambda part: engine.early_exit(part))
    labels, early_labels = [a.label for a in full], [a.label for a in early]
    change = difference(truth, labels, early_labels)
    layers = [answer.layers or 0 for answer in early]
    return DomainFigures(
        texts=len(texts),
        full_accuracy=accuracy(truth, labels),
        accuracy=accuracy(truth, early_labels),
        loss=-change.accuracy,
        loss_low=-change.high,
        loss_high=-change.low,
        mcnemar_p=change.p,
        mean_layers=sum(layers) / len(layers),
        disagreement=change.disagreement,
        full_calibration_error=_calibration_error(truth, full),
        calibration_error=_calibration_error(truth, early),
        **{field: _gauge(engine, series) for field, series in DRIFTS.items()},
        exits={depth: layers.count(depth) for depth in sorted(set(layers))},
    )


def answers(title: str, texts: Sequence[str], ask: Callable[[list[str]], list[Classification]]) -> list[Classification]:
    """Answers to all texts, a part at a time, with progress."""
    parts = [list(texts[start : start + TEXTS_A_CALL]) for start in range(0, len(texts), TEXTS_A_CALL)]
    return [answer for at in Stage(title, len(parts)) for answer in ask(parts[at])]


def _calibration_error(truth: Sequence[str], found: Sequence[Classification]) -> float:
    right = [answer.label == wanted for answer, wanted in zip(found, truth, strict=True)]
    return calibration_error([answer.score for answer in found], right)


def _gauge(engine: InferenceEngine, name: str) -> float | None:
    """Of the engine's only model; None before there are enough texts."""
    samples = (sample for metric in engine.metrics.registry.collect() for sample in metric.samples)
    return next((sample.value for sample in samples if sample.name == name), None)


def measure_category(engine: InferenceEngine) -> dict[str, TaskFigures]:
    """Classes of held-out definitions."""
    training, held_out = glosses()
    found = answers("category", [gloss.text for gloss in held_out], lambda part: engine.classify(part, task="category"))
    truth = [gloss.label for gloss in held_out]
    return {"category": _task_figures(truth, [answer.label for answer in found], [gloss.label for gloss in training])}


def measure_pos(engine: InferenceEngine) -> dict[str, TaskFigures]:
    """Parts of speech in held-out sentences: of all labelled words, and of those that a dictionary leaves open."""
    training, held_out = sentences()
    texts = [" ".join(word.text for word in sentence) for sentence in held_out]
    found = answers("pos", texts, lambda part: engine.classify(part, task="pos"))
    pairs: list[tuple[bool, str, str]] = []
    for sentence, answer in zip(held_out, found, strict=True):
        labels = {label.start: label.label for label in answer.tokens}
        start = 0
        for word in sentence:
            if word.label is not None:
                pairs.append((word.ambiguous, word.label, labels[start]))
            start += len(word.text) + 1
    known = [word for sentence in training for word in sentence if word.label is not None]
    open_pairs = [pair for pair in pairs if pair[0]]
    return {
        name: _task_figures(
            [truth for _, truth, _ in chosen],
            [label for _, _, label in chosen],
            [word.label for word in known if word.label is not None and (word.ambiguous or name == "pos")],
        )
        for name, chosen in (("pos", pairs), ("pos_ambiguous", open_pairs))
    }


def _task_figures(truth: list[str], found: list[str], trained: list[str]) -> TaskFigures:
    commonest = Counter(trained).most_common(1)[0][0]
    return TaskFigures(len(truth), accuracy(truth, found), macro_f1(truth, found), truth.count(commonest) / len(truth))


def domain_table(domains: dict[str, DomainFigures]) -> Table:
    """ECE: all layers / early exit. Drift: of the lengths / of the exit rate."""
    table = Table(title="early exit, held-out texts")
    table.add_column("domain")
    for column in ("texts", "full", "exits", "loss, points (95%)", "p", "layers", "disagree", "ECE", "drift"):
        table.add_column(column, justify="right")
    for name, it in domains.items():
        drifts = "/".join("-" if drift is None else f"{drift:+.2f}" for drift in (it.length_drift, it.exit_rate_drift))
        table.add_row(
            DOMAINS[name],
            f"{it.texts:,}",
            f"{it.full_accuracy:.3f}",
            f"{it.accuracy:.3f}",
            f"{100 * it.loss:+.2f} ({100 * it.loss_low:+.2f} to {100 * it.loss_high:+.2f})",
            f"{it.mcnemar_p:.2f}",
            f"{it.mean_layers:.2f}",
            f"{it.disagreement:.2%}",
            f"{it.full_calibration_error:.3f}/{it.calibration_error:.3f}",
            drifts,
        )
    return table


def task_table(tasks: dict[str, TaskFigures]) -> Table:
    table = Table(title="task slices, held-out texts")
    table.add_column("task")
    for column in ("texts or words", "accuracy", "macro F1", "commonest label"):
        table.add_column(column, justify="right")
    for name, it in tasks.items():
        table.add_row(name, f"{it.texts:,}", f"{it.accuracy:.3f}", f"{it.macro_f1:.3f}", f"{it.baseline:.3f}")
    return table


if __name__ == "__main__":
    try:
        main()
    except PreparationFailedError as error:
        sys.exit(f"error: {error}")
