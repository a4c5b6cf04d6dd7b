"""A task slice as a file: `slices/<task>.safetensors` in the folder of its trunk.

    <module>.weight, <module>.bias            in place of the trunk's; names are the trunk checkpoint's own
    <module>.delta_a [r, in], .delta_b [out, r]   beside the trunk's: y = W x + B A x
    adapters.<layer>.{down,up}.{weight,bias}  a bottleneck behind the feed-forward part, layers from 0
    head.weight, head.bias                    a trained head over features; or a checkpoint's head, by its own names

Metadata: `format`, `task` (of the API: Classification, ...), `labels` (a JSON list), `trunk` (its fingerprint).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sixfold_api.scalars import Task
from sixfold_runtime.engine.errors import ModelLoadError

SLICES_FOLDER = "slices"
"""In a model folder."""
SUFFIX = ".safetensors"
FORMAT = "sixfold-slice/1"
HEAD_WEIGHT, HEAD_BIAS = "head.weight", "head.bias"
"""Of a trained head."""
_PREFIX_BYTES = 8
"""Of a safetensors file: the length of its header."""
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Of the types that a slice may hold."""


@dataclass(frozen=True)
class SliceInfo:
    """What a slice's header says."""

    name: str
    """Of the file: the task as X-Task names it."""
    task: Task
    labels: tuple[str, ...]
    """By index; none of a generator's."""
    size_bytes: int
    """Of its tensors as they are stored."""
    trunk: str
    """Fingerprint of the weights that it was made for."""


def slice_path(folder: Path, name: str) -> Path:
    """Where the slice of a task lies in a model folder."""
    return folder / SLICES_FOLDER / f"{name}{SUFFIX}"


def adapter_names(layer: int) -> tuple[str, str, str, str]:
    """Tensors of a layer's adapter: down's weight [bottleneck, width] and bias, up's weight [width, bottleneck] and
    bias."""
    down_weight, down_bias, up_weight, up_bias = (
        f"adapters.{layer}.{side}.{part}" for side in ("down", "up") for part in ("weight", "bias")
    )
    return down_weight, down_bias, up_weight, up_bias


def slice_info(path: Path) -> SliceInfo:
    """Read the header and nothing else.

    Raises:
        ModelLoadError: the file is missing, damaged, cut off, or no slice.
    """
    with _opened(path) as file:
        return _info(path, file)


class SliceTensors:
    """The tensors of a slice's file, mapped: nothing is copied, and the last view that goes unmaps the file.

    Attributes:
        names: of all.
        unread: those that nobody asked for yet.
    """

    def __init__(self, path: Path) -> None:
        """Maps the file and reads all of it, so that who computes with it later waits for no page.

        Raises:
            ModelLoadError: as `slice_info`, and for values that are NaN or infinite; with the tensor's name.
        """
        with _opened(path) as file:
            self.info = _info(path, file)
            self._tensors: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in sorted(file.keys())}
        for name, tensor in self._tensors.items():
            if not _is_finite(tensor):
                raise ModelLoadError(f"{path}: {name} holds NaN or infinite values: make the slice anew")
        self.names = frozenset(self._tensors)
        self.unread = set(self.names)

    def get(self, name: str) -> torch.Tensor:
        self.unread.discard(name)
        return self._tensors[name]

    def digest(self) -> str:
        """SHA-256 (hex) of all tensors, by name: of what was mapped, whatever lies in the folder meanwhile."""
        digest = hashlib.sha256()
        for name, tensor in self._tensors.items():
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def elements(self) -> int:
        return sum(tensor.numel() for tensor in self._tensors.values())


def write_slice(
    path: Path, tensors: Mapping[str, torch.Tensor], task: Task, labels: Sequence[str], fingerprint: str
) -> None:
    """Write a slice's file; who reads it meanwhile sees the old one or none."""
    metadata = {"format": FORMAT, "task": task.value, "labels": json.dumps(list(labels)), "trunk": fingerprint}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, partial, metadata)
        order_header(partial)
        partial.chmod(0o644)  # safetensors lets nobody else read it
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


def order_header(path: Path) -> None:
    """safetensors writes the metadata in another order each time: the same content shall be the same bytes."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(_PREFIX_BYTES), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        ordered = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        file.seek(_PREFIX_BYTES)
        file.write(ordered.ljust(size))


def _opened(path: Path) -> Any:
    if not path.is_file():
        raise ModelLoadError(f"{path} is missing: write it there with `sixfold prepare slice`")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is damaged ({error}): make the slice anew, or copy it again") from error


def _info(path: Path, file: Any) -> SliceInfo:
    metadata = file.metadata() or {}
    if metadata.get("format") != FORMAT:
        raise ModelLoadError(
            f"{path} is no task slice (format {metadata.get('format')!r}, expected {FORMAT!r}): make it with "
            "`sixfold prepare slice`"
        )
    try:
        task, labels = Task(metadata["task"]), json.loads(metadata["labels"])
        trunk = metadata["trunk"]
    except (KeyError, ValueError) as error:
        raise ModelLoadError(f"{path} says not what it is for ({error}): make the slice anew") from error
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise ModelLoadError(f"{path}: labels must be a list of strings: make the slice anew")
    if (task is Task.GENERATION) == bool(labels):
        raise ModelLoadError(f"{path}: {len(labels)} labels don't fit the task {task}: make the slice anew")
    size = 0
    for name in file.keys():  # noqa: SIM118, it is no dict
        entry = file.get_slice(name)
        if (kind := entry.get_dtype()) not in _ITEM_BYTES:
            raise ModelLoadError(f"{path}: {name} is of type {kind}, expected floating-point: make the slice anew")
        size += math.prod(entry.get_shape()) * _ITEM_BYTES[kind]
    return SliceInfo(path.name.removesuffix(SUFFIX), task, tuple(labels), size, trunk)


def _is_finite(tensor: torch.Tensor) -> bool:
    """Touches every page, in one pass: a sum of finite values is finite unless it overflows."""
    total = tensor.sum(dtype=torch.float64 if tensor.dtype == torch.float64 else torch.float32)
    return bool(total.isfinite()) or bool(tensor.isfinite().all())
