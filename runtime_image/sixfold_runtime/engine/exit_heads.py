"""A classifier's exit heads: the file `exits.safetensors` in the model's folder, and what heads say about features.

    exits.<depth>.weight [labels, 2 * width], exits.<depth>.bias [labels]   float32, over Trunk.features after `depth`
                                                                            layers; raw logits
    temperatures [depths]                  float32: scores are softmax(logits / temperature), arXiv 1706.04599
    sharpness [depths]                     float32, modes.early_exit.Calibration's; absent: 1 each
    calibration.confidences [n, depths]    float32, largest score
    calibration.agrees [n, depths]         uint8, whether its label is the full model's
    calibration.lengths [n]                int32, tokens

Metadata: `format`, `trunk` (fingerprint of the weights that the heads were made for), `max_disagreement`,
`length_relaxation`, `labels` and `depths` (JSON lists). Thresholds are not in it: they are chosen where they are used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sixfold_runtime.engine.errors import ModelLoadError
from sixfold_runtime.engine.slice_file import order_header
from sixfold_runtime.engine.trunk import Trunk
from sixfold_runtime.modes.early_exit import Calibration

EXITS_FILE = "exits.safetensors"
FORMAT = "sixfold-exits/1"


@dataclass(frozen=True, eq=False)
class ExitHeads:
    """Heads on the trunk's device.

    Attributes:
        labels: by index.
        weights: by depth, [labels, 2 * width] float32.
        biases: by depth, [labels] float32.
        temperatures: by depth, what logits are divided by.
        calibration: what the heads said about calibration text, from which thresholds are chosen.
    """

    labels: tuple[str, ...]
    weights: Mapping[int, torch.Tensor]
    biases: Mapping[int, torch.Tensor]
    temperatures: Mapping[int, float]
    calibration: Calibration

    @property
    def depths(self) -> tuple[int, ...]:
        """Layers behind which a head stands, from 1, ascending."""
        return self.calibration.depths

    def scores(self, depth: int, features: torch.Tensor) -> torch.Tensor:
        """float32 [texts, labels], probabilities: `features` are `Trunk.features` after `depth` layers."""
        logits = torch.addmm(self.biases[depth], features, self.weights[depth].T)
        return torch.softmax(logits / self.temperatures[depth], dim=-1)


def load_exit_heads(folder: Path, trunk: Trunk, fingerprint: str, labels: Sequence[str]) -> ExitHeads | None:
    """The exit heads in a model folder; None where it has none.

    Args:
        fingerprint: of the folder's weights.
        labels: of the model's own head, by index.

    Raises:
        ModelLoadError: the file is damaged or cut off, has NaN or infinite values, or was made for other weights,
            labels or layers than these.
    """
    path = folder / EXITS_FILE
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            tensors: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is damaged ({error}): prepare the exit heads anew") from error
    try:
        return _read(metadata, tensors, trunk, fingerprint, tuple(labels))
    except (ValueError, KeyError, TypeError) as error:
        problem = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise ModelLoadError(f"{path}: {problem}: prepare the exit heads anew") from error


def _read(
    metadata: Mapping[str, str],
    tensors: Mapping[str, torch.Tensor],
    trunk: Trunk,
    fingerprint: str,
    labels: tuple[str, ...],
) -> ExitHeads:
    """Raises ValueError, KeyError and TypeError with what is wrong."""
    if metadata.get("format") != FORMAT:
        raise ValueError(f"its format is {metadata.get('format')!r} and not {FORMAT!r}")
    if metadata["trunk"] != fingerprint:
        raise ValueError("it was made for other weights than those beside it")
    if (own := tuple(json.loads(metadata["labels"]))) != labels:
        raise ValueError(f"its labels are {', '.join(own)}, and the model's {', '.join(labels)}")
    depths = tuple(json.loads(metadata["depths"]))
    if list(depths) != sorted(set(depths)) or not all(type(d) is int and 1 <= d < trunk.layers for d in depths):
        raise ValueError(f"its depths {list(depths)} don't ascend from 1 to {trunk.layers - 1}, the last but one layer")
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{name} holds NaN or infinite values")
    head_shape = (len(labels), 2 * trunk.width)
    weights = {d: _shaped(tensors, f"exits.{d}.weight", head_shape).float().to(trunk.device) for d in depths}
    biases = {d: _shaped(tensors, f"exits.{d}.bias", head_shape[:1]).float().to(trunk.device) for d in depths}
    temperatures = _shaped(tensors, "temperatures", (len(depths),)).tolist()
    if not all(temperature > 0 for temperature in temperatures):
        raise ValueError("its temperatures must be above 0")
    return ExitHeads(
        labels,
        weights,
        biases,
        dict(zip(depths, temperatures, strict=True)),
        _calibration(metadata, tensors, depths, trunk),
    )


def _calibration(
    metadata: Mapping[str, str], tensors: Mapping[str, torch.Tensor], depths: tuple[int, ...], trunk: Trunk
) -> Calibration:
    lengths = tensors["calibration.lengths"]
    shape = (len(lengths), len(depths))
    sharpness = tuple(_shaped(tensors, "sharpness", shape[1:]).tolist()) if "sharpness" in tensors else ()
    if not len(lengths) or int(lengths.min()) < 1 or not all(value > 0 for value in sharpness):
        raise ValueError("its calibration is no such")
    return Calibration(
        depths=depths,
        layers=trunk.layers,
        confidences=_shaped(tensors, "calibration.confidences", shape).numpy().astype(np.float64),
        agrees=_shaped(tensors, "calibration.agrees", shape).numpy().astype(bool),
        lengths=lengths.numpy().astype(np.int64),
        max_disagreement=_share(metadata, "max_disagreement"),
        length_relaxation=_share(metadata, "length_relaxation"),
        sharpness=sharpness,
    )


def _shaped(tensors: Mapping[str, torch.Tensor], name: str, shape: tuple[int, ...]) -> torch.Tensor:
    tensor = tensors[name]
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has the shape {list(tensor.shape)} and not {list(shape)}")
    return tensor


def _share(metadata: Mapping[str, str], name: str) -> float:
    value = float(metadata[name])
    if not (math.isfinite(value) and 0 <= value <= 1):
        raise ValueError(f"{name} is {metadata[name]} and not between 0 and 1")
    return value


def write_exit_heads(folder: Path, heads: ExitHeads, fingerprint: str) -> None:
    """Write the file into a model folder; who reads it meanwhile sees the old one or none."""
    calibration = heads.calibration
    tensors: dict[str, Any] = {
        "temperatures": torch.tensor([heads.temperatures[depth] for depth in heads.depths]),
        "calibration.confidences": torch.from_numpy(calibration.confidences.astype(np.float32)),
        "calibration.agrees": torch.from_numpy(calibration.agrees.astype(np.uint8)),
        "calibration.lengths": torch.from_numpy(calibration.lengths.astype(np.int32)),
    }
    if calibration.sharpness:
        tensors["sharpness"] = torch.tensor(calibration.sharpness)
    for depth in heads.depths:
        tensors[f"exits.{depth}.weight"] = heads.weights[depth].float().cpu().contiguous()
        tensors[f"exits.{depth}.bias"] = heads.biases[depth].float().cpu().contiguous()
    metadata = {
        "format": FORMAT,
        "trunk": fingerprint,
        "max_disagreement": str(calibration.max_disagreement),
        "length_relaxation": str(calibration.length_relaxation),
        "labels": json.dumps(heads.labels, ensure_ascii=False),
        "depths": json.dumps(heads.depths),
    }
    path = folder / EXITS_FILE
    partial = path.with_name(f".{path.name}.partial")
    try:
        save_file(tensors, partial, metadata)
        order_header(partial)
        partial.chmod(0o644)  # safetensors lets nobody else read it
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
