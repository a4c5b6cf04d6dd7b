"""Which encoders the engine computes itself, and how their checkpoints name the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from sixfold_api.scalars import Task
from sixfold_runtime.engine.checkpoint import TensorStore
from sixfold_runtime.engine.heads import HIDDEN_MODULES, LAST_MODULES, TOKEN_MODULES
from sixfold_runtime.engine.mlp import Activation

_MODEL_TYPES = {"Bert": "bert", "Roberta": "roberta", "XLMRoberta": "xlm-roberta", "DistilBert": "distilbert"}
HEADS: dict[str, Task | None] = {
    "ForSequenceClassification": Task.CLASSIFICATION,
    "ForTokenClassification": Task.TOKEN_CLASSIFICATION,
    "Model": None,
}
"""What stands behind a family's name, and the task of its head."""

BARE_ARCHITECTURES = frozenset(f"{family}Model" for family in _MODEL_TYPES)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.gelu_(x, approximate="tanh")  # type: ignore[no-any-return]


ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": torch.ops.aten.gelu_,
    "gelu_python": torch.ops.aten.gelu_,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": torch.relu_,
    "silu": partial(functional.silu, inplace=True),
    "swish": partial(functional.silu, inplace=True),
}
"""By the names of config.json; each overwrites what it is given."""


@dataclass(frozen=True)
class Names:
    """What a family calls its modules; those of a layer are relative to it."""

    layer: str
    query_key_value: tuple[str, str, str]
    attention_output: str
    attention_norm: str
    first: str
    second: str
    norm: str


_BERT = Names(
    layer="encoder.layer",
    query_key_value=("attention.self.query", "attention.self.key", "attention.self.value"),
    attention_output="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    first="intermediate.dense",
    second="output.dense",
    norm="output.LayerNorm",
)
_DISTILBERT = Names(
    layer="transformer.layer",
    query_key_value=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    attention_output="attention.out_lin",
    attention_norm="sa_layer_norm",
    first="ffn.lin1",
    second="ffn.lin2",
    norm="output_layer_norm",
)


@dataclass(frozen=True)
class EncoderShape:
    """What configuration and checkpoint say about an encoder."""

    family: str
    """bert, roberta or distilbert."""
    task: Task | None
    """Of its head, None without one."""
    prefix: str
    """Before the names of the trunk's tensors: "bert." or "" and the like."""
    names: Names
    layers: int
    width: int
    heads: int
    intermediate: int
    vocabulary: int
    positions: int
    """Rows of the position table."""
    padding_id: int | None
    """RoBERTa: the token, and the position, of padding; positions count on from it. None: they count from 0."""
    token_types: int
    """Rows of the table of token types, of which the first is used; 0: there is no such table."""
    activation: str
    eps: float

    @property
    def max_tokens(self) -> int:
        return self.positions if self.padding_id is None else self.positions - self.padding_id - 1


def encoder_shape(config: Any, architectures: list[str], store: TensorStore) -> EncoderShape | None:
    """The shape of an encoder that the engine computes itself, None for any other.

    Args:
        config: transformers' configuration of the model.
        architectures: of its config.json.
    """
    known = {f"{family}{end}": (kind, task) for family, kind in _MODEL_TYPES.items() for end, task in HEADS.items()}
    kind, task = next((known[name] for name in architectures if name in known), ("", None))
    distil = kind == "distilbert"
    activation = str(getattr(config, "activation" if distil else "hidden_act", None))
    if (
        kind != config.model_type
        or activation not in ACTIVATIONS
        or config.hidden_size % config.num_attention_heads
        or getattr(config, "position_embedding_type", "absolute") not in (None, "absolute")
        or getattr(config, "is_decoder", False)
        or any(name.endswith((".gamma", ".beta")) for name in store.names)  # names of the first BERTs
    ):
        return None
    family = "roberta" if "roberta" in kind else kind
    prefix = f"{family}." if any(name.startswith(f"{family}.") for name in store.names) else ""
    return EncoderShape(
        family=family,
        task=task,
        prefix=prefix,
        names=_DISTILBERT if distil else _BERT,
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        intermediate=config.hidden_dim if distil else config.intermediate_size,
        vocabulary=config.vocab_size,
        positions=config.max_position_embeddings,
        padding_id=config.pad_token_id if family == "roberta" else None,
        token_types=0 if distil else config.type_vocab_size,
        activation=activation,
        eps=1e-12 if distil else config.layer_norm_eps,
    )


def expected_tensors(shape: EncoderShape, labels: int) -> dict[str, tuple[int, ...]]:
    """The tensors of an unquantised checkpoint, by name, without those that nothing reads."""
    width, names = shape.width, shape.names
    layer: dict[str, tuple[int, int]] = dict.fromkeys((*names.query_key_value, names.attention_output), (width, width))
    layer |= {names.first: (shape.intermediate, width), names.second: (width, shape.intermediate)}
    modules = {
        f"{shape.prefix}{names.layer}.{index}.{name}": size
        for index in range(shape.layers)
        for name, size in layer.items()
    }
    modules |= head_modules(shape, labels)
    norms = ["embeddings.LayerNorm"]
    norms += [
        f"{names.layer}.{index}.{norm}" for index in range(shape.layers) for norm in (names.attention_norm, names.norm)
    ]
    expected: dict[str, tuple[int, ...]] = {f"{name}.weight": size for name, size in modules.items()}
    expected |= {f"{name}.bias": size[:1] for name, size in modules.items()}
    expected |= {f"{shape.prefix}{norm}.{part}": (width,) for norm in norms for part in ("weight", "bias")}
    tables = {"word": shape.vocabulary, "position": shape.positions, "token_type": shape.token_types}
    return expected | {
        f"{shape.prefix}embeddings.{table}_embeddings.weight": (rows, width) for table, rows in tables.items() if rows
    }


def head_modules(shape: EncoderShape, labels: int) -> dict[str, tuple[int, int]]:
    """Linears of the checkpoint's own head in the order in which they compute, with [outputs, inputs]."""
    width = shape.width
    if shape.task is None:
        return {}
    if shape.task is Task.TOKEN_CLASSIFICATION:
        return {TOKEN_MODULES[shape.family]: (labels, width)}
    return {hidden_module(shape): (width, width), LAST_MODULES[shape.family]: (labels, width)}


def hidden_module(shape: EncoderShape) -> str:
    """What lies before the last linear of a head for whole texts. BERT's belongs to the trunk."""
    module = HIDDEN_MODULES[shape.family]
    return f"{shape.prefix}{module}" if shape.family == "bert" else module
