"""The feed-forward part of a layer, which is what a task slice changes in a trunk: replaced, or with low-rank deltas.

Slices compute over the mapped file on a CPU: nothing is copied where the stored type is the compute type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from sixfold_runtime.engine.errors import ModelLoadError
from sixfold_runtime.engine.linear import DenseLinear, Linear, SideBySide
from sixfold_runtime.engine.lora import AdaptedLinear, Update


class Tensors(Protocol):
    """Tensors by name: a TensorStore, or a slice's file."""

    @property
    def names(self) -> frozenset[str]:
        """Of all tensors."""

    def get(self, name: str) -> torch.Tensor:
        """As stored, over the mapped file: never write to it. Raises KeyError."""


class Mlp(Protocol):
    """What a layer computes between its attention and its last residual, without normalisations."""

    @property
    def weight_bytes(self) -> int:
        """Resident; of a slice's, what isn't the trunk's."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, width] -> [n, width], the caller's to overwrite; x stays as it is."""

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> None:
        """total += self(x), in place; x may be `total`."""


class Adapter(Protocol):
    """A(z) = z + up(gelu(down(z))) behind an Mlp (Houlsby et al., arXiv 1902.00751)."""

    @property
    def weight_bytes(self) -> int:
        """Resident."""

    def __call__(self, z: torch.Tensor) -> torch.Tensor:
        """[n, width] -> [n, width]; z may be overwritten."""


_CPU_TOKENS = 256
"""Computed at a time on a CPU, so that what lies between the two products stays cached."""
Modules = tuple[str, ...]
"""Names of modules that share their input and are computed side by side."""
Activation = Callable[[torch.Tensor], torch.Tensor]
"""What lies between two products: [n, outputs of the first] -> [n, inputs of the second]; may overwrite."""


class TwoLinears:
    """The Mlp of all trunks here: a product, an activation, a product."""

    def __init__(self, first: Linear, activation: Activation, second: Linear, weight_bytes: int | None = None) -> None:
        """`weight_bytes`: what is its own, where it shares weights with another."""
        self.first, self.activation, self.second = first, activation, second
        self.weight_bytes = first.weight_bytes + second.weight_bytes if weight_bytes is None else weight_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.activation(self.first(x)))

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> None:
        """total += self(x), in place; x may be `total`."""
        size = _CPU_TOKENS if x.device.type == "cpu" else max(1, len(x))
        for first in range(0, len(x), size):
            part = slice(first, first + size)
            self.second.add_to(total[part], self.activation(self.first(x[part])))


def sliced_mlp(
    base: TwoLinears,
    modules: tuple[Modules, Modules],
    tensors: Tensors,
    dtype: torch.dtype,
    device: torch.device,
) -> TwoLinears | None:
    """`base` with what a slice has for its modules; None where the slice has nothing for them.

    Args:
        modules: of the two products.
        dtype: of the trunk.

    Raises:
        ModelLoadError: a shape doesn't fit, or a module is there in part; with its name.
    """
    parts = [
        _sliced_linear(linear, names, tensors, dtype, device)
        for linear, names in zip((base.first, base.second), modules, strict=True)
    ]
    if parts == [None, None]:
        return None
    first, second = (part or linear for part, linear in zip(parts, (base.first, base.second), strict=True))
    own = sum(_own_bytes(part) for part in parts if part is not None)
    return TwoLinears(first, base.activation, second, own)


def _own_bytes(linear: Linear) -> int:
    return linear.own_bytes if isinstance(linear, AdaptedLinear) else linear.weight_bytes


def _sliced_linear(
    base: Linear, modules: Sequence[str], tensors: Tensors, dtype: torch.dtype, device: torch.device
) -> Linear | None:
    replaced = [name for name in modules if f"{name}.weight" in tensors.names]
    changed = [name for name in modules if f"{name}.delta_a" in tensors.names or f"{name}.delta_b" in tensors.names]
    if replaced and changed:
        raise ModelLoadError(f"the slice has a replacement of {replaced[0]} and a delta of {changed[0]}: one or other")
    if changed:
        return _with_deltas(base, modules, changed, tensors, dtype, device)
    if not replaced:
        return None
    if missing := sorted(set(modules) - set(replaced)):
        raise ModelLoadError(f"the slice replaces {replaced[0]} but not {missing[0]}, which is computed with it")
    outputs = base.out_features // len(modules)
    parts = []
    for name in modules:
        weight = read_tensor(tensors, f"{name}.weight", (outputs, base.in_features), dtype, device)
        has_bias = f"{name}.bias" in tensors.names
        bias = read_tensor(tensors, f"{name}.bias", (outputs,), dtype, device) if has_bias else None
        parts.append(DenseLinear(weight, bias, as_stored=True))
    return parts[0] if len(parts) == 1 else SideBySide(parts)


def _with_deltas(
    base: Linear,
    modules: Sequence[str],
    changed: Sequence[str],
    tensors: Tensors,
    dtype: torch.dtype,
    device: torch.device,
) -> Linear:
    outputs = base.out_features // len(modules)
    updates: list[Update | None] = []
    for name in modules:
        if name not in changed:
            updates.append(None)
            continue
        rank = read_tensor(tensors, f"{name}.delta_a").shape[0]
        a = read_tensor(tensors, f"{name}.delta_a", (rank, base.in_features), torch.float32)
        updates.append(Update(a, read_tensor(tensors, f"{name}.delta_b", (outputs, rank), torch.float32), 1.0))
    return AdaptedLinear(base, updates, [outputs] * len(modules), dtype, device, None)


def read_tensor(
    tensors: Tensors,
    name: str,
    shape: tuple[int, ...] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """A tensor in the given type and place, copied only if it has to be.

    Raises:
        ModelLoadError: it isn't there, or has another shape; with its name.
    """
    if name not in tensors.names:
        raise ModelLoadError(f"{name} is missing")
    tensor = tensors.get(name)
    if shape is not None and tuple(tensor.shape) != shape:
        raise ModelLoadError(f"{name} has shape {list(tensor.shape)}, and the model needs {list(shape)}")
    return tensor.to(device=device, dtype=dtype)
