"""The engine's own encoders: BERT, RoBERTa, XLM-RoBERTa and DistilBERT, layer by layer over packed texts.

What makes it fast: no padding, query, key and value in one product, buffers written in place and kept between layers,
residuals added by the products themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from sixfold_api.scalars import Task
from sixfold_runtime.engine.checkpoint import TensorStore, require_tensors
from sixfold_runtime.engine.encoder_shape import (
    ACTIVATIONS,
    EncoderShape,
    expected_tensors,
    head_modules,
    hidden_module,
)
from sixfold_runtime.engine.heads import HIDDEN_ACTIVATIONS, ModuleHead, slice_head
from sixfold_runtime.engine.linear import Linear, build_linear
from sixfold_runtime.engine.mlp import Activation, Modules, Tensors, TwoLinears, sliced_mlp
from sixfold_runtime.engine.packed_attention import packed_attention
from sixfold_runtime.engine.packed_rows import Plan, chosen, features
from sixfold_runtime.engine.trunk import Head, Rows, Trunk

if TYPE_CHECKING:
    from sixfold_runtime.engine.task_slice import TaskSlice


class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * weight + bias, over the last dimension (Ba et al., arXiv 1607.06450)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> None:
        self._weight, self._bias, self._eps = weight, bias, eps
        self.weight_bytes = weight.nbytes + bias.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """A new tensor like x."""
        return functional.layer_norm(x, self._weight.shape, self._weight, self._bias, self._eps)


@dataclass(frozen=True)
class _Layer:
    qkv: Linear
    """Outputs [heads, 3, head_dim]: a head's query, its key, its value."""
    output: Linear
    attention_norm: LayerNorm
    mlp: TwoLinears
    norm: LayerNorm


