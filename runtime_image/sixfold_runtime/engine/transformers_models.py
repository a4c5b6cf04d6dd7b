"""Models that the engine doesn't compute itself, through transformers: local files and safetensors only."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import torch

from sixfold_api.scalars import Task
from sixfold_runtime.engine.checkpoint import TensorStore
from sixfold_runtime.engine.errors import ModelLoadError
from sixfold_runtime.engine.quantized_module import plain_state, put_in

_AUTO_MODELS = {
    Task.GENERATION: "AutoModelForCausalLM",
    Task.CLASSIFICATION: "AutoModelForSequenceClassification",
    Task.TOKEN_CLASSIFICATION: "AutoModelForTokenClassification",
}


def configuration(folder: Path) -> Any:
    """transformers' configuration of a folder, with its defaults filled in. Raises ModelLoadError."""
    try:
        return _transformers().AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # foreign code on foreign input: it raises anything
        raise ModelLoadError(f"{folder}: transformers can't load it: {_first_line(error)}") from error


def load_module(
    store: TensorStore, task: Task, quantization: dict[str, Any] | None, dtype: torch.dtype, device: torch.device
) -> Any:
    """The module of a folder on `device`, in eval mode.

    Args:
        quantization: of weights that the engine's own linears compute with, in the place of the module's.

    Raises:
        ModelLoadError: transformers can't load it, or the weights don't fill the model.
    """
    if quantization is None:
        return _module(store.folder, task, dtype, None).to(device)
    module = _module(store.folder, task, dtype, store).to(device)
    put_in(module, store, quantization, dtype, device)
    return module


def position_offset(module: Any) -> int:
    """RoBERTa and its kin count positions from padding_idx + 1, so that many embeddings are no positions."""
    for name, child in module.named_modules():
        if name.endswith("position_embeddings") and getattr(child, "padding_idx", None) is not None:
            return int(child.padding_idx) + 1
    return 0


def _transformers() -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Imported here: it takes seconds, in which the server already answers /healthz. Its types are partial.
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _module(folder: Path, task: Task, dtype: torch.dtype, quantised: TensorStore | None) -> Any:
    """With `quantised`, its full-precision tensors only: the others are put in afterwards."""
    transformers = _transformers()
    auto = getattr(transformers, _AUTO_MODELS[task])
    source: Path | None = folder
    given: dict[str, Any] = {}
    if quantised is not None:
        config = configuration(folder)
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
