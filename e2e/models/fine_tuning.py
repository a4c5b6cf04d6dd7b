"""Fine-tunes a classifier so that its early layers can already tell the labels: deep supervision.

Behind every layer but the last stands a linear head of its own whose loss counts too (Lee et al., "Deeply-Supervised
Nets", arXiv 1409.5185), with weights that grow with the depth (Kaya et al., "Shallow-Deep Networks", arXiv 1810.07052).
The heads are thrown away: who prepares the model for early exit trains heads of their own on what the layers now know.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from progress import Stage
from reviews import LABELS, Review
from torch import Tensor, nn
from transformers import BertForSequenceClassification
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

SEED = 7
EPOCHS = 2
BATCH_ROWS = 32
LEARNING_RATE = 1e-4
HEAD_LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.01
WARM_UP_SHARE = 0.1
MAX_TOKENS = 128
LAYER_WEIGHTS = (0.1, 0.2, 0.3, 0.4, 0.5)
"""Of the losses behind layers 1 to 5, next to 1 for the model's own head."""


def fine_tune(
    model: BertForSequenceClassification, tokenizer: PreTrainedTokenizerBase, reviews: Sequence[Review]
) -> nn.ModuleList:
    """The heads that stood behind the layers before the last, for measuring.

    AdamW with linear warm-up and decay; batches hold reviews of like length, so little is spent on padding.

    The word embeddings stay as they are: eight thousand sentences teach nothing about thirty thousand words. Products
    are taken in bfloat16 where the processor has instructions for it, in half the time.
    """
    heads = nn.ModuleList(nn.Linear(2 * model.config.hidden_size, len(LABELS)) for _ in LAYER_WEIGHTS)
    model.get_input_embeddings().weight.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(
        [{"params": trained, "lr": LEARNING_RATE}, {"params": list(heads.parameters()), "lr": HEAD_LEARNING_RATE}],
        weight_decay=WEIGHT_DECAY,
        fused=True,
    )
    batches = [batch for epoch in range(EPOCHS) for batch in _batches(reviews, random.Random(SEED + epoch))]
    warm_up = WARM_UP_SHARE * len(batches)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min((step + 1) / warm_up, (len(batches) - step) / (len(batches) - warm_up))
    )
    half = bool(torch.cpu.get_capabilities().get("avx512_bf16"))
    model.train()
    stage = Stage("sentiment classifier", len(batches))
    for step in stage:
        batch = batches[step]
        labels = torch.tensor([review.label for review in batch])
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            loss = _loss(model, heads, encode(tokenizer, batch), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        stage.note = f"loss {loss.item():.3f}"
    model.train(mode=False)
    model.get_input_embeddings().weight.requires_grad_(True)
    return heads


def _loss(
    model: BertForSequenceClassification, heads: nn.ModuleList, encoded: dict[str, Tensor], labels: Tensor
) -> Tensor:
    """Cross-entropy of the model's own head, and the weighted ones of the heads behind the earlier layers."""
    output = model(**encoded, output_hidden_states=True)
    loss = F.cross_entropy(output.logits.float(), labels)
    for head, weight, hidden in zip(heads, LAYER_WEIGHTS, output.hidden_states[1:-1], strict=True):
        logits = head(exit_features(hidden, encoded["attention_mask"]))
        loss = loss + weight * F.cross_entropy(logits.float(), labels)
    return loss


def exit_features(hidden: Tensor, mask: Tensor) -> Tensor:
    """What an exit head reads, (rows, 2 * width): the first token's hidden state beside the mean over the text."""
    weights = mask[..., None].to(hidden.dtype)
    return torch.cat([hidden[:, 0], (hidden * weights).sum(1) / weights.sum(1)], -1)


def _batches(reviews: Sequence[Review], order: random.Random) -> list[list[Review]]:
    """Batches in a random order, each of neighbours by length out of a shuffled set."""
    shuffled = sorted(order.sample(reviews, len(reviews)), key=lambda review: len(review.text) // 16)
    batches = [shuffled[start : start + BATCH_ROWS] for start in range(0, len(shuffled), BATCH_ROWS)]
    order.shuffle(batches)
    return batches


def encode(tokenizer: PreTrainedTokenizerBase, reviews: Sequence[Review]) -> dict[str, Tensor]:
    """Token ids, mask and types, padded to the longest of ``reviews``."""
    texts = [review.text for review in reviews]
    encoded = tokenizer(texts, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
    return dict(encoded)