class Encoder(Trunk):
    """Weights on a device, and what they compute."""

    def __init__(
        self,
        shape: EncoderShape,
        store: TensorStore,
        quantization: dict[str, Any] | None,
        labels: Sequence[str],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """
        Args:
            quantization: `quantization_config` of the checkpoint's config.json.
            labels: of the checkpoint's head.

        Raises:
            ModelLoadError: the weight files don't fill the model.
        """
        require_tensors(store, expected_tensors(shape, len(labels)))
        self.shape, self.dtype, self.device = shape, dtype, device
        self.layers, self.width = shape.layers, shape.width
        self.vocabulary, self.max_tokens = shape.vocabulary, shape.max_tokens
        self._store, self._quantization = store, quantization
        self.linears: dict[tuple[str, ...], Linear] = {}
        self._words = self._tensor("embeddings.word_embeddings.weight")
        self._positions = self._position_table()
        self._embedding_norm = self._norm("embeddings.LayerNorm")
        self._layers = [self._layer(f"{shape.names.layer}.{index}") for index in range(shape.layers)]
        self._hidden = self._before_last()
        self.own_head: Head | None = self._own_head(labels)
        self.kernel = "+".join(sorted({linear.kernel for linear in self.linears.values()}))
        del self._store

    @property
    def weight_bytes(self) -> int:
        norms = [self._embedding_norm, *(norm for layer in self._layers for norm in (layer.attention_norm, layer.norm))]
        linears = sum(linear.weight_bytes for linear in self.linears.values())
        return self._words.nbytes + self._positions.nbytes + sum(norm.weight_bytes for norm in norms) + linears

    @torch.inference_mode()
    def embed(self, texts: Sequence[Sequence[int]]) -> Rows:
        ids = torch.tensor([token for text in texts for token in text], device=self.device)
        positions = torch.tensor([place for text in texts for place in self._places(text)], device=self.device)
        hidden = functional.embedding(ids, self._words).add_(functional.embedding(positions, self._positions))
        lengths = tuple(len(text) for text in texts)
        return Rows(self._embedding_norm(hidden), lengths, (0,) * len(lengths))

    def _places(self, text: Sequence[int]) -> Sequence[int]:
        """Rows of the position table."""
        padding = self.shape.padding_id
        if padding is None:
            return range(len(text))
        if padding not in text:
            return range(padding + 1, padding + 1 + len(text))
        counted = accumulate(token != padding for token in text)  # padding within a text isn't counted
        return [padding if token == padding else padding + nth for token, nth in zip(text, counted, strict=True)]

    @torch.inference_mode()
    def layer(self, index: int, rows: Rows, slices: Sequence[TaskSlice | None] | None = None) -> Rows:
        layer, x = self._layers[index], rows.hidden
        plan = rows.plan or self._plan(rows)
        layer.qkv.write(x, plan.qkv)
        plan.attention()
        layer.output.add_to(x, plan.attended)
        x = layer.attention_norm(x)
        groups = plan.groups(slices)
        if groups is not None and groups.touch(index):
            x += groups.feed_forward(index, x, layer.mlp)
        else:
            layer.mlp.add_to(x, x)
        return Rows(layer.norm(x), rows.lengths, rows.anchors, plan)

    @torch.inference_mode()
    def select(self, rows: Rows, keep: Sequence[int]) -> Rows:
        return chosen(rows, keep)

    @torch.inference_mode()
    def features(self, rows: Rows) -> torch.Tensor:
        return features(rows)

    def mlp_modules(self, index: int) -> tuple[Modules, Modules]:
        names = self.shape.names
        layer = f"{self.shape.prefix}{names.layer}.{index}"
        return (f"{layer}.{names.first}",), (f"{layer}.{names.second}",)

    def mlp(self, tensors: Tensors, index: int) -> TwoLinears | None:
        return sliced_mlp(self._layers[index].mlp, self.mlp_modules(index), tensors, self.dtype, self.device)

    def head(self, tensors: Tensors, task: Task, labels: Sequence[str]) -> Head:
        family = self.shape.family
        return slice_head(family, tensors, task, labels, self.width, self.dtype, self.device, hidden=self._hidden)

    def _plan(self, rows: Rows) -> Plan:
        tokens, heads = len(rows.hidden), self.shape.heads
        head_dim = self.width // heads
        qkv = rows.hidden.new_empty(tokens, 3 * self.width)
        attended = rows.hidden.new_empty(tokens, self.width)
        attention = packed_attention(
            qkv.view(tokens, heads, 3, head_dim),
            attended.view(tokens, heads, 1, head_dim),
            rows.lengths,
            head_dim**-0.5,
            causal=False,
        )
        return Plan(qkv, attended, attention)

    def _before_last(self) -> tuple[Linear, Activation] | None:
        """What lies before the last linear of a head for whole texts; other trunks may have it too, for slices."""
        name = hidden_module(self.shape)
        if not self._store.has(f"{name}.weight"):
            return None
        return self._linear(name), HIDDEN_ACTIVATIONS[self.shape.family]

    def _own_head(self, labels: Sequence[str]) -> Head | None:
        if self.shape.task is None:
            return None
        last = list(head_modules(self.shape, len(labels)))[-1]
        hidden = None if self.shape.task is Task.TOKEN_CLASSIFICATION else self._hidden
        return ModuleHead(self.shape.task, labels, self._linear(last), hidden)

    def _position_table(self) -> torch.Tensor:
        """Of positions, with the first token type in it."""
        positions = self._tensor("embeddings.position_embeddings.weight")
        return (
            positions + self._tensor("embeddings.token_type_embeddings.weight")[0]
            if self.shape.token_types
            else positions
        )

    def _layer(self, name: str) -> _Layer:
        names = self.shape.names
        trunk = self.shape.prefix
        order = torch.arange(3 * self.width).view(3, self.shape.heads, -1).transpose(0, 1).reshape(-1)
        return _Layer(
            qkv=self._linear(*(f"{trunk}{name}.{part}" for part in names.query_key_value), order=order),
            output=self._linear(f"{trunk}{name}.{names.attention_output}"),
            attention_norm=self._norm(f"{name}.{names.attention_norm}"),
            mlp=TwoLinears(
                self._linear(f"{trunk}{name}.{names.first}"),
                ACTIVATIONS[self.shape.activation],
                self._linear(f"{trunk}{name}.{names.second}"),
            ),
            norm=self._norm(f"{name}.{names.norm}"),
        )

    def _linear(self, *names: str, order: torch.Tensor | None = None) -> Linear:
        full = list(names)
        linear = build_linear(self._store, full, self._quantization, self.dtype, self.device, output_order=order)
        self.linears[tuple(full)] = linear
        return linear

    def _norm(self, name: str) -> LayerNorm:
        return LayerNorm(self._tensor(f"{name}.weight"), self._tensor(f"{name}.bias"), self.shape.eps)

    def _tensor(self, name: str) -> torch.Tensor:
        # Copied: the file may be replaced while the model is served.
        return self._store.get(f"{self.shape.prefix}{name}").to(self.device, self.dtype, copy=True)
