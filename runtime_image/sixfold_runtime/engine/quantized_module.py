"""transformers modules over this engine's quantised checkpoints: their linears compute with quantised weights."""

from __future__ import annotations

from typing import Any

import torch

from sixfold_runtime.engine.checkpoint import TensorStore
from sixfold_runtime.engine.errors import ModelLoadError
from sixfold_runtime.engine.linear import Linear, build_linear

_PARTS = ("qweight", "weight_scale")


class QuantizedModule(torch.nn.Module):
    """A linear of the engine in the place of torch's."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self._linear = linear
        self.weight_bytes = linear.weight_bytes
        self.weights = linear.in_features * linear.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]"""
        flat: torch.Tensor = self._linear(x.reshape(-1, self._linear.in_features))
        return flat.reshape(*x.shape[:-1], self._linear.out_features)


def quantised_names(store: TensorStore) -> list[str]:
    """Modules of the checkpoint whose weights are quantised."""
    return sorted({name.rpartition(".")[0] for name in store.names if name.endswith(_PARTS)})


def plain_state(store: TensorStore, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The checkpoint with placeholders for the quantised weights, so that transformers finds what it looks for."""
    quantised = quantised_names(store)
    own = {f"{name}.{part}" for name in quantised for part in ("qweight", "qzeros", "scales", "g_idx", "weight_scale")}
    own |= {f"{name}.weight" for name in quantised}
    state = {name: store.get(name) for name in store.names - own}
    return state | {f"{name}.weight": torch.empty(_shape(store, name), dtype=dtype) for name in quantised}


def _shape(store: TensorStore, name: str) -> tuple[int, ...]:
    """(outputs, inputs)"""
    if store.has(f"{name}.weight_scale"):
        return store.shape(f"{name}.weight")
    return store.shape(f"{name}.scales")[1], store.shape(f"{name}.g_idx")[0]


def put_in(
    module: Any, store: TensorStore, quantization: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    """Replace the linears whose weights are quantised.

    Raises:
        ModelLoadError: the checkpoint has quantised weights that the module has no linear for.
    """
    for name in quantised_names(store):
        parent, _, own = name.rpartition(".")
        try:
            owner = module.get_submodule(parent)
            fits = isinstance(getattr(owner, own), torch.nn.Linear)
        except AttributeError:
            fits = False
        if not fits:
            raise ModelLoadError(f"{store.folder}: {name} is quantised, and the model has no linear of that name")
        setattr(owner, own, QuantizedModule(build_linear(store, [name], quantization, dtype, device)))


def module_weight_bytes(module: Any) -> int:
    """Resident bytes of a module's weights, quantised ones as they are held."""
    plain: int = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    return plain + sum(part.weight_bytes for part in module.modules() if isinstance(part, QuantizedModule))
