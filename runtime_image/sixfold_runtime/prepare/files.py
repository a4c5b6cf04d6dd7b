"""Which files of a repository or folder make a model. Weights are safetensors and nothing else: a pickle runs code."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sixfold_api.scalars import OUR_NAME_PATTERN
from sixfold_runtime.prepare.failures import PreparationError, Reason
from sixfold_runtime.prepare.sources import require_inside

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
REPORT = "prepare-report.json"
ADAPTER = "adapter"
"""Folder of a LoRA adapter that stays beside quantised weights."""
EXITS = "exits.safetensors"
"""Exit heads of the model beside them."""
SLICES = "slices"
"""Folder of task slices."""

_SHARD = re.compile(r"model-[0-9]{5}-of-[0-9]{5}\.safetensors")
_SLICE = re.compile(rf"{SLICES}/{OUR_NAME_PATTERN.strip('^$')}\.safetensors")
_BESIDE_WEIGHTS = frozenset(
    {
        CONFIG,
        TOKENIZER,
        TOKENIZER_CONFIG,
        GENERATION_CONFIG,
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "vocab.json",
        "merges.txt",
        "vocab.txt",
    }
)
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "sixfold_lora.json")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack")
_MAX_JSON_BYTES = 256 * 2**20


def model_files(names: Iterable[str]) -> list[str]:
    """Of file names relative to the model's folder, those that the engine reads, sorted.

    Raises PreparationError: UnsafeFormat if the weights are there as pickles only, MissingWeights if there are none.
    """
    present = set(names)
    if WEIGHTS in present:
        weights = {WEIGHTS}
    else:
        weights = {name for name in present if _SHARD.fullmatch(name)}
        if WEIGHTS_INDEX in present:
            weights.add(WEIGHTS_INDEX)
        elif weights:
            raise PreparationError(
                Reason.MISSING_WEIGHTS,
                f"the weights are split into {len(weights)} files, and {WEIGHTS_INDEX} is missing: add it",
            )
    if not weights:
        _raise_without_weights(present)
    return sorted(weights | (present & _BESIDE_WEIGHTS) | {name for name in present if is_made(name)})


def is_made(name: str) -> bool:
    """Whether a file, by its name relative to the model's folder, holds exit heads or a task slice: they compute with
    the weights beside them alone."""
    return name == EXITS or _SLICE.fullmatch(name) is not None


def _raise_without_weights(present: set[str]) -> None:
    pickles = sorted(name for name in present if name.endswith(_PICKLES))
    if pickles:
        raise PreparationError(
            Reason.UNSAFE_FORMAT,
            f"the weights are there as {pickles[0]} only, and loading a pickle can run code: convert them to "
            f"{WEIGHTS} (safetensors) and publish that",
        )
    raise PreparationError(Reason.MISSING_WEIGHTS, f"there is neither {WEIGHTS} nor {WEIGHTS_INDEX}")


def files_in(folder: Path, root: Path) -> list[str]:
    """The model's files in a folder of a claim that is mounted at `root`; links may not lead out of it.

    Raises PreparationError as `model_files` does, and UnsafePath.
    """
    found = [*folder.iterdir(), *(folder / SLICES).glob("*")]
    names = model_files(path.relative_to(folder).as_posix() for path in found if path.is_file())
    for name in names:
        require_inside(folder / name, root)
    return names


def adapter_files(folder: Path, root: Path) -> list[str]:
    """The files of the adapter that lies in a model's folder, relative to that; none where there is no adapter."""
    names = [f"{ADAPTER}/{name}" for name in _ADAPTER_FILES if (folder / ADAPTER / name).is_file()]
    for name in names:
        require_inside(folder / name, root)
    return names


def read_json(path: Path, reason: Reason = Reason.INVALID_CONFIG) -> dict[str, Any]:
    """The object in a JSON file. Raises PreparationError(`reason`) if the file is missing or holds something else."""
    if not path.is_file():
        raise PreparationError(reason, f"{path.name} is missing")
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise PreparationError(reason, f"{path.name} is larger than {_MAX_JSON_BYTES} bytes")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise PreparationError(reason, f"{path.name} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise PreparationError(reason, f"{path.name} must hold a JSON object, not {type(content).__name__}")
    return content


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as it stands, with an architecture at its head.

    Raises PreparationError: InvalidConfig.
    """
    content = read_json(folder / CONFIG)
    architectures = content.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise PreparationError(Reason.INVALID_CONFIG, f"{CONFIG} names no architecture: add `architectures`")
    return content


def weight_files(folder: Path, names: Iterable[str]) -> dict[str, set[str] | None]:
    """Weight file -> the tensors that the index promises in it (None for a single file).

    Raises PreparationError: CorruptWeights for an index that is no index, MissingWeights for a file that is not there.
    """
    present = set(names)
    if WEIGHTS in present:
        return {WEIGHTS: None}
    index = read_json(folder / WEIGHTS_INDEX, Reason.CORRUPT_WEIGHTS).get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(file, str) for file in index.values()):
        raise PreparationError(
            Reason.CORRUPT_WEIGHTS, f"{WEIGHTS_INDEX} needs a weight_map of tensor names to file names"
        )
    promised: dict[str, set[str] | None] = {}
    for tensor, file in index.items():
        tensors = promised.setdefault(file, set())
        if tensors is not None:
            tensors.add(tensor)
    missing = sorted(set(promised) - present)
    if missing:
        raise PreparationError(
            Reason.MISSING_WEIGHTS,
            f"{WEIGHTS_INDEX} names {missing[0]}, which is missing ({len(missing)} of {len(promised)} files are)",
        )
    return dict(sorted(promised.items()))
