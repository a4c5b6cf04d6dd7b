"""A Llama whose layers are stacked in one tensor per weight: the same mathematics as LlamaForCausalLM, less overhead.

Used to train and to generate; checkpoints leave in the standard form that ``AutoModelForCausalLM`` loads.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

ROPE_THETA = 10_000.0
NORM_EPSILON = 1e-6
INITIAL_STD = 0.02

# Stacked parameter -> the names of its parts, from top to bottom, in one layer of a LlamaForCausalLM checkpoint.
LAYER_WEIGHTS = {
    "attention_in": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention_out": ("self_attn.o_proj",),
    "mlp_in": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp_out": ("mlp.down_proj",),
    "attention_norm": ("input_layernorm",),
    "mlp_norm": ("post_attention_layernorm",),
}


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; ``head_size`` is in dimensions, ``context`` in tokens."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    context: int

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    def rows(self, name: str) -> list[int]:
        """Rows of each part of a stacked parameter, in the order of LAYER_WEIGHTS."""
        kv_hidden = self.kv_heads * self.head_size
        return {"attention_in": [self.hidden, kv_hidden, kv_hidden], "mlp_in": [self.ffn, self.ffn]}.get(
            name, [self.hidden]
        )

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


class KVCache:
    """Keys and values of every layer, (layers, 2, rows, kv heads, capacity, head size), and the tokens it holds."""

    def __init__(self, shape: Shape, rows: int, capacity_tokens: int) -> None:
        self.tensor = torch.empty(shape.layers, 2, rows, shape.kv_heads, capacity_tokens, shape.head_size)
        self.tokens = 0

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store behind what is there already; returns all keys and values of the layer, the new ones included."""
        stop = self.tokens + key.shape[2]
        store = self.tensor[layer, :, :, :, :stop]
        store[0, :, :, self.tokens :] = key
        store[1, :, :, self.tokens :] = value
        return store[0], store[1]


class TinyLlama(nn.Module):
    """Causal LM with rotary positions, grouped-query attention, SwiGLU and tied embeddings."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        generator = torch.Generator().manual_seed(seed)

        def normal(*sizes: int, std: float = INITIAL_STD) -> nn.Parameter:
            return nn.Parameter(torch.randn(*sizes, generator=generator) * std)

        layers, hidden = shape.layers, shape.hidden
        residual_std = INITIAL_STD / math.sqrt(2 * layers)
        self.embedding = normal(shape.vocabulary, hidden)
        self.attention_in = normal(layers, sum(shape.rows("attention_in")), hidden)
        self.attention_out = normal(layers, hidden, hidden, std=residual_std)
        self.mlp_in = normal(layers, sum(shape.rows("mlp_in")), hidden)
        self.mlp_out = normal(layers, hidden, shape.ffn, std=residual_std)
        self.attention_norm = nn.Parameter(torch.ones(layers, hidden))
        self.mlp_norm = nn.Parameter(torch.ones(layers, hidden))
        self.final_norm = nn.Parameter(torch.ones(hidden))
        frequencies = ROPE_THETA ** (-torch.arange(0, shape.head_size, 2).float() / shape.head_size)
        angles = torch.outer(torch.arange(shape.context).float(), frequencies).repeat(1, 2)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, ids: Tensor, cache: KVCache | None = None) -> Tensor:
        """Logits (batch, tokens, vocabulary) of ``ids`` (batch, tokens).

        With a cache the ids continue it and are added to it; then they are one token a row, or the cache is empty.
        """
        shape = self.shape
        x = F.embedding(ids, self.embedding)
        for layer in range(shape.layers):
            y = F.rms_norm(x, (shape.hidden,), self.attention_norm[layer], NORM_EPSILON)
            x = x + F.linear(self._attention(layer, y, cache), self.attention_out[layer])
            y = F.rms_norm(x, (shape.hidden,), self.mlp_norm[layer], NORM_EPSILON)
            gate, up = F.linear(y, self.mlp_in[layer]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, self.mlp_out[layer])
        if cache is not None:
            cache.tokens += ids.shape[1]
        return F.linear(F.rms_norm(x, (shape.hidden,), self.final_norm, NORM_EPSILON), self.embedding)

    def _attention(self, layer: int, x: Tensor, cache: KVCache | None) -> Tensor:
        """Mixed values (batch, tokens, hidden), before the output projection."""
        batch, tokens, _ = x.shape
        shape = self.shape
        past = cache.tokens if cache is not None else 0
        cosine, sine = self.cosine[past : past + tokens], self.sine[past : past + tokens]
        qkv = F.linear(x, self.attention_in[layer]).view(batch, tokens, -1, shape.head_size).transpose(1, 2)
        rotated = rotate(qkv[:, : shape.heads + shape.kv_heads], cosine, sine)
        query, key = rotated[:, : shape.heads], rotated[:, shape.heads :]
        value = qkv[:, shape.heads + shape.kv_heads :]
        if cache is not None:
            key, value = cache.extend(layer, key, value)
        if past:
            # One new token sees everything, so the query heads of a group can stand where query tokens do.
            grouped = query.reshape(batch, shape.kv_heads, -1, shape.head_size)
            return F.scaled_dot_product_attention(grouped, key, value).reshape(batch, tokens, -1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).reshape(batch, tokens, -1)

    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def checkpoint(self) -> dict[str, Tensor]:
        """Weights under LlamaForCausalLM's names, rounded to bf16; the embedding is tied, so there is no lm_head."""
        weights: dict[str, Tensor] = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.final_norm}
        for name, standard_names in LAYER_WEIGHTS.items():
            for layer, stacked in enumerate(getattr(self, name)):
                for standard_name, weight in zip(
                    standard_names, torch.split(stacked, self.shape.rows(name)), strict=True
                ):
                    weights[f"model.layers.{layer}.{standard_name}.weight"] = weight
        return {name: weight.detach().bfloat16().contiguous() for name, weight in weights.items()}


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary positions (arXiv 2104.09864) in the half-split layout of LlamaForCausalLM."""
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat([-second, first], -1) * sine


def grow(model: TinyLlama, layers: int, seed: int) -> TinyLlama:
    """A deeper model that computes the same function: each layer is followed by copies that add nothing yet.

    The copies' output and down projections are zero (progressive stacking, in the function-preserving form of
    Net2Net, arXiv 1511.05641). ``layers`` must be a multiple of the model's.
    """
    copies, rest = divmod(layers, model.shape.layers)
    if rest:
        raise ValueError(f"cannot grow {model.shape.layers} layers to {layers}: not a multiple")
    deeper = TinyLlama(Shape(**{**model.shape.as_dict(), "layers": layers}), seed)
    with torch.no_grad():
        for name in ("embedding", "final_norm"):
            getattr(deeper, name).copy_(getattr(model, name))
        for name in LAYER_WEIGHTS:
            getattr(deeper, name).copy_(getattr(model, name).repeat_interleave(copies, 0))
        added = torch.arange(layers) % copies != 0
        deeper.attention_out[added] = 0
        deeper.mlp_out[added] = 0
    return deeper


def llama_config(shape: Shape, special_tokens: dict[str, int]) -> dict[str, Any]:
    """Contents of config.json. ``special_tokens``: bos_token_id, eos_token_id, pad_token_id."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "max_position_embeddings": shape.context,
        "rope_theta": ROPE_THETA,
        "rms_norm_eps": NORM_EPSILON,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": INITIAL_STD,
        "tie_word_embeddings": True,
        "use_cache": True,
        **special_tokens,
    }
