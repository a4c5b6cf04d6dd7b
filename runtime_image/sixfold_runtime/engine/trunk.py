"""What a classifier computes below its heads, layer by layer, for a ragged batch of texts.

Texts lie one after the other without padding. Layers can be stopped after: the texts that go on are packed again
(`select`) and continue from their hidden states. Embeddings and attention are shared by all texts of a batch, whatever
their tasks are; a task slice has feed-forward parts, adapters and a head of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import torch

from sixfold_api.scalars import Task
from sixfold_runtime.engine.mlp import Mlp, Modules, Tensors

if TYPE_CHECKING:
    from sixfold_runtime.engine.task_slice import TaskSlice


@dataclass(eq=False)
class Rows:
    """A batch between two layers."""

    hidden: torch.Tensor
    """[tokens, width], text after text. `Trunk.layer` writes to it: whoever goes on with it needs the Rows returned."""
    lengths: tuple[int, ...]
    """Tokens of each text."""
    anchors: tuple[int, ...]
    """The token, counted within each text, that stands for it: an encoder's first, a decoder's last."""
    plan: Any = field(default=None, repr=False)
    """What all layers share, such as which texts are of one length: the trunk's own."""

    @property
    def starts(self) -> list[int]:
        """Where each text begins among the packed tokens."""
        return list(accumulate(self.lengths, initial=0))[:-1]

    def anchored(self) -> torch.Tensor:
        """[texts, width]: the hidden states of the tokens that stand for the texts."""
        wanted = [start + anchor for start, anchor in zip(self.starts, self.anchors, strict=True)]
        return self.hidden.index_select(0, torch.tensor(wanted, device=self.hidden.device))


class Head(Protocol):
    """From the last layer to logits."""

    @property
    def task(self) -> Task: ...

    @property
    def labels(self) -> tuple[str, ...]:
        """By index."""

    def __call__(self, rows: Rows) -> torch.Tensor:
        """float32 logits [texts, labels]; of a token classification [tokens, labels]. `rows` stay as they are."""


class Trunk(Protocol):
    """The layers of an encoder or decoder. Texts alone and in any company agree within float rounding.

    Attributes:
        layers: how many.
        width: of hidden states.
        kernel: how the linears compute: "dense", "int8", ...
        weight_bytes: resident, with the model's own head.
        own_head: the head of the checkpoint; None: a bare trunk, such as BertModel.
        vocabulary: embeddings; token ids are below it.
        max_tokens: longest text that there are positions for; None: no such limit.
    """

    layers: int
    width: int
    kernel: str
    device: torch.device
    dtype: torch.dtype
    own_head: Head | None
    vocabulary: int
    max_tokens: int | None

    @property
    def weight_bytes(self) -> int: ...

    def embed(self, texts: Sequence[Sequence[int]]) -> Rows:
        """Token ids of at least one text, none empty -> what goes into layer 0."""

    def layer(self, index: int, rows: Rows, slices: Sequence[TaskSlice | None] | None = None) -> Rows:
        """Compute one layer (from 0); `rows` are used up.

        Args:
            slices: one for each text; None there (or for all) computes with the trunk's own feed-forward part.
        """

    def select(self, rows: Rows, keep: Sequence[int]) -> Rows:
        """The texts at these indices, packed again in this order; `rows` stay as they are."""

    def features(self, rows: Rows) -> torch.Tensor:
        """float32 [texts, 2 * width]: the hidden state of the first token (of a decoder: the last) beside the mean
        over the text's tokens. What exit heads and trained heads read, at any depth."""

    def mlp_modules(self, index: int) -> tuple[Modules, Modules]:
        """The checkpoint's modules in the feed-forward part of a layer, as they are computed: those of one tuple
        (gate_proj and up_proj) can only be replaced together."""

    def mlp(self, tensors: Tensors, index: int) -> Mlp | None:
        """A layer's feed-forward part with a slice's replacements or deltas; None if it has none for the layer.

        Raises:
            ModelLoadError: a tensor doesn't fit.
        """

    def head(self, tensors: Tensors, task: Task, labels: Sequence[str]) -> Head:
        """A slice's head: `head.weight` over features (of tokens: over hidden states), or the checkpoint's own names.

        Raises:
            ModelLoadError: a tensor is missing, or doesn't fit the trunk or the labels.
        """
