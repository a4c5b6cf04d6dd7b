"""Train a task slice over a frozen trunk: bottleneck adapters in its last layers, and a head.

AdamW with warm-up and linear decay over batches of texts of like length. The same text, seed and thread count give the
same slice. What is reported is measured by the engine, from the file that is served, on held-out text.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from sixfold_api.scalars import Task
from sixfold_api.subgraphs import AdapterShape, SliceReport
from sixfold_runtime.engine.slice_file import slice_info, write_slice
from sixfold_runtime.engine.task_slice import TaskSlice
from sixfold_runtime.prepare.evaluate import device
from sixfold_runtime.prepare.failures import PreparationError, Reason
from sixfold_runtime.prepare.slice_data import LabelledText, LabelledTexts, read, split
from sixfold_runtime.prepare.slice_measure import Score, score
from sixfold_runtime.prepare.slice_model import AdaptedModel, adapted_layers
from sixfold_runtime.prepare.slice_trunk import SliceTrunk, open_trunk
from sixfold_runtime.prepare.texts import TextReader

Log = Callable[[str], None]
_WARM_UP_SHARE = 0.1
_WEIGHT_DECAY = 0.01
_LINES = 10
"""Lines of progress in a log."""


@dataclass(frozen=True)
class Recipe:
    """How a slice is trained."""

    adapter: AdapterShape = field(default_factory=AdapterShape)
    epochs: int = 2
    """Passes over the text."""
    learning_rate: float = 2e-3
    batch: int = 32
    """Texts of an optimiser step."""
    seed: int = 0


@dataclass(frozen=True)
class Trained:
    """A slice that was written."""

    report: SliceReport
    before: Score
    """The commoner label at all times; of a generator, the trunk alone."""
    after: Score
    """Both on held-out text."""
    seconds: float


def train(
    trunk: SliceTrunk | Path,
    text: Path,
    target: Path,
    task: Task,
    log: Log,
    *,
    evaluation: Path | None = None,
    labels: Sequence[str] = (),
    limit: int | None = None,
    recipe: Recipe | None = None,
) -> Trained:
    """Train on a file of labelled text and write the slice to `target`, if it is better than none.

    Args:
        trunk: the opened trunk, or its folder.
        evaluation: another file of the same form, held out; absent means that a tenth of `text` is.
        labels: in the order of the head; absent means all that occur, sorted.
        limit: use so many lines of `text`, the first ones.

    Raises PreparationError: UnusableTraining for the text or a loss that isn't finite, UnusableSlice for a trunk that
        can't have slices or a slice that is no better than the commonest label or the trunk alone.
    """
    began = time.monotonic()
    recipe = recipe or Recipe()
    trunk = open_trunk(trunk, device()) if isinstance(trunk, Path) else trunk
    trunk.require_task(task)
    training, held_out = _texts(trunk, text, task, evaluation, labels, limit, recipe.seed)
    log(f"{len(training.texts)} texts to learn from, {len(held_out.texts)} held out" + _cut(training, trunk))
    layers = adapted_layers(trunk.host.layers, recipe.adapter)
    model = AdaptedModel(
        trunk.folder,
        task,
        len(training.labels),
        {layer: trunk.host.mlp_modules(layer)[1][0] for layer in layers},
        recipe.adapter.width,
        recipe.seed,
        trunk.model.device,
    )
    _fit(model, training.texts, recipe, log)
    partial = target.with_name(f".{target.name}.new")
    write_slice(partial, model.parameters, task, training.labels, trunk.fingerprint)
    try:
        before, after = _measure(trunk, trunk.load(partial), training, held_out, log)
        _require_better(before, after)
        partial.rename(target)
    finally:
        partial.unlink(missing_ok=True)
    info = slice_info(target)
    report = SliceReport(name=info.name, task=task, size_bytes=info.size_bytes)
    return Trained(report, before, after, time.monotonic() - began)


def _texts(
    trunk: SliceTrunk,
    text: Path,
    task: Task,
    evaluation: Path | None,
    labels: Sequence[str],
    limit: int | None,
    seed: int,
) -> tuple[LabelledTexts, LabelledTexts]:
    """To train on, and held out."""
    reader, context = TextReader(trunk.folder), trunk.model.context_tokens
    everything = read(text, task, reader, context, labels=labels, limit=limit)
    if evaluation is None:
        return split(everything, seed)
    return everything, read(evaluation, task, reader, context, labels=everything.labels, is_evaluation=True)


def _cut(texts: LabelledTexts, trunk: SliceTrunk) -> str:
    return f"; {texts.cut} are longer than {trunk.model.context_tokens} tokens and were cut there" if texts.cut else ""


def _fit(model: AdaptedModel, texts: Sequence[LabelledText], recipe: Recipe, log: Log) -> None:
    batches = [
        batch
        for epoch in range(recipe.epochs)
        for batch in _batches(texts, recipe.batch, random.Random(recipe.seed + epoch))
    ]
    trained = list(model.parameters.values())
    optimiser = torch.optim.AdamW(trained, lr=recipe.learning_rate, weight_decay=_WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _rate(step, len(batches)))
    recent = 0.0
    for step, batch in enumerate(_shown(batches), start=1):
        loss = model.loss(batch)
        if not math.isfinite(value := float(loss.detach())):
            raise PreparationError(
                Reason.UNUSABLE_TRAINING,
                f"the loss became {value} in step {step} of {len(batches)}: take a lower learning rate, or look for "
                "what is wrong with the text",
            )
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        recent = value if step == 1 else 0.95 * recent + 0.05 * value
        if step % max(1, len(batches) // _LINES) == 0:
            log(f"step {step} of {len(batches)}: loss {recent:.4f}")


def _rate(step: int, steps: int) -> float:
    """Share of the learning rate at a step from 0: up to 1 over the warm-up, then down to 0."""
    warm_up = max(1.0, _WARM_UP_SHARE * steps)
    return min((step + 1) / warm_up, max(0.0, (steps - step) / max(1.0, steps - warm_up)))


def _batches(texts: Sequence[LabelledText], size: int, order: random.Random) -> list[list[LabelledText]]:
    """In a random order, each of neighbours by length out of a shuffled set, so that little is padding."""
    shuffled = sorted(order.sample(texts, len(texts)), key=lambda text: len(text.ids) // 4)
    batches = [shuffled[start : start + size] for start in range(0, len(shuffled), size)]
    order.shuffle(batches)
    return batches


def _shown(batches: Sequence[list[LabelledText]]) -> Iterator[list[LabelledText]]:
    """With a bar, where somebody looks at a terminal."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        yield from progress.track(batches, description="training")


def _measure(
    trunk: SliceTrunk, task_slice: TaskSlice, training: LabelledTexts, held_out: LabelledTexts, log: Log
) -> tuple[Score, Score]:
    """Without the slice, and with it, on held-out text."""
    before = score(trunk.model, None, held_out, training)
    after = score(trunk.model, task_slice, held_out, training)
    log(f"held out: {before} -> {after} with the slice")
    return before, after


def _require_better(before: Score, after: Score) -> None:
    if not after.is_better_than(before):
        raise PreparationError(
            Reason.UNUSABLE_SLICE,
            f"the slice is no better than without it on held-out text ({before} -> {after}) and was not written: "
            "give it more text or passes, or another learning rate",
        )
