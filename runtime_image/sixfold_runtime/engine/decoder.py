"""The engine's own decoder for Llama, Qwen2 and Qwen3: few and large operations, weights straight from the files.

What makes it fast where a step is small: query, key and value (and gate and up) projections are one product each,
the tokens of all rows are packed without padding, what doesn't change within a step is made once, and buffers are
written in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from sixfold_api.scalars import Task
from sixfold_runtime.engine.attention import StepAttention
from sixfold_runtime.engine.checkpoint import TensorStore
from sixfold_runtime.engine.decoder_cache import CacheShape, Span
from sixfold_runtime.engine.decoder_shape import DecoderShape, check_tensors
from sixfold_runtime.engine.errors import ModelLoadError
from sixfold_runtime.engine.linear import DenseLinear, Linear, build_linear
from sixfold_runtime.engine.mlp import Modules, Tensors, TwoLinears, sliced_mlp
from sixfold_runtime.engine.norm import RMSNorm
from sixfold_runtime.engine.rotary import Rotary, interleaved
from sixfold_runtime.engine.token_groups import TokenGroups
from sixfold_runtime.engine.trunk import Head

_MAX_KEPT_TOKENS = 64
"""Working memory for steps of up to so many tokens is kept."""


@dataclass(frozen=True)
class DecoderLayer:
    """The weights of one layer."""

    attention_norm: RMSNorm
    qkv: Linear
    """Outputs [kv_heads, group + 2, head_dim]: the queries of a group, its key (both interleaved), its value."""
    head_norm: RMSNorm | None
    """Of queries and keys."""
    output: Linear
    mlp_norm: RMSNorm
    gate_up: Linear
    down: Linear

    @property
    def mlp(self) -> TwoLinears:
        """The feed-forward part, behind mlp_norm."""
        return TwoLinears(self.gate_up, gated, self.down)


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up (SwiGLU, arXiv 2002.05202): [n, 2 * intermediate] -> [n, intermediate]; overwrites."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate, inplace=True).mul_(up)


@dataclass(frozen=True)
class _Workspace:
    """Buffers of a step, and views of them."""

    qkv: torch.Tensor
    """[tokens, kv_heads * (group + 2) * head_dim]"""
    heads: torch.Tensor
    """The same as [tokens, kv_heads, group + 2, head_dim]."""
    attended: torch.Tensor
    """[tokens, heads * head_dim]"""
    gate_up: torch.Tensor
    """[tokens, 2 * intermediate]"""
    gate: torch.Tensor
    up: torch.Tensor


class Decoder:
    """Weights on a device, and the computation from token ids to hidden states and logits.

    Attributes:
        embeddings: [vocabulary, hidden].
        linears: by the names of the modules that each computes.
        weight_bytes: resident.
        blocks: the layers' weights.
        layers: how many.
        width: of hidden states.
        vocabulary: embeddings.
        norm: the last normalisation.
    """

    def __init__(
        self,
        shape: DecoderShape,
        config: Any,
        store: TensorStore,
        quantization: dict[str, Any] | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Raises ModelLoadError: the weight files don't fill the model."""
        check_tensors(shape, store)
        self.shape, self.dtype, self.device = shape, dtype, device
        self._store, self._quantization = store, quantization
        self._workspaces: dict[int, _Workspace] = {}
        self.linears: dict[tuple[str, ...], Linear] = {}
        self.embeddings = self._tensor("model.embed_tokens.weight")
        self.layers, self.width, self.vocabulary = shape.layers, shape.hidden, shape.vocabulary
        self.blocks = [self._layer(f"model.layers.{index}") for index in range(shape.layers)]
        self.norm = RMSNorm(self._tensor("model.norm.weight"), shape.eps)
        self._head = self._output_projection()
        self.rotary = Rotary(config, shape.head_dim, device)
        scales = torch.full((shape.group + 1, 1), shape.head_dim**-0.5)
        scales[-1] = 1
        self._scales = scales.to(device)
        del self._store

    @property
    def weight_bytes(self) -> int:
        parts: list[Linear | RMSNorm] = [self.norm] if self._head is None else [self.norm, self._head]
        parts += [part for layer in self.blocks for part in vars(layer).values() if part is not None]
        return self.embeddings.nbytes + sum(part.weight_bytes for part in parts)

    @property
    def cache_shape(self) -> CacheShape:
        shape = self.shape
        exact_on_cpu = self.device.type == "cpu" and self.dtype == torch.float32
        return CacheShape(shape.layers, shape.kv_heads, shape.head_dim, self.dtype, self.device, exact_on_cpu)

    def hidden(self, tokens: list[int], spans: list[Span], groups: TokenGroups | None = None) -> torch.Tensor:
        """Compute new tokens, and write their keys and values where `spans` say.

        Args:
            tokens: ids of the new tokens, span by span, row by row.
            groups: of the tokens, by task slice; None where no row has one.

        Returns:
            [tokens, hidden], before the last normalisation.
        """
        shape = self.shape
        x = self.embedded(tokens)
        turns = self._turns(spans)
        # Queries are scaled here, so that attention needn't.
        turns = (turns[:, None] * self._scales)[:, None]
        work = self._workspace(len(tokens))
        turned = work.heads[:, :, :-1]
        attention = StepAttention(
            spans, shape.windows, work.heads, work.attended.view(len(tokens), shape.kv_heads, shape.group, -1)
        )
        pairs = as_pairs(turned)
        for index, layer in enumerate(self.blocks):
            layer.qkv.write(layer.attention_norm(x), work.qkv)
            turn(turned, pairs, layer.head_norm, turns)
            attention(index)
            layer.output.add_to(x, work.attended)
            if groups is not None and groups.touch(index):
                x += groups.feed_forward(index, layer.mlp_norm(x), layer.mlp)
                continue
            layer.gate_up.write(layer.mlp_norm(x), work.gate_up)
            layer.down.add_to(x, functional.silu(work.gate, inplace=True).mul_(work.up))
        return x

    def embedded(self, tokens: list[int]) -> torch.Tensor:
        """[tokens, hidden], to be written to."""
        if len(tokens) == 1:  # making an index and looking it up takes a draft a tenth of its step
            return self.embeddings[tokens[0] : tokens[0] + 1].clone()
        return functional.embedding(torch.tensor(tokens, device=self.device), self.embeddings)

    def _turns(self, spans: list[Span]) -> torch.Tensor:
        """Rotary factors, complex64 [tokens, head_dim / 2]."""
        ranges = [
            (start, start + count) for span in spans for start, count in zip(span.starts, span.counts, strict=True)
        ]
        if len(ranges) == 1:
            return self.rotary.between(*ranges[0])
        positions = [position for start, end in ranges for position in range(start, end)]
        return self.rotary.at(torch.tensor(positions, device=self.device), max(positions) + 1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> float32 [n, vocabulary], of a model that generates."""
        assert self._head is not None
        return self._head(self.norm(hidden)).float()

    def mlp_modules(self, index: int) -> tuple[Modules, Modules]:
        """The modules in the feed-forward part of a layer, as they are computed: those of one tuple can only be
        replaced together."""
        name = f"model.layers.{index}.mlp"
        return (f"{name}.gate_proj", f"{name}.up_proj"), (f"{name}.down_proj",)

    def mlp(self, tensors: Tensors, index: int) -> TwoLinears | None:
        """A layer's feed-forward part with a slice's replacements or deltas; None if it has none for the layer.

        Raises:
            ModelLoadError: a tensor doesn't fit.
        """
        return sliced_mlp(self.blocks[index].mlp, self.mlp_modules(index), tensors, self.dtype, self.device)

    def head(self, tensors: Tensors, task: Task, labels: Sequence[str]) -> Head:
        """Raises ModelLoadError: a generator's slice has no head of its own."""
        raise ModelLoadError(f"a generating model can't have a slice with a head for {task}")

    def _workspace(self, tokens: int) -> _Workspace:
        if tokens in self._workspaces:
            return self._workspaces[tokens]
        shape = self.shape
        qkv = self._buffer(tokens, shape.kv_heads * (shape.group + 2) * shape.head_dim)
        gate_up = self._buffer(tokens, 2 * shape.intermediate)
        gate, up = gate_up.chunk(2, dim=1)
        workspace = _Workspace(
            qkv=qkv,
            heads=qkv.view(tokens, shape.kv_heads, shape.group + 2, shape.head_dim),
            attended=self._buffer(tokens, shape.heads * shape.head_dim),
            gate_up=gate_up,
            gate=gate,
            up=up,
        )
        if tokens <= _MAX_KEPT_TOKENS:
            self._workspaces[tokens] = workspace
        return workspace

    def _buffer(self, *size: int) -> torch.Tensor:
        return torch.empty(*size, dtype=self.dtype, device=self.device)

    def _output_projection(self) -> Linear | None:
        if not self.shape.generates:
            return None
        return DenseLinear(self.embeddings, shared=True) if self.shape.tied else self._linear("", "lm_head")

    def _layer(self, name: str) -> DecoderLayer:
        shape = self.shape
        return DecoderLayer(
            attention_norm=RMSNorm(self._tensor(f"{name}.input_layernorm.weight"), shape.eps),
            qkv=self._linear(f"{name}.self_attn.", "q_proj", "k_proj", "v_proj", order=_qkv_order(shape)),
            head_norm=self._head_norm(f"{name}.self_attn") if shape.norms_heads else None,
            output=self._linear(f"{name}.self_attn.", "o_proj"),
            mlp_norm=RMSNorm(self._tensor(f"{name}.post_attention_layernorm.weight"), shape.eps),
            gate_up=self._linear(f"{name}.mlp.", "gate_proj", "up_proj"),
            down=self._linear(f"{name}.mlp.", "down_proj"),
        )

    def _head_norm(self, name: str) -> RMSNorm:
        pairs = interleaved(self.shape.head_dim).to(self.device)
        query, key = (self._tensor(f"{name}.{side}_norm.weight")[pairs] for side in "qk")
        return RMSNorm(torch.stack([query] * self.shape.group + [key]), self.shape.eps)

    def _linear(self, prefix: str, *names: str, order: torch.Tensor | None = None) -> Linear:
        full = [f"{prefix}{name}" for name in names]
        linear = build_linear(self._store, full, self._quantization, self.dtype, self.device, output_order=order)
        self.linears[tuple(full)] = linear
        return linear

    def _tensor(self, name: str) -> torch.Tensor:
        # Copied: the file may be replaced while the model is served.
        return self._store.get(name).to(self.device, self.dtype, copy=True)


def as_pairs(heads: torch.Tensor) -> torch.Tensor | None:
    """A complex view [..., head_dim / 2] of float32 [..., head_dim]; None of half types, which have none."""
    return _as_complex(heads) if heads.dtype == torch.float32 else None


def turn(heads: torch.Tensor, pairs: torch.Tensor | None, head_norm: RMSNorm | None, turns: torch.Tensor) -> None:
    """Normalise queries and keys where the model does so, and turn them by their positions, in place.

    Args:
        heads: [tokens, kv_heads, group + 1, head_dim].
        pairs: their complex view, where they have one.
        turns: complex factors that broadcast to the pairs.
    """
    if head_norm is not None:
        heads.copy_(head_norm(heads))
    if pairs is not None:
        pairs.mul_(turns)
    else:
        heads.copy_(torch.view_as_real(_as_complex(heads.float()) * turns).flatten(-2))


def _as_complex(heads: torch.Tensor) -> torch.Tensor:
    """[..., head_dim] -> complex [..., head_dim / 2]"""
    return torch.view_as_complex(heads.view(*heads.shape[:-1], -1, 2))


def _qkv_order(shape: DecoderShape) -> torch.Tensor:
    """Where each output of the fused projection lies among q_proj's, k_proj's and v_proj's."""
    group, kv_heads, head = shape.group, shape.kv_heads, shape.head_dim
    features = torch.arange((shape.heads + 2 * kv_heads) * head).view(-1, head)
    queries, keys, values = features.tensor_split((shape.heads, shape.heads + kv_heads))
    pairs = interleaved(head)
    parts = (queries.view(kv_heads, group, head)[:, :, pairs], keys[:, None, pairs], values[:, None])
    return torch.cat(parts, dim=1).reshape(-1)
