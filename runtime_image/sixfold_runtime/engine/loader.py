"""Loads a model folder: safetensors only, local files only, with an error that says what is wrong and where.

A decoder or encoder that the engine computes itself is read straight from the files; every other model becomes a
transformers module.

The compute type follows one rule, without a setting. On CUDA it is the checkpoint's own. On a CPU it is fp32 where
the fp32 weights take at most half of the memory that is left (exact, and half types are slow on most CPUs), else
the checkpoint's own; GPTQ weights compute in bf16, which their kernels want. Only parameters are cast, never buffers:
casting a whole model would round the rotary frequencies, which shifts every later position.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sixfold_api.runtime_config import ServedModel
from sixfold_api.scalars import Task
from sixfold_runtime.engine.checkpoint import TensorStore, Weights, quantization_of
from sixfold_runtime.engine.decoder import Decoder
from sixfold_runtime.engine.decoder_trunk import DecoderTrunk
from sixfold_runtime.engine.device import available_memory_bytes
from sixfold_runtime.engine.encoder import Encoder
from sixfold_runtime.engine.encoder_shape import BARE_ARCHITECTURES
from sixfold_runtime.engine.errors import ModelLoadError
from sixfold_runtime.engine.lora import ADAPTER_FOLDER, open_store
from sixfold_runtime.engine.own_models import own_model, readable
from sixfold_runtime.engine.quantized_module import module_weight_bytes
from sixfold_runtime.engine.tokenizer import LoadedTokenizer, load_tokenizer, read_json
from sixfold_runtime.engine.transformers_models import configuration, load_module, position_offset
from sixfold_runtime.engine.trunk import Trunk

log = logging.getLogger(__name__)

_ARCHITECTURES = {
    Task.GENERATION: ("ForCausalLM", "LMHeadModel"),
    Task.CLASSIFICATION: ("ForSequenceClassification",),
    Task.TOKEN_CLASSIFICATION: ("ForTokenClassification",),
}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to compute, and what its folder says about it."""

    served: ServedModel
    tokenizer: LoadedTokenizer
    context_tokens: int
    vocabulary_tokens: int
    """Rows of the embedding: token ids are below it."""
    device: torch.device
    dtype: torch.dtype
    weight_bytes: int
    load_seconds: float
    decoder: Decoder | None = None
    """The engine's own, where it has one for a model that generates."""
    trunk: Trunk | None = None
    """The engine's own, where it has one for a classifier."""
    module: Any = None
    """Where it has none, the transformers module, in eval mode, on `device`."""
    eos_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    """`stop_strings` of generation_config.json."""
    labels: tuple[str, ...] = ()
    """Of a classifier's own head, by class index; none of a bare trunk."""


def load(served: ServedModel, device: torch.device) -> LoadedModel:
    """Load one model for its task onto `device`.

    Raises:
        ModelLoadError: a file is missing or damaged, the model is no model for the task, or its tokenizer has more
            tokens than it has embeddings.
    """
    started = time.monotonic()
    folder = Path(served.path)
    if not folder.is_dir():
        raise ModelLoadError(f"{folder} is no folder: is the claim mounted and the path right?")
    config = read_json(folder / "config.json", required=True)
    check_architecture(config, served.task, folder)
    store = open_store(folder)
    tokenizer = load_tokenizer(folder)
    quantization = quantization_of(config)
    dtype = compute_dtype(store.weights, device, available_memory_bytes(device), quantization)
    settings = configuration(folder)
    labels = () if served.task == Task.GENERATION or is_bare(config) else _labels(settings, folder)
    own = own_model(config, settings, store, served.task, labels, dtype, device)
    if own is None:
        module = _module(config, store, served.task, dtype, device)
        settings, vocabulary = module.config, module.get_input_embeddings().weight.shape[0]
        weight_bytes = module_weight_bytes(module)
    else:
        module, vocabulary, weight_bytes = None, own.vocabulary, own.weight_bytes
    if tokenizer.max_token_id >= vocabulary:
        raise ModelLoadError(
            f"{folder}: the tokenizer has ids up to {tokenizer.max_token_id}, but the model only {vocabulary} "
            "embeddings: tokenizer.json belongs to another model"
        )
    generation = read_json(folder / "generation_config.json")
    model = LoadedModel(
        served=served,
        tokenizer=tokenizer,
        context_tokens=_context_tokens(settings, own or module, served.task, tokenizer, folder),
        vocabulary_tokens=vocabulary,
        device=device,
        dtype=dtype,
        weight_bytes=weight_bytes,
        load_seconds=time.monotonic() - started,
        decoder=own if isinstance(own, Decoder) else None,
        trunk=None if isinstance(own, Decoder) else own,
        module=module,
        eos_ids=_ids(config.get("eos_token_id") if (eos := generation.get("eos_token_id")) is None else eos),
        stop_strings=_strings(generation.get("stop_strings")),
        labels=labels,
    )
    log.info(
        "model %s loaded in %.1f s: %.1f MB of weights, %s on %s, context of %d tokens",
        served.name, model.load_seconds, weight_bytes / 1e6, dtype, device, model.context_tokens,
    )  # fmt: skip
    return model


