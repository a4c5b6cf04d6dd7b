"""What a task slice is worth on held-out text, computed by the engine."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sixfold_api.scalars import Task
from sixfold_runtime.engine.loader import LoadedModel
from sixfold_runtime.engine.task_slice import TaskSlice
from sixfold_runtime.prepare.evaluate import require_finite
from sixfold_runtime.prepare.slice_data import IGNORED, LabelledTexts
from sixfold_runtime.prepare.slice_trunk import label_logits, token_logits


@dataclass(frozen=True)
class Score:
    """`metric` is accuracy (with the unweighted mean of the labels' F1) or perplexity."""

    metric: str
    value: float
    macro_f1: float | None
    samples: int
    """Texts, words of a token classification, or tokens of a generation."""

    def is_better_than(self, other: Score) -> bool:
        return self.value < other.value if self.metric == "perplexity" else self.value > other.value

    def __str__(self) -> str:
        if self.macro_f1 is None:
            return f"perplexity {self.value:.4g}"
        return f"accuracy {self.value:.4f} (macro F1 {self.macro_f1:.4f})"


def score(model: LoadedModel, task_slice: TaskSlice | None, held_out: LabelledTexts, training: LabelledTexts) -> Score:
    """With a slice; without one, a generator's trunk alone, and for labels the one that is commonest in training.

    Raises PreparationError(NonFiniteWeights).
    """
    if not held_out.labels:
        return _perplexity(model, task_slice, held_out)
    wanted = [label for text in held_out.texts for label in text.labels]
    if task_slice is None:
        commonest = training.counts().most_common(1)[0][0]
        return agreement(wanted, [commonest] * len(wanted))
    found: list[int] = []
    name = model.served.name
    for logits in label_logits(model, [text.ids for text in held_out.texts], task_slice):
        answers = require_finite(logits, name).argmax(-1)
        found += answers.tolist() if task_slice.task is Task.TOKEN_CLASSIFICATION else [int(answers)]
    return agreement(wanted, found)


def agreement(wanted: Sequence[int], found: Sequence[int]) -> Score:
    """Accuracy and macro F1 (over the labels that occur) of answers; IGNORED ones don't count."""
    pairs = [(truth, answer) for truth, answer in zip(wanted, found, strict=True) if truth != IGNORED]
    hits = Counter(truth for truth, answer in pairs if truth == answer)
    uses = Counter(label for pair in pairs for label in pair)
    scores = [2 * hits[label] / count for label, count in uses.items()]
    return Score("accuracy", hits.total() / len(pairs), sum(scores) / len(scores), len(pairs))


def _perplexity(model: LoadedModel, task_slice: TaskSlice | None, held_out: LabelledTexts) -> Score:
    texts = [text.ids for text in held_out.texts]
    loss, tokens = 0.0, 0
    for ids, logits in zip(texts, token_logits(model, texts, task_slice), strict=True):
        require_finite(logits, model.served.name)
        following = torch.tensor(ids[1:], device=logits.device)
        loss += float(torch.nn.functional.cross_entropy(logits[:-1], following, reduction="sum"))
        tokens += len(following)
    return Score("perplexity", math.exp(loss / tokens), None, tokens)
