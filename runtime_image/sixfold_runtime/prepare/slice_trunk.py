"""A trunk as slices are made and measured on it: loaded by the engine, computed by the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch

from sixfold_api.runtime_config import ServedModel
from sixfold_api.scalars import Task
from sixfold_runtime.engine.checkpoint import TensorStore
from sixfold_runtime.engine.errors import ModelLoadError
from sixfold_runtime.engine.fingerprint import trunk_fingerprint
from sixfold_runtime.engine.forward import make_forward
from sixfold_runtime.engine.loader import LoadedModel, load, task_of
from sixfold_runtime.engine.mlp import Modules
from sixfold_runtime.engine.task_slice import SliceHost, TaskSlice, load_slice
from sixfold_runtime.engine.trunk import Head
from sixfold_runtime.prepare.failures import PreparationError, Reason
from sixfold_runtime.prepare.files import read_config

_BATCH_TOKENS = 2048


class Host(SliceHost, Protocol):
    """A trunk or decoder, with the names of its feed-forward modules."""

    def mlp_modules(self, index: int) -> tuple[Modules, Modules]:
        """Of a layer, as they are computed; those of one tuple can only be replaced together."""


@dataclass(frozen=True)
class SliceTrunk:
    """The weights that slices are for."""

    folder: Path
    task: Task
    """Of its own architecture; its slices may be for another."""
    model: LoadedModel
    host: Host
    fingerprint: str

    def load(self, path: Path) -> TaskSlice:
        """Raises PreparationError(UnusableSlice)."""
        try:
            loaded = load_slice(path, self.host, self.fingerprint, self.model.dtype, self.model.device)
        except ModelLoadError as error:
            raise PreparationError(Reason.UNUSABLE_SLICE, str(error)) from error
        self.require_task(loaded.task)
        return loaded

    def require_task(self, task: Task) -> None:
        """Raises PreparationError(UnusableSlice): a generator can't label, nor a classifier generate."""
        if (task is Task.GENERATION) != (self.task is Task.GENERATION):
            raise PreparationError(
                Reason.UNUSABLE_SLICE,
                f"{self.folder.name} is a model for {self.task}: it can't have a slice for {task}",
            )


def own_task(folder: Path) -> Task:
    """What the architecture in config.json is for; the loader refuses one that is for nothing."""
    return task_of(read_config(folder)) or Task.CLASSIFICATION


def open_model(folder: Path, device: torch.device) -> LoadedModel:
    """A model as the engine computes it. Raises PreparationError(UnusableSlice)."""
    try:
        return load(ServedModel(name=folder.name, task=own_task(folder), path=str(folder)), device)
    except ModelLoadError as error:
        raise PreparationError(Reason.UNUSABLE_SLICE, f"the engine can't load the weights: {error}") from error


def open_trunk(folder: Path, device: torch.device) -> SliceTrunk:
    """Raises PreparationError(UnusableSlice): it can't be loaded, or can't have slices."""
    model = open_model(folder, device)
    task = own_task(folder)
    host = model.decoder if task is Task.GENERATION else model.trunk
    if host is None:
        raise PreparationError(
            Reason.UNUSABLE_SLICE,
            f"{folder.name}: task slices need a BERT, RoBERTa, DistilBERT, Llama, Qwen2 or Qwen3 model that the engine "
            "computes itself, and this is another",
        )
    return SliceTrunk(folder, task, model, host, trunk_fingerprint(TensorStore(folder)))


@torch.inference_mode()
def label_logits(
    model: LoadedModel, texts: Sequence[Sequence[int]], task_slice: TaskSlice | None
) -> Iterator[torch.Tensor]:
    """float32 [labels] of each text, of a token classification [tokens, labels]; without a slice by the own head."""
    trunk = model.trunk
    head = cast(Head, task_slice.head if task_slice else trunk.own_head if trunk else None)
    if trunk is None or head is None:
        raise PreparationError(Reason.UNUSABLE_SLICE, f"{model.served.name} has no head that the engine computes")
    for batch in _batches(texts):
        rows = trunk.embed(batch)
        for index in range(trunk.layers):
            rows = trunk.layer(index, rows, None if task_slice is None else [task_slice] * len(batch))
        logits = head(rows)
        yield from torch.split(logits, list(rows.lengths)) if head.task is Task.TOKEN_CLASSIFICATION else logits


@torch.inference_mode()
def token_logits(
    model: LoadedModel, texts: Sequence[Sequence[int]], task_slice: TaskSlice | None
) -> Iterator[torch.Tensor]:
    """float32 [tokens, vocabulary] of each text, next to come after each token."""
    forward = make_forward(model)
    for text in texts:
        yield forward([text], forward.new_cache(1), every_position=True, slices=[task_slice])[0]


def _batches(texts: Sequence[Sequence[int]]) -> Iterator[list[list[int]]]:
    batch: list[list[int]] = []
    for text in texts:
        if batch and sum(map(len, batch)) + len(text) > _BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(list(text))
    if batch:
        yield batch
