"""Task slices of the sentiment model: `category` and `pos`, adapters and heads trained over its frozen trunk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from progress import CONSOLE

from sixfold_api.scalars import Task
from sixfold_runtime.engine.slice_file import slice_path
from sixfold_runtime.prepare.slice_train import Recipe, Trained, train
from sixfold_runtime.prepare.slice_trunk import open_trunk

RECIPE = Recipe(epochs=1, learning_rate=3e-3)
TASKS = {"category": Task.CLASSIFICATION, "pos": Task.TOKEN_CLASSIFICATION}


@dataclass(frozen=True)
class Measured:
    """A slice's figures on held-out text; ``baseline`` is the accuracy of the commonest label at all times."""

    accuracy: float
    macro_f1: float
    baseline: float
    samples: int
    size_bytes: int

    @classmethod
    def of(cls, trained: Trained) -> Measured:
        after, before = trained.after, trained.before
        assert after.macro_f1 is not None
        return cls(after.value, after.macro_f1, before.value, after.samples, trained.report.size_bytes)


def build_slices(folder: Path, texts: Path) -> None:
    """Train ``slices/<task>.safetensors`` of the model in ``folder`` and write their figures into its card.

    Args:
        texts: the folder `tasks`, with <task>_training.jsonl and <task>_heldout.jsonl.
    """
    torch.set_num_threads(1)
    trunk = open_trunk(folder, torch.device("cpu"))
    measured = {}
    for name, task in TASKS.items():
        target = slice_path(folder, name)
        target.parent.mkdir(exist_ok=True)
        trained = train(
            trunk,
            texts / f"{name}_training.jsonl",
            target,
            task,
            lambda line, name=name: CONSOLE.print(f"slice {name}: {line}", highlight=False, soft_wrap=True),
            evaluation=texts / f"{name}_heldout.jsonl",
            recipe=RECIPE,
        )
        measured[name] = Measured.of(trained)
    card = folder / "README.md"
    written = card.read_text()
    card.unlink()  # it may be a hard link to the card of the model without slices
    card.write_text(written + slices_card(measured))


def slices_card(measured: dict[str, Measured]) -> str:
    """What follows the model's own card."""
    rows = "\n".join(
        f"| `{name}` | {TASKS[name]} | {it.accuracy:.3f} | {it.macro_f1:.3f} | {it.baseline:.3f} | {it.samples:,} | "
        f"{it.size_bytes / 1e6:.1f} MB |"
        for name, it in measured.items()
    )
    return f"""
## Task slices
Two more tasks over the same layers, in `slices/`: bottleneck adapters of width {RECIPE.adapter.width} and a head,
trained on the folder `tasks` beside this one (WordNet 3.1; its card says how labels came about). The trunk stays as it
is. Passes over the training text: {RECIPE.epochs}.

| task | | accuracy, held out | macro F1 | always the commonest label | texts or words | size |
| --- | --- | --- | --- | --- | --- | --- |
{rows}
"""
