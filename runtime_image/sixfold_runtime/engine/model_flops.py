"""The operations of a loaded model, by its own shape or, of a transformers module, by the linears that it has."""

from __future__ import annotations

from typing import Any

import torch

from sixfold_runtime.engine.decoder_trunk import DecoderTrunk
from sixfold_runtime.engine.encoder import Encoder
from sixfold_runtime.engine.encoder_shape import head_modules
from sixfold_runtime.engine.loader import LoadedModel
from sixfold_runtime.engine.quantized_module import QuantizedModule
from sixfold_runtime.waste import ModelFlops, decoder_flops, encoder_flops


def model_flops(model: LoadedModel) -> ModelFlops:
    """Task slices and adapters are left out: they compute what they replace, or little more."""
    if model.decoder is not None:
        return decoder_flops(model.decoder.shape)
    if isinstance(model.trunk, DecoderTrunk):
        return decoder_flops(model.trunk.shape, model.trunk.shape.hidden * len(model.labels))
    if isinstance(model.trunk, Encoder):
        head = head_modules(model.trunk.shape, len(model.labels)).values()
        return encoder_flops(model.trunk.shape, sum(outputs * inputs for outputs, inputs in head))
    return module_flops(model.module)


def module_flops(module: Any) -> ModelFlops:
    """Of a dense transformers module: a configuration doesn't say whether its feed-forward parts are gated, its linears
    do. Of a mixture of experts those are counted that are linears of their own, as if all of them computed."""
    config = module.config.get_text_config()
    in_trunk = {id(part) for name, part in module.base_model.named_modules() if not name.startswith("pooler")}
    trunk, output = 0, 0
    for part in module.modules():
        weights = _weights(part)
        if id(part) in in_trunk:
            trunk += weights
        else:
            output += weights
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return ModelFlops(
        layers=config.num_hidden_layers,
        layer_weights=trunk // config.num_hidden_layers,
        attention_width=heads * head_dim,
        output_weights=output,
    )


def _weights(part: Any) -> int:
    if isinstance(part, QuantizedModule):
        return part.weights
    weight = getattr(part, "weight", None)
    # GPT-2's Conv1D is a linear too.
    is_linear = isinstance(part, torch.nn.Linear) or type(part).__name__ == "Conv1D"
    return weight.numel() if is_linear and weight is not None else 0
