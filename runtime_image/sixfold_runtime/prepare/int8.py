"""INT8: each linear rounded to 8 bits with a scale for each output channel, symmetric. It needs no text."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import torch

from sixfold_runtime.engine.checkpoint import TensorStore
from sixfold_runtime.prepare.artifact import copy_beside_weights, write_config, write_weights
from sixfold_runtime.prepare.failures import PreparationError, Reason
from sixfold_runtime.prepare.quantised import INT8_METHOD

_LARGEST = 127


def quantise(source: Path, target: Path, linears: Collection[str]) -> None:
    """Write the model in `source` to `target` with the named linears as `weight` int8 [out, in] and
    `weight_scale` float32 [out].

    Raises PreparationError: UnsupportedPrecision if the checkpoint names its linears in another way than the model.
    """
    store = TensorStore(source)
    absent = [name for name in linears if not store.has(f"{name}.weight")]
    if absent or not linears:
        raise PreparationError(
            Reason.UNSUPPORTED_PRECISION,
            f"the checkpoint has no {absent[0]}.weight, which the model computes with: save the model anew"
            if absent
            else "the model has no linear layers that can be rounded: use scheme: None",
        )
    copy_beside_weights(source, target)
    write_weights(target, _tensors(store, {f"{name}.weight" for name in linears}))
    write_config(target, {"quant_method": INT8_METHOD})


def _tensors(store: TensorStore, rounded: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name in sorted(store.names):
        if name in rounded:
            weight, scale = round_channels(store.get(name))
            yield name, weight
            yield f"{name}_scale", scale
        else:
            yield name, store.get(name)


def round_channels(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [out, in] and float32 [out] for a weight [out, in]: weight is about int8 * scale."""
    weight = weight.float()
    scale = weight.abs().amax(dim=1) / _LARGEST
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return torch.round(weight / scale[:, None]).clamp(-_LARGEST, _LARGEST).to(torch.int8), scale
