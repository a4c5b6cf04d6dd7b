"""Which models the engine computes itself: everything else is left to transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sixfold_api.scalars import Task
from sixfold_runtime.engine.checkpoint import TensorStore, quantization_of
from sixfold_runtime.engine.decoder import Decoder
from sixfold_runtime.engine.decoder_shape import decoder_shape
from sixfold_runtime.engine.decoder_trunk import DecoderTrunk
from sixfold_runtime.engine.encoder import Encoder
from sixfold_runtime.engine.encoder_shape import encoder_shape
from sixfold_runtime.engine.kernel_check import check_loaded

OwnModel = Decoder | Encoder | DecoderTrunk


def own_model(
    config: dict[str, Any],
    settings: Any,
    store: TensorStore,
    task: Task,
    labels: Sequence[str],
    dtype: torch.dtype,
    device: torch.device,
) -> OwnModel | None:
    """A Decoder for a task that generates, else a Trunk; None for a model that the engine doesn't know.

    Args:
        config: config.json.
        settings: transformers' configuration of it.
        labels: of its head, none for a bare trunk.

    Raises:
        ModelLoadError: the weight files don't fill the model.
    """
    quantization = quantization_of(config)
    if not readable(quantization):
        return None
    own = _build(config.get("architectures") or [], settings, store, task, labels, quantization, dtype, device)
    if own is not None and quantization is not None:
        check_loaded(own, store)
    return own


def _build(
    architectures: list[str],
    settings: Any,
    store: TensorStore,
    task: Task,
    labels: Sequence[str],
    quantization: dict[str, Any] | None,
    dtype: torch.dtype,
    device: torch.device,
) -> OwnModel | None:
    decoder = decoder_shape(settings, architectures)
    if task is Task.GENERATION:
        return None if decoder is None else Decoder(decoder, settings, store, quantization, dtype, device)
    if decoder is not None:
        return DecoderTrunk(decoder, settings, store, quantization, task, labels, dtype, device)
    encoder = encoder_shape(settings, architectures, store)
    return None if encoder is None else Encoder(encoder, store, quantization, labels, dtype, device)


def readable(quantization: dict[str, Any] | None) -> bool:
    """Whether the engine's own linears can read the weights; transformers may know others."""
    return quantization is None or quantization.get("quant_method") in ("gptq", "sixfold-int8")
