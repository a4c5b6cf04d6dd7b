"""A task slice in memory: what one task has of its own, ready to compute over a trunk's layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional

from sixfold_api.scalars import Task
from sixfold_runtime.engine.errors import ModelLoadError
from sixfold_runtime.engine.mlp import Adapter, Mlp, Tensors, read_tensor
from sixfold_runtime.engine.slice_file import SliceInfo, SliceTensors, adapter_names, slice_info

if TYPE_CHECKING:
    from sixfold_runtime.engine.trunk import Head

__all__ = ["Bottleneck", "LayerSlice", "SliceHost", "SliceInfo", "TaskSlice", "check_trunk", "load_slice", "slice_info"]


class SliceHost(Protocol):
    """What slices are loaded for: a classifier's Trunk, or a generator's Decoder."""

    @property
    def layers(self) -> int:
        """How many."""

    @property
    def width(self) -> int:
        """Of hidden states."""

    def mlp(self, tensors: Tensors, index: int) -> Mlp | None:
        """A layer's feed-forward part with the slice's tensors, None if it has none for the layer."""

    def head(self, tensors: Tensors, task: Task, labels: Sequence[str]) -> Head:
        """The slice's head. Not asked for slices that generate."""


@dataclass(frozen=True)
class LayerSlice:
    """What a task has of its own in one layer; at least one of the two."""

    mlp: Mlp | None
    """In place of the trunk's."""
    adapter: Adapter | None
    """Behind the feed-forward part (the task's or the trunk's), before its residual."""


@dataclass(frozen=True, eq=False)
class TaskSlice:
    """Compared and hashed by identity, so that texts can be grouped by it.

    Attributes:
        layers: by index from 0; layers that are the trunk's are not there.
        head: None where the trunk's own is used, in generation.
        size_bytes: resident, over the mapped file or copied.
        digest: of its tensors; "" of slices that don't generate, whose results nobody keeps.
    """

    name: str
    task: Task
    labels: tuple[str, ...]
    layers: Mapping[int, LayerSlice]
    head: Head | None
    size_bytes: int
    digest: str = ""


class Bottleneck(Adapter):
    """A(z) = z + up(gelu(down(z))) (Houlsby et al., arXiv 1902.00751), in the trunk's compute type."""

    def __init__(
        self, down_weight: torch.Tensor, down_bias: torch.Tensor, up_weight: torch.Tensor, up_bias: torch.Tensor
    ) -> None:
        """Weights [bottleneck, width] and [width, bottleneck], with their biases."""
        self._down, self._up = (down_weight, down_bias), (up_weight.t(), up_bias)

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self._down, *self._up))

    def __call__(self, z: torch.Tensor) -> torch.Tensor:
        inner = functional.gelu(functional.linear(z, *self._down))
        weight, bias = self._up
        return z.addmm_(inner, weight).add_(bias)


def load_slice(path: Path, host: SliceHost, fingerprint: str, dtype: torch.dtype, device: torch.device) -> TaskSlice:
    """Map a slice's file and make it ready to compute.

    On a CPU the weights are views of the mapped file where it stores them in the compute type, and the last reference
    to the slice unmaps it. Every page is read here, so that the first request waits for none.

    Args:
        fingerprint: of the host's weights.
        dtype: that the host computes in.

    Raises:
        ModelLoadError: the file is missing, damaged, or for another trunk; a tensor is NaN, unknown, or of a wrong
            shape. Says which file and tensor, and what to do.
    """
    tensors = SliceTensors(path)
    info = tensors.info
    check_trunk(path, info, fingerprint)
    try:
        layers = {index: part for index in range(host.layers) if (part := _layer(tensors, host, index, dtype, device))}
        head = None if info.task is Task.GENERATION else host.head(tensors, info.task, info.labels)
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}. Make the slice anew from this trunk") from error
    if tensors.unread:
        raise ModelLoadError(
            f"{path}: {min(tensors.unread)} belongs to no feed-forward part, adapter or head of this trunk of "
            f"{host.layers} layers: make the slice anew from this trunk"
        )
    digest = tensors.digest() if info.task is Task.GENERATION else ""
    return TaskSlice(info.name, info.task, info.labels, layers, head, tensors.elements() * dtype.itemsize, digest)


def check_trunk(path: Path, info: SliceInfo, fingerprint: str) -> None:
    """Refuse a slice for other weights. Raises ModelLoadError."""
    if info.trunk != fingerprint:
        raise ModelLoadError(
            f"{path} was made for other weights (trunk {info.trunk[:19]}…, these are {fingerprint[:19]}…): make the "
            "slice anew from this trunk, with `sixfold prepare slice`"
        )


def _layer(
    tensors: SliceTensors, host: SliceHost, index: int, dtype: torch.dtype, device: torch.device
) -> LayerSlice | None:
    mlp = host.mlp(tensors, index)
    adapter = _adapter(tensors, index, host.width, dtype, device)
    return LayerSlice(mlp, adapter) if mlp is not None or adapter is not None else None


def _adapter(tensors: Tensors, layer: int, width: int, dtype: torch.dtype, device: torch.device) -> Bottleneck | None:
    names = adapter_names(layer)
    if not tensors.names.intersection(names):
        return None
    down_weight, down_bias, up_weight, up_bias = names
    bottleneck = read_tensor(tensors, down_bias).numel()
    shapes = {
        down_weight: (bottleneck, width),
        down_bias: (bottleneck,),
        up_weight: (width, bottleneck),
        up_bias: (width,),
    }
    return Bottleneck(*(read_tensor(tensors, name, shape, dtype, device) for name, shape in shapes.items()))
