"""Heads: from the last layer's hidden states to logits, as each architecture computes them, or trained on features."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sixfold_api.scalars import Task
from sixfold_runtime.engine.errors import ModelLoadError
from sixfold_runtime.engine.linear import DenseLinear, Linear
from sixfold_runtime.engine.mlp import Activation, Tensors, read_tensor
from sixfold_runtime.engine.norm import RMSNorm
from sixfold_runtime.engine.packed_rows import features
from sixfold_runtime.engine.trunk import Rows

TRAINED_HEAD = "head"
"""Module of a slice's head that was trained on a frozen trunk."""
HIDDEN_MODULES = {"bert": "pooler.dense", "roberta": "classifier.dense", "distilbert": "pre_classifier"}
"""What lies before the last linear of a head for whole texts, by family; decoders have nothing there."""
HIDDEN_ACTIVATIONS: dict[str, Activation] = {"bert": torch.tanh_, "roberta": torch.tanh_, "distilbert": torch.relu_}
"""Behind it."""
LAST_MODULES = {"bert": "classifier", "roberta": "classifier.out_proj", "distilbert": "classifier", "decoder": "score"}
"""The last linear of a head for whole texts."""
TOKEN_MODULES = {"bert": "classifier", "roberta": "classifier", "distilbert": "classifier", "decoder": "score"}
"""The only linear of a head for tokens."""


class ModuleHead:
    """Linears over the hidden states of the texts' anchors, or of all tokens."""

    def __init__(
        self,
        task: Task,
        labels: Sequence[str],
        last: Linear,
        hidden: tuple[Linear, Activation] | None = None,
        norm: RMSNorm | None = None,
    ) -> None:
        """`norm` comes first: a decoder's last."""
        self.task, self.labels = task, tuple(labels)
        self._last, self._hidden, self._norm = last, hidden, norm
        self.weight_bytes = last.weight_bytes + (hidden[0].weight_bytes if hidden else 0)

    def __call__(self, rows: Rows) -> torch.Tensor:
        """float32 [texts or tokens, labels]"""
        x = rows.hidden if self.task is Task.TOKEN_CLASSIFICATION else rows.anchored()
        if self._norm is not None:
            x = self._norm(x)
        if self._hidden is not None:
            linear, activation = self._hidden
            x = activation(linear(x))
        return self._last(x).float()


class FeatureHead:
    """A linear over the features of texts."""

    def __init__(self, labels: Sequence[str], linear: Linear, norm: RMSNorm | None = None) -> None:
        self.task, self.labels = Task.CLASSIFICATION, tuple(labels)
        self._linear, self._norm = linear, norm
        self.weight_bytes = linear.weight_bytes

    def __call__(self, rows: Rows) -> torch.Tensor:
        """float32 [texts, labels]"""
        return self._linear(features(normed(rows, self._norm)))


def normed(rows: Rows, norm: RMSNorm | None) -> Rows:
    return rows if norm is None else Rows(norm(rows.hidden), rows.lengths, rows.anchors)


def slice_head(
    family: str,
    tensors: Tensors,
    task: Task,
    labels: Sequence[str],
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    hidden: tuple[Linear, Activation] | None = None,
    norm: RMSNorm | None = None,
) -> ModuleHead | FeatureHead:
    """A slice's head.

    Args:
        hidden: the trunk's own part before the last linear, for slices that have none.

    Raises:
        ModelLoadError: a tensor is missing, or doesn't fit the trunk or the labels.
    """
    count, tokens = len(labels), task is Task.TOKEN_CLASSIFICATION
    if task is Task.GENERATION:
        raise ModelLoadError("a classifier can't have a slice for the task Generation")
    if f"{TRAINED_HEAD}.weight" in tensors.names:
        inputs, kind = (width, dtype) if tokens else (2 * width, torch.float32)
        linear = _dense(tensors, TRAINED_HEAD, (count, inputs), kind, device)
        return ModuleHead(task, labels, linear, norm=norm) if tokens else FeatureHead(labels, linear, norm)
    name = (TOKEN_MODULES if tokens else LAST_MODULES)[family]
    last = _dense(tensors, name, (count, width), dtype, device)
    if tokens or family not in HIDDEN_MODULES:
        return ModuleHead(task, labels, last, norm=norm)
    module = HIDDEN_MODULES[family]
    # With the family's prefix or without: a bare trunk has none.
    own = [name.removesuffix(".weight") for name in tensors.names if name.endswith(f"{module}.weight")]
    if own:
        hidden = _dense(tensors, own[0], (width, width), dtype, device), HIDDEN_ACTIVATIONS[family]
    elif hidden is None:
        raise ModelLoadError(f"{module}.weight is missing")
    return ModuleHead(task, labels, last, hidden, norm)


def _dense(
    tensors: Tensors, name: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> DenseLinear:
    weight = read_tensor(tensors, f"{name}.weight", shape, dtype, device)
    has_bias = f"{name}.bias" in tensors.names
    bias = read_tensor(tensors, f"{name}.bias", shape[:1], dtype, device) if has_bias else None
    return DenseLinear(weight, bias, as_stored=True)
