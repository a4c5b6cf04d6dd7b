"""Loads a model folder: safetensors only, local files only, with an error that says what is wrong and where.

The compute type follows one rule, without a setting. On CUDA it is the checkpoint's own. On a CPU it is fp32 where
the fp32 weights take at most half of the memory that is left (exact, and half types are slow on most CPUs), else
the checkpoint's own. Only parameters are cast, never buffers: casting a whole model would round the rotary
frequencies, which shifts every later position.
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
from safetensors import SafetensorError, safe_open

from sixfold_api.runtime_config import ServedModel
from sixfold_api.scalars import Task
from sixfold_runtime.engine.device import available_memory_bytes
from sixfold_runtime.engine.errors import ModelLoadError
from sixfold_runtime.engine.tokenizer import LoadedTokenizer, load_tokenizer, read_json

log = logging.getLogger(__name__)

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ARCHITECTURES = {
    Task.GENERATION: ("ForCausalLM", "LMHeadModel"),
    Task.CLASSIFICATION: ("ForSequenceClassification",),
}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to compute, and what its folder says about it."""

    served: ServedModel
    module: Any
    """The transformers module, in eval mode, on `device`."""
    tokenizer: LoadedTokenizer
    context_tokens: int
    vocabulary_tokens: int
    """Rows of the embedding: token ids are below it."""
    device: torch.device
    dtype: torch.dtype
    weight_bytes: int
    load_seconds: float
    eos_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    """`stop_strings` of generation_config.json."""
    labels: tuple[str, ...] = ()
    """Of a classifier, by class index."""


@dataclass(frozen=True)
class Weights:
    """What the headers of the weight files say."""

    parameters: int
    dtype: torch.dtype
    """The type of most parameters."""


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
    weights = inspect_weights(folder)
    tokenizer = load_tokenizer(folder)
    dtype = compute_dtype(weights, device, available_memory_bytes(device))
    module = _load_module(folder, served.task, dtype).to(device)
    vocabulary = module.get_input_embeddings().weight.shape[0]
    if tokenizer.max_token_id >= vocabulary:
        raise ModelLoadError(
            f"{folder}: the tokenizer has ids up to {tokenizer.max_token_id}, but the model only {vocabulary} "
            "embeddings: tokenizer.json belongs to another model"
        )
    generation = read_json(folder / "generation_config.json")
    model = LoadedModel(
        served=served,
        module=module,
        tokenizer=tokenizer,
        context_tokens=_context_tokens(module, served.task, tokenizer, folder),
        vocabulary_tokens=vocabulary,
        device=device,
        dtype=dtype,
        weight_bytes=sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers())),
        load_seconds=time.monotonic() - started,
        eos_ids=_ids(config.get("eos_token_id") if (eos := generation.get("eos_token_id")) is None else eos),
        stop_strings=_strings(generation.get("stop_strings")),
        labels=_labels(module.config, folder) if served.task == Task.CLASSIFICATION else (),
    )
    log.info(
        "model %s loaded in %.1f s: %.1f M parameters, %s on %s, context of %d tokens",
        served.name, model.load_seconds, weights.parameters / 1e6, dtype, device, model.context_tokens,
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


def inspect_weights(folder: Path) -> Weights:
    """Count parameters by type from the headers of the weight files; no weight is read.

    Raises:
        ModelLoadError: no safetensors file, a shard is missing, or a file is damaged.
    """
    elements: dict[str, int] = {}
    for path in _weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                    view = file.get_slice(name)
                    size = 1
                    for length in view.get_shape():
                        size *= length
                    elements[view.get_dtype()] = elements.get(view.get_dtype(), 0) + size
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{path} is damaged ({error}): fetch it again") from error
    if not elements:
        raise ModelLoadError(f"{folder}: the weight files hold no tensors")
    return Weights(sum(elements.values()), _DTYPES.get(max(elements, key=lambda kind: elements[kind]), torch.float32))


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted({folder / name for name in read_json(index).get("weight_map", {}).values()})
        for path in files:
            if not path.is_file():
                raise ModelLoadError(f"{path} is missing, though {index.name} lists it: fetch it again")
        return files
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    pickles = sorted(path.name for path in folder.glob("*.bin"))
    hint = f" ({', '.join(pickles)}: pickled weights are never loaded, convert them)" if pickles else ""
    raise ModelLoadError(f"{single} is missing{hint}")


def compute_dtype(weights: Weights, device: torch.device, available_bytes: int) -> torch.dtype:
    """The rule of this module's docstring."""
    fp32_bytes = weights.parameters * 4
    if device.type == "cpu" and fp32_bytes <= available_bytes // 2:
        return torch.float32
    return weights.dtype


def _load_module(folder: Path, task: Task, dtype: torch.dtype) -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Imported here: it takes seconds, in which the server already answers /healthz. Its types are partial.
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    auto = (
        transformers.AutoModelForCausalLM
        if task == Task.GENERATION
        else transformers.AutoModelForSequenceClassification
    )
    try:
        module, info = auto.from_pretrained(
            folder,
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


def _context_tokens(module: Any, task: Task, tokenizer: LoadedTokenizer, folder: Path) -> int:
    config = module.config.get_text_config()
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
