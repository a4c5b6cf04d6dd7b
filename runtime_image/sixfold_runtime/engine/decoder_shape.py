"""Which decoders the engine computes itself, and which tensors they have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sixfold_runtime.engine.checkpoint import TensorStore, require_tensors
from sixfold_runtime.engine.rotary import STATIC_KINDS

_FAMILIES = {"Llama": "llama", "Qwen2": "qwen2", "Qwen3": "qwen3"}
_ENDS = {"ForCausalLM": True, "ForSequenceClassification": False, "ForTokenClassification": False}
"""Of the names of architectures: whether they generate."""
_ARCHITECTURES = {
    f"{family}{end}": (kind, generates) for family, kind in _FAMILIES.items() for end, generates in _ENDS.items()
}
_SLIDING = "sliding_attention"


@dataclass(frozen=True)
class DecoderShape:
    """What the configuration says about a decoder."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    eps: float
    windows: tuple[int | None, ...]
    """Of each layer: how many of the last positions it attends to, None for all."""
    norms_heads: bool
    """Whether queries and keys are normalised (Qwen3)."""
    biased: frozenset[str]
    """Projections that have a bias."""
    tied: bool
    """Whether the output projection is the embedding."""
    generates: bool = True
    """Whether there is an output projection; classifiers have a head of their own instead."""

    @property
    def group(self) -> int:
        """Query heads that share a key and value head."""
        return self.heads // self.kv_heads


def decoder_shape(config: Any, architectures: list[str]) -> DecoderShape | None:
    """The shape of a decoder that this module computes, None for any other.

    Args:
        config: transformers' configuration of the model.
        architectures: of its config.json.
    """
    known = (_ARCHITECTURES[name] for name in architectures if name in _ARCHITECTURES)
    kind, generates = next(known, (None, False))
    rope = getattr(config, "rope_parameters", None) or {}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads if kind else 0
    if (
        kind is None
        or kind != config.model_type
        or config.hidden_act != "silu"
        or head_dim % 2
        or rope.get("rope_type") not in STATIC_KINDS
        or rope.get("partial_rotary_factor", 1.0) != 1.0
    ):
        return None
    attention_bias = {"q_proj", "k_proj", "v_proj"}
    if kind != "qwen2":
        attention_bias = {*attention_bias, "o_proj"} if config.attention_bias else set()
    mlp_bias = {"gate_proj", "up_proj", "down_proj"} if getattr(config, "mlp_bias", False) else set()
    kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    return DecoderShape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        intermediate=config.intermediate_size,
        vocabulary=config.vocab_size,
        eps=config.rms_norm_eps,
        windows=tuple(config.sliding_window if kind == _SLIDING else None for kind in kinds),
        norms_heads=kind == "qwen3",
        biased=frozenset(attention_bias | mlp_bias),
        tied=config.tie_word_embeddings,
        generates=generates,
    )


def expected_tensors(shape: DecoderShape) -> dict[str, tuple[int, ...]]:
    """The tensors of an unquantised checkpoint, by name."""
    hidden, head = shape.hidden, shape.head_dim
    modules = {
        "self_attn.q_proj": (shape.heads * head, hidden),
        "self_attn.k_proj": (shape.kv_heads * head, hidden),
        "self_attn.v_proj": (shape.kv_heads * head, hidden),
        "self_attn.o_proj": (hidden, shape.heads * head),
        "mlp.gate_proj": (shape.intermediate, hidden),
        "mlp.up_proj": (shape.intermediate, hidden),
        "mlp.down_proj": (hidden, shape.intermediate),
    }
    layer: dict[str, tuple[int, ...]] = {f"{name}.weight": size for name, size in modules.items()}
    layer |= {f"{name}.bias": size[:1] for name, size in modules.items() if name.split(".")[1] in shape.biased}
    layer |= {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    if shape.norms_heads:
        layer |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    expected = {f"model.layers.{index}.{name}": size for index in range(shape.layers) for name, size in layer.items()}
    expected |= {"model.embed_tokens.weight": (shape.vocabulary, hidden), "model.norm.weight": (hidden,)}
    return expected if shape.tied or not shape.generates else {**expected, "lm_head.weight": (shape.vocabulary, hidden)}


def check_tensors(shape: DecoderShape, store: TensorStore) -> None:
    """Raises ModelLoadError where the weight files don't fill the model."""
    require_tensors(store, expected_tensors(shape))
