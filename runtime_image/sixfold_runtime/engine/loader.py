"""Loads a model folder: safetensors only, local files only, with an error that says what is wrong and where.

A generating model whose decoder the engine has itself is read straight from the files; every other one becomes a
transformers module.

The compute type follows one rule, without a setting. On CUDA it is the checkpoint's own. On a CPU it is fp32 where
the fp32 weights take at most half of the memory that is left (exact, and half types are slow on most CPUs), else
the checkpoint's own; GPTQ weights compute in bf16, which their kernels want. Only parameters are cast, never buffers:
casting a whole model would round the rotary frequencies, which shifts every later position.
"""

from __future__ import annotations

import importlib
import logging
import os
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
from sixfold_runtime.engine.decoder_shape import decoder_shape
from sixfold_runtime.engine.device import available_memory_bytes
from sixfold_runtime.engine.errors import ModelLoadError
from sixfold_runtime.engine.kernel_check import check_decoder
from sixfold_runtime.engine.lora import ADAPTER_FOLDER, open_store
from sixfold_runtime.engine.quantized_module import module_weight_bytes, plain_state, put_in
from sixfold_runtime.engine.tokenizer import LoadedTokenizer, load_tokenizer, read_json

log = logging.getLogger(__name__)

_ARCHITECTURES = {
    Task.GENERATION: ("ForCausalLM", "LMHeadModel"),
    Task.CLASSIFICATION: ("ForSequenceClassification",),
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
    """The engine's own, where it has one for the model."""
    module: Any = None
    """Else the transformers module, in eval mode, on `device`."""
    eos_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    """`stop_strings` of generation_config.json."""
    labels: tuple[str, ...] = ()
    """Of a classifier, by class index."""


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
    settings = _configuration(folder)
    shape = decoder_shape(settings, config.get("architectures") or []) if served.task == Task.GENERATION else None
    decoder, module = None, None
    if shape is not None and own_quantization(quantization):
        decoder = Decoder(shape, settings, store, quantization, dtype, device)
        if quantization is not None:
            check_decoder(decoder, store)
        vocabulary, weight_bytes = len(decoder.embeddings), decoder.weight_bytes
    else:
        if (folder / ADAPTER_FOLDER).is_dir():
            raise ModelLoadError(f"{folder}: adapters are served on Llama, Qwen2 and Qwen3 decoders only")
        own = quantization if own_quantization(quantization) else None
        module = _load_module(folder, served.task, dtype, store if own else None).to(device)
        if own is not None:
            put_in(module, store, own, dtype, device)
        settings = module.config
        vocabulary = module.get_input_embeddings().weight.shape[0]
        weight_bytes = module_weight_bytes(module)
    if tokenizer.max_token_id >= vocabulary:
        raise ModelLoadError(
            f"{folder}: the tokenizer has ids up to {tokenizer.max_token_id}, but the model only {vocabulary} "
            "embeddings: tokenizer.json belongs to another model"
        )
    generation = read_json(folder / "generation_config.json")
    model = LoadedModel(
        served=served,
        tokenizer=tokenizer,
        context_tokens=_context_tokens(settings, module, served.task, tokenizer, folder),
        vocabulary_tokens=vocabulary,
        device=device,
        dtype=dtype,
        weight_bytes=weight_bytes,
        load_seconds=time.monotonic() - started,
        decoder=decoder,
        module=module,
        eos_ids=_ids(config.get("eos_token_id") if (eos := generation.get("eos_token_id")) is None else eos),
        stop_strings=_strings(generation.get("stop_strings")),
        labels=_labels(settings, folder) if served.task == Task.CLASSIFICATION else (),
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
    if not any(name.endswith(_ARCHITECTURES[task]) for name in architectures):
        raise ModelLoadError(
            f"{folder}: task {task} needs a model such as Llama{_ARCHITECTURES[task][0]}, but config.json says "
            f"architectures: {', '.join(architectures) or 'none'}"
        )


def compute_dtype(
    weights: Weights, device: torch.device, available_bytes: int, quantization: dict[str, Any] | None = None
) -> torch.dtype:
    """The rule of this module's docstring."""
    if device.type == "cpu" and (quantization or {}).get("quant_method") == "gptq":
        return torch.bfloat16
    if device.type == "cpu" and weights.fp32_bytes <= available_bytes // 2:
        return torch.float32
    return weights.dtype


def own_quantization(quantization: dict[str, Any] | None) -> bool:
    """Whether the engine's own linears can read the weights; transformers may know others."""
    return quantization is None or quantization.get("quant_method") in ("gptq", "sixfold-int8")


def _transformers() -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Imported here: it takes seconds, in which the server already answers /healthz. Its types are partial.
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _configuration(folder: Path) -> Any:
    """transformers' configuration, with its defaults filled in."""
    try:
        return _transformers().AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # foreign code on foreign input: it raises anything
        raise ModelLoadError(f"{folder}: transformers can't load it: {_first_line(error)}") from error


def _load_module(folder: Path, task: Task, dtype: torch.dtype, quantised: TensorStore | None) -> Any:
    """With `quantised`, its full-precision tensors only: the others are put in afterwards."""
    transformers = _transformers()
    auto = (
        transformers.AutoModelForCausalLM
        if task == Task.GENERATION
        else transformers.AutoModelForSequenceClassification
    )
    source: Path | None = folder
    given: dict[str, Any] = {}
    if quantised is not None:
        config = _configuration(folder)
        del config.quantization_config  # transformers' own quantisers are not asked
        auto = auto._model_mapping[type(config)]
        source, given = None, {"config": config, "state_dict": plain_state(quantised, dtype)}
    try:
        module, info = auto.from_pretrained(
            source,
            **given,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            attn_implementation="sdpa",
            output_loading_info=True,
        )
    except Exception as error:  # foreign code on foreign input: it raises anything
        raise ModelLoadError(f"{folder}: transformers can't load it: {_first_line(error)}") from error
    problems = [
        f"{len(info[kind])} {kind.replace('_', ' ')}" for kind in ("missing_keys", "mismatched_keys") if info[kind]
    ]
    if problems:
        names = sorted(str(key) for kind in ("missing_keys", "mismatched_keys") for key in info[kind])
        raise ModelLoadError(
            f"{folder}: the weights don't fill the model ({', '.join(problems)}, such as {names[0]}): "
            "they belong to another model or are incomplete"
        )
    return module.eval().requires_grad_(False)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _context_tokens(settings: Any, module: Any, task: Task, tokenizer: LoadedTokenizer, folder: Path) -> int:
    config = settings.get_text_config()
    limits = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions")]
    context = next((int(limit) for limit in limits if limit), None)
    if task == Task.CLASSIFICATION and context is not None:
        context -= _position_offset(module)
    if tokenizer.model_max_tokens is not None and (context is None or task == Task.CLASSIFICATION):
        context = min(context or tokenizer.model_max_tokens, tokenizer.model_max_tokens)
    if context is None:
        raise ModelLoadError(f"{folder / 'config.json'} has no max_position_embeddings: the context length is unknown")
    return context


def _position_offset(module: Any) -> int:
    """RoBERTa and its kin count positions from padding_idx + 1, so that many embeddings are no positions."""
    for name, child in module.named_modules():
        if name.endswith("position_embeddings") and getattr(child, "padding_idx", None) is not None:
            return int(child.padding_idx) + 1
    return 0


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
