"""The weight files of a model folder: safetensors only, mapped into memory, by tensor name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from sixfold_runtime.engine.errors import ModelLoadError
from sixfold_runtime.engine.tokenizer import read_json

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ITEM_BYTES = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}
"""All others have one byte."""


@dataclass(frozen=True)
class Weights:
    """What the headers of the weight files say."""

    parameters: int
    """Floating-point ones."""
    dtype: torch.dtype
    """The type of most of them."""
    packed_bytes: int = 0
    """Of all else: quantised weights."""

    @property
    def fp32_bytes(self) -> int:
        """With every floating-point parameter in fp32."""
        return self.parameters * 4 + self.packed_bytes


class TensorStore:
    """Tensors of a folder by name. Nothing is read before it is asked for, and nothing is copied then.

    Attributes:
        names: of all tensors, over all shards.
        weights: what the headers say.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ModelLoadError: no safetensors file, a shard is missing, or a file is damaged."""
        self.folder = folder
        self._files: dict[str, Any] = {}
        for path in _weight_files(folder):
            try:
                file: Any = safe_open(path, framework="pt")
                self._files.update(dict.fromkeys(file.keys(), file))
            except (SafetensorError, OSError) as error:
                raise ModelLoadError(f"{path} is damaged ({error}): fetch it again") from error
        if not self._files:
            raise ModelLoadError(f"{folder}: the weight files hold no tensors")
        self.names = frozenset(self._files)
        self.weights = self._summary()

    def has(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        """From the header. Raises KeyError for an unknown name."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def get(self, name: str) -> torch.Tensor:
        """The tensor as it is stored, over the mapped file: copy or convert it, never write to it.

        Raises:
            KeyError: there is no such tensor.
        """
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor

    def _summary(self) -> Weights:
        elements: dict[str, int] = {}
        for name, file in self._files.items():
            view = file.get_slice(name)
            elements[view.get_dtype()] = elements.get(view.get_dtype(), 0) + math.prod(view.get_shape())
        floats = {kind: count for kind, count in elements.items() if kind in _FLOATS}
        return Weights(
            parameters=sum(floats.values()),
            dtype=_FLOATS[max(floats, key=floats.__getitem__)] if floats else torch.float32,
            packed_bytes=sum(
                count * _ITEM_BYTES.get(kind, 1) for kind, count in elements.items() if kind not in _FLOATS
            ),
        )


def require_tensors(store: TensorStore, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ModelLoadError where the weight files don't fill the model. GPTQ modules check themselves."""
    missing, mismatched = [], []
    for name, size in expected.items():
        if store.has(f"{name.removesuffix('.weight').removesuffix('.bias')}.qweight"):
            continue
        if not store.has(name):
            missing.append(name)
        elif store.shape(name) != size:
            mismatched.append(name)
    if missing or mismatched:
        kinds = (("missing", missing), ("mismatched", mismatched))
        problems = ", ".join(f"{len(names)} {kind} keys" for kind, names in kinds if names)
        raise ModelLoadError(
            f"{store.folder}: the weights don't fill the model ({problems}, such as {min(missing + mismatched)}): "
            "they belong to another model or are incomplete"
        )


def quantization_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """`quantization_config` of a config.json, None where the weights are plain."""
    quantization = config.get("quantization_config")
    return quantization if isinstance(quantization, dict) else None


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = read_json(index).get("weight_map")
        names = sorted(set(map(str, shards.values()))) if isinstance(shards, dict) else []
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise ModelLoadError(f"{index} lists {name[:100]!r}, which is no safetensors file beside it")
        files = [folder / name for name in names]
        for path in files:
            if not path.is_file():
                raise ModelLoadError(f"{path} is missing, though {index.name} lists it: fetch it again")
        return files
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    pickles = sorted(path.name for kind in ("bin", "pt", "pth", "ckpt") for path in folder.glob(f"*.{kind}"))
    hint = f" ({', '.join(pickles)}: pickled weights are never loaded, convert them)" if pickles else ""
    raise ModelLoadError(f"{single} is missing{hint}")