def broken_weights(model: LoadedModel) -> ModelLoadError:
    return ModelLoadError(
        f"{model.served.path}: the first forward gave NaN or infinite values: the weights are damaged, "
        f"or too large for {model.dtype}"
    )


def check_architecture(config: dict[str, Any], task: Task, folder: Path) -> None:
    """Refuse a model that was made for another task, before its weights are read.

    Raises:
        ModelLoadError: `architectures` of config.json has none for the task.
    """
    if "model_type" not in config:
        raise ModelLoadError(f"{folder / 'config.json'} has no model_type: it is no transformers model")
    architectures = config.get("architectures") or []
    bare = task != Task.GENERATION and is_bare(config)
    if not bare and not any(name.endswith(_ARCHITECTURES[task]) for name in architectures):
        raise ModelLoadError(
            f"{folder}: task {task} needs a model such as Llama{_ARCHITECTURES[task][0]}, but config.json says "
            f"architectures: {', '.join(architectures) or 'none'}"
        )


def is_bare(config: dict[str, Any]) -> bool:
    """Whether a config.json is of an encoder without a head: task slices bring theirs."""
    return any(name in BARE_ARCHITECTURES for name in config.get("architectures") or [])


def task_of(config: dict[str, Any]) -> Task | None:
    """What the model of a config.json is for, by its architectures; a bare encoder is a classifier's trunk."""
    names = config.get("architectures") or []
    found = (task for task, ends in _ARCHITECTURES.items() if any(name.endswith(ends) for name in names))
    return next(found, Task.CLASSIFICATION if is_bare(config) else None)


def compute_dtype(
    weights: Weights, device: torch.device, available_bytes: int, quantization: dict[str, Any] | None = None
) -> torch.dtype:
    """The rule of this module's docstring."""
    if device.type == "cpu" and (quantization or {}).get("quant_method") == "gptq":
        return torch.bfloat16
    if device.type == "cpu" and weights.fp32_bytes <= available_bytes // 2:
        return torch.float32
    return weights.dtype


def _module(config: dict[str, Any], store: TensorStore, task: Task, dtype: torch.dtype, device: torch.device) -> Any:
    folder, quantization = store.folder, quantization_of(config)
    if is_bare(config):
        raise ModelLoadError(
            f"{folder}: {config['architectures'][0]} with this config.json is no model that the engine computes "
            "itself: without a head it can't be served"
        )
    if (folder / ADAPTER_FOLDER).is_dir():
        raise ModelLoadError(f"{folder}: adapters are served on models that the engine computes itself only")
    return load_module(store, task, quantization if readable(quantization) else None, dtype, device)


def _context_tokens(settings: Any, model: Any, task: Task, tokenizer: LoadedTokenizer, folder: Path) -> int:
    config = settings.get_text_config()
    limits = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions")]
    context = next((int(limit) for limit in limits if limit), None)
    if task != Task.GENERATION:
        if isinstance(model, Encoder):
            context = model.max_tokens
        elif context is not None and not isinstance(model, DecoderTrunk):
            context -= position_offset(model)
        if (limit := tokenizer.model_max_tokens) is not None:
            context = min(context or limit, limit)
    elif context is None:
        context = tokenizer.model_max_tokens
    if context is None:
        raise ModelLoadError(f"{folder / 'config.json'} has no max_position_embeddings: the context length is unknown")
    return context


def _ids(value: int | Iterable[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)


def _strings(value: str | Iterable[str] | None) -> tuple[str, ...]:
    if not value:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


def _labels(config: Any, folder: Path) -> tuple[str, ...]:
    if config.num_labels < 2:
        raise ModelLoadError(f"{folder}: a classifier needs at least two labels, config.json has {config.num_labels}")
    return tuple(str(config.id2label[index]) for index in range(config.num_labels))
