"""Does a checkpoint fill the model that config.json describes? transformers' own loader is asked, without memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.utils import logging as transformers_logging

from sixfold_api.scalars import Task
from sixfold_runtime.prepare.failures import PreparationError, Reason
from sixfold_runtime.prepare.files import CONFIG
from sixfold_runtime.prepare.weights import TensorEntry

_AUTO_MODELS: dict[Task, Any] = {
    Task.GENERATION: transformers.AutoModelForCausalLM,
    Task.CLASSIFICATION: transformers.AutoModelForSequenceClassification,
    Task.TOKEN_CLASSIFICATION: transformers.AutoModelForTokenClassification,
}
_MEANING = {
    Task.GENERATION: "a causal language model (…ForCausalLM)",
    Task.CLASSIFICATION: "a sequence classifier (…ForSequenceClassification)",
    Task.TOKEN_CLASSIFICATION: "a token classifier (…ForTokenClassification)",
}


def load_config(folder: Path, architecture: str, task: Task, *, bare: bool = False) -> Any:
    """The transformers configuration of a folder whose config.json names `architecture`. No code of it runs.

    Args:
        bare: a trunk without a head (such as BertModel) will do for labels: task slices bring heads.

    Raises PreparationError: InvalidConfig, or WrongArchitecture if the architecture doesn't fit the task.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise PreparationError(Reason.INVALID_CONFIG, f"{CONFIG} can't be used: {error}") from error
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # the comparison is with the full weights; a quantiser's library isn't asked
    expected = _architectures(_AUTO_MODELS[task], config)
    if bare and task is not Task.GENERATION:
        expected += _architectures(transformers.AutoModel, config)
    if architecture not in expected:
        raise PreparationError(
            Reason.WRONG_ARCHITECTURE,
            f"{CONFIG} describes {architecture}; the task {task} needs {_MEANING[task]}"
            + (f", here {' or '.join(expected)}" if expected else ""),
        )
    return config


def _architectures(auto: Any, config: Any) -> list[str]:
    """Names of the classes that a model type has for one of transformers' purposes."""
    classes = auto._model_mapping.get(type(config), ())
    return [cls.__name__ for cls in (classes if isinstance(classes, tuple | list) else (classes,))]


def instantiate(config: Any, tensors: Mapping[str, TensorEntry], task: Task) -> tuple[Any, list[str]]:
    """The model with fake tensors in place of the checkpoint's, and the names of tensors that it doesn't use.

    transformers renames and merges tensors while it loads; asking its loader is the only comparison that stays true.

    Raises PreparationError: MissingWeights, WrongArchitecture, LabelMismatch, InvalidConfig.
    """
    layers = getattr(config, "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > len(tensors):
        raise PreparationError(
            Reason.MISSING_WEIGHTS, f"{CONFIG} describes {layers} layers and the files hold {len(tensors)} tensors"
        )
    model_class = getattr(transformers, config.architectures[0])
    with _quiet_single_thread(), FakeTensorMode(allow_non_fake_inputs=True):
        state = {
            name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype.name)) for name, entry in tensors.items()
        }
        try:
            model, info = model_class.from_pretrained(
                None, config=config, state_dict=state, output_loading_info=True, ignore_mismatched_sizes=True
            )
        except Exception as error:
            raise PreparationError(
                Reason.INVALID_CONFIG, f"no {config.architectures[0]} can be built from {CONFIG}: {error}"
            ) from error
    _require_all(config, task, info)
    return model, sorted(info["unexpected_keys"])


def _require_all(config: Any, task: Task, info: Mapping[str, Any]) -> None:
    architecture = config.architectures[0]
    for name, found, expected in sorted(info["mismatched_keys"]):
        found, expected = list(found), list(expected)
        if task is not Task.GENERATION and expected[0] == config.num_labels and found[1:] == expected[1:]:
            raise PreparationError(
                Reason.LABEL_MISMATCH,
                f"{CONFIG} has {config.num_labels} labels and the head {name} answers {found[0]}: correct id2label",
            )
        raise PreparationError(
            Reason.WRONG_ARCHITECTURE,
            f"{name} has shape {found}, and {architecture} with this {CONFIG} needs {expected}",
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise PreparationError(
            Reason.MISSING_WEIGHTS,
            f"{architecture} needs {missing[0]}, which no file holds ({len(missing)} tensors are missing)",
        )


@contextmanager
def _quiet_single_thread() -> Iterator[None]:
    """Fake tensors don't survive the loader's threads, and its progress bar would say nothing true."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    verbosity = transformers_logging.get_verbosity()
    os.environ[name] = "1"
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before
        transformers_logging.set_verbosity(verbosity)
        transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
