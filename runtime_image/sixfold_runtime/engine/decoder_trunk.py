"""Decoder-only classifiers (Llama, Qwen2, Qwen3): the engine's own decoder without a cache, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from sixfold_api.scalars import Task
from sixfold_runtime.engine.checkpoint import TensorStore, require_tensors
from sixfold_runtime.engine.decoder import Decoder, as_pairs, turn
from sixfold_runtime.engine.decoder_shape import DecoderShape
from sixfold_runtime.engine.heads import ModuleHead, normed, slice_head
from sixfold_runtime.engine.linear import build_linear
from sixfold_runtime.engine.mlp import Modules, Tensors, TwoLinears
from sixfold_runtime.engine.packed_attention import packed_attention
from sixfold_runtime.engine.packed_rows import Plan, chosen, features
from sixfold_runtime.engine.trunk import Head, Rows, Trunk

if TYPE_CHECKING:
    from sixfold_runtime.engine.task_slice import TaskSlice

_FAMILY = "decoder"


class DecoderTrunk(Trunk):
    """Weights on a device, and what they compute."""

    def __init__(
        self,
        shape: DecoderShape,
        config: Any,
        store: TensorStore,
        quantization: dict[str, Any] | None,
        task: Task,
        labels: Sequence[str],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """
        Args:
            config: transformers' configuration of the model.
            quantization: `quantization_config` of the checkpoint's config.json.
            task, labels: of the checkpoint's head.

        Raises:
            ModelLoadError: the weight files don't fill the model.
        """
        self._decoder = Decoder(shape, config, store, quantization, dtype, device)
        self.shape, self.dtype, self.device = shape, dtype, device
        self.layers, self.width = shape.layers, shape.hidden
        self.vocabulary, self.max_tokens = shape.vocabulary, None
        require_tensors(store, {"score.weight": (len(labels), shape.hidden)})
        score = build_linear(store, ["score"], quantization, dtype, device)
        self.linears = {**self._decoder.linears, ("score",): score}
        self.kernel = "+".join(sorted({linear.kernel for linear in self.linears.values()}))
        self.own_head: Head | None = ModuleHead(task, labels, score, norm=self._decoder.norm)
        self._pad_id: int | None = config.pad_token_id

    @property
    def weight_bytes(self) -> int:
        return self._decoder.weight_bytes + self.linears["score",].weight_bytes

    @torch.inference_mode()
    def embed(self, texts: Sequence[Sequence[int]]) -> Rows:
        hidden = self._decoder.embedded([token for text in texts for token in text])
        return Rows(hidden, tuple(map(len, texts)), tuple(map(self._last, texts)))

    def _last(self, text: Sequence[int]) -> int:
        """The last token that is no padding, as such classifiers are trained: a text may end with padding's token."""
        return next((index for index in reversed(range(len(text))) if text[index] != self._pad_id), 0)

    @torch.inference_mode()
    def layer(self, index: int, rows: Rows, slices: Sequence[TaskSlice | None] | None = None) -> Rows:
        layer, x = self._decoder.blocks[index], rows.hidden
        plan = rows.plan or self._plan(rows)
        layer.qkv.write(layer.attention_norm(x), plan.qkv)
        turn(plan.turned, plan.pairs, layer.head_norm, plan.turns)
        plan.attention(self.shape.windows[index])
        layer.output.add_to(x, plan.attended)
        normalised = layer.mlp_norm(x)
        groups = plan.groups(slices)
        if groups is not None and groups.touch(index):
            x += groups.feed_forward(index, normalised, layer.mlp)
        else:
            layer.mlp.add_to(x, normalised)
        return Rows(x, rows.lengths, rows.anchors, plan)

    @torch.inference_mode()
    def select(self, rows: Rows, keep: Sequence[int]) -> Rows:
        return chosen(rows, keep)

    @torch.inference_mode()
    def features(self, rows: Rows) -> torch.Tensor:
        # Behind the last normalisation, whatever the depth: what lies before it grows from layer to layer.
        return features(normed(rows, self._decoder.norm))

    def mlp_modules(self, index: int) -> tuple[Modules, Modules]:
        return self._decoder.mlp_modules(index)

    def mlp(self, tensors: Tensors, index: int) -> TwoLinears | None:
        return self._decoder.mlp(tensors, index)

    def head(self, tensors: Tensors, task: Task, labels: Sequence[str]) -> Head:
        norm = self._decoder.norm
        return slice_head(_FAMILY, tensors, task, labels, self.width, self.dtype, self.device, norm=norm)

    def _plan(self, rows: Rows) -> _TurningPlan:
        shape, tokens = self.shape, len(rows.hidden)
        qkv = rows.hidden.new_empty(tokens, shape.kv_heads * (shape.group + 2) * shape.head_dim)
        attended = rows.hidden.new_empty(tokens, shape.heads * shape.head_dim)
        heads = qkv.view(tokens, shape.kv_heads, shape.group + 2, shape.head_dim)
        by_group = attended.view(tokens, shape.kv_heads, shape.group, shape.head_dim)
        attention = packed_attention(heads, by_group, rows.lengths, shape.head_dim**-0.5, causal=True)
        positions = torch.tensor([place for length in rows.lengths for place in range(length)], device=self.device)
        turns = self._decoder.rotary.at(positions, max(rows.lengths))[:, None, None]
        return _TurningPlan(Plan(qkv, attended, attention), heads[:, :, :-1], turns)


class _TurningPlan(Plan):
    """With the queries and keys that positions turn."""

    def __init__(self, plan: Plan, turned: torch.Tensor, turns: torch.Tensor) -> None:
        super().__init__(plan.qkv, plan.attended, plan.attention)
        self.turned, self.pairs, self.turns = turned, as_pairs(turned), turns
