"""What computing costs in floating-point operations, and which of them were wasted. Pure: no torch, no I/O.

One analytic model for all architectures, a multiply-add being 2 operations: the matrix products of the linears, and the
two products of attention. Embeddings, normalisations, activations, rotary factors and softmax are left out, as in
`torch.utils.flop_counter`: they are well under 1 % of a real model.

Attention is counted as it is really computed, and that is a rectangle: every new token of a row is multiplied with
every column that its row's keys and values take in this forward, those behind it too, which a mask hides afterwards.
Kernels that skip hidden columns are the exception; a sliding window hides columns without saving them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sixfold_runtime.engine.decoder_shape import DecoderShape
    from sixfold_runtime.engine.encoder_shape import EncoderShape


class Cause(StrEnum):
    """Why operations were wasted; the label `cause` of `sixfold_flops_total`."""

    PADDING = "padding"
    """Positions that belong to no request, computed because their batch-mates are longer."""
    REJECTED_DRAFT = "rejected_draft"
    """Drafting and verifying tokens that no answer got."""
    RECOMPUTED_PREFIX = "recomputed_prefix"
    """Tokens of a prompt whose keys and values were computed before, for a request that began alike."""
    UNNEEDED_LAYERS = "unneeded_layers"
    """Layers behind the one after which the answer was settled."""
    CANCELLED = "cancelled"
    """All that was computed for a request that nobody waits for any more."""


@dataclass(frozen=True)
class ModelFlops:
    """The shape of a model, as far as its operations depend on it.

    Attributes:
        layers: how many, all alike.
        layer_weights: of the linears of one layer, with which every token is multiplied.
        attention_width: query heads * head_dim.
        output_weights: of the linears behind the last layer, for each position (or text) whose logits are computed: a
            decoder's lm_head, or a classifier's head.
    """

    layers: int
    layer_weights: int
    attention_width: int
    output_weights: int = 0

    def forward(self, tokens: int, pairs: int, outputs: int = 0, layers: int | None = None) -> int:
        """Operations of a forward, or of any part of it: the count is linear in all of its arguments but `layers`.

        Args:
            tokens: positions that go through the linears.
            pairs: of new tokens and columns that they are multiplied with: a row of n new tokens behind s cached ones
                has n * (s + n).
            outputs: positions, or texts, that go through what follows the last layer.
            layers: the first so many; None is all.
        """
        through = self.layers if layers is None else layers
        trunk = 2 * tokens * self.layer_weights + 4 * pairs * self.attention_width
        return through * trunk + 2 * outputs * self.output_weights

    @property
    def unit_costs(self) -> tuple[int, int, int]:
        """Operations of one token, one pair and one output, through all layers."""
        return self.forward(1, 0), self.forward(0, 1), self.forward(0, 0, 1)

    def text(self, tokens: int, layers: int | None = None) -> int:
        """One text of its own, nothing padded, through the first `layers`; without a head (that is `forward(0, 0, 1)`,
        for a whole text or for each token, as the task has it)."""
        return self.forward(tokens, tokens * tokens, layers=layers)


def decoder_flops(shape: DecoderShape, head_weights: int | None = None) -> ModelFlops:
    """Of Llama, Qwen2 and Qwen3: grouped queries and a gated MLP (SwiGLU, arXiv 2002.05202).

    Args:
        head_weights: of a classifier's head; None is the output projection, of a decoder that generates.
    """
    attention, keys_and_values = shape.heads * shape.head_dim, 2 * shape.kv_heads * shape.head_dim
    return ModelFlops(
        layers=shape.layers,
        layer_weights=shape.hidden * (2 * attention + keys_and_values + 3 * shape.intermediate),
        attention_width=attention,
        output_weights=shape.hidden * shape.vocabulary if head_weights is None else head_weights,
    )


def encoder_flops(shape: EncoderShape, head_weights: int = 0) -> ModelFlops:
    """Of BERT, RoBERTa, XLM-RoBERTa and DistilBERT.

    Args:
        head_weights: of the linears of a head, those before its last one included.
    """
    return ModelFlops(
        layers=shape.layers,
        layer_weights=shape.width * (4 * shape.width + 2 * shape.intermediate),
        attention_width=shape.width,
        output_weights=head_weights,
    )


def wasted_flops_ratio(useful: float, wasted: float) -> float:
    """The share of the operations that bought nothing, 0 to 1; NaN where nothing was computed."""
    total = useful + wasted
    return wasted / total if total else math.nan
