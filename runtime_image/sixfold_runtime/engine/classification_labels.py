"""From logits to the labels that an answer holds. Nothing is sorted or copied to the host that isn't sent."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch

from sixfold_runtime.engine.protocol import LabelScore


def ranked(scores: torch.Tensor, labels: Sequence[str], counts: Sequence[int]) -> list[list[LabelScore]]:
    """The likeliest labels of each text, best first.

    Args:
        scores: [texts, labels].
        counts: how many of each text's labels, at most all.
    """
    answers: list[list[LabelScore]] = [[] for _ in counts]
    for count in set(counts):
        rows = [row for row, wanted in enumerate(counts) if wanted == count]
        chosen = scores if len(rows) == len(counts) else scores[rows]
        # A few of very many are found without sorting all.
        best = chosen.topk(count) if count < len(labels) else chosen.sort(descending=True, stable=True)
        for row, values, indexes in zip(rows, best.values.tolist(), best.indices.tolist(), strict=True):
            answers[row] = [LabelScore(labels[index], value) for value, index in zip(values, indexes, strict=True)]
    return answers


def token_labels(scores: torch.Tensor, labels: Sequence[str], lengths: Sequence[int]) -> list[list[LabelScore]]:
    """The likeliest label of each token, text by text.

    Args:
        scores: [tokens, labels], text after text.
        lengths: tokens of each text.
    """
    best = scores.max(dim=-1)
    found = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    return [[LabelScore(labels[index], value) for value, index in islice(found, length)] for length in lengths]
