"""What quantised weights do to activations, linear by linear, on held-out text.

Three figures of each quantised linear, over all values that enter it (Xiao et al., arXiv 2211.10438, tell why
activations with outliers are the hard part):

- beyond_calibration: share of values whose size exceeds the largest that calibration text caused in the source. These
  are values that the calibration never saw; a static grid would clip them.
- lost_to_int8: share of non-zero values that an 8-bit grid for each token rounds to zero, because one outlier of the
  token sets the step (below 1/254 of it).
- output_error: mean over tokens of the squared error that the rounded weights make in the linear's output.

The prepared weights run as full-precision ones of equal value in transformers' modules, so that inputs can be seen.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sixfold_api.scalars import Task
from sixfold_runtime.engine import gptq_layout
from sixfold_runtime.engine.checkpoint import TensorStore
from sixfold_runtime.engine.device import available_memory_bytes
from sixfold_runtime.engine.loader import compute_dtype
from sixfold_runtime.prepare.evaluate import device
from sixfold_runtime.prepare.files import CONFIG, read_json

_WINDOWS = 16
"""Windows of either text that are run: the figures are shares of millions of values."""
_INT8_HALF_STEP = 1 / 254


@dataclass
class Activations:
    """Of one linear. Sums while they are counted, shares in `report`."""

    largest: float = 0.0
    values: int = 0
    beyond: int = 0
    lost: int = 0
    error: float = 0.0
    tokens: int = 0

    @property
    def output_error(self) -> float:
        return self.error / max(self.tokens, 1)

    def report(self) -> dict[str, float]:
        values = max(self.values, 1)
        shares = {"lostToInt8": round(self.lost / values, 6), "outputError": self.output_error}
        return shares | ({"beyondCalibration": round(self.beyond / values, 6)} if self.largest else {})


def measure(
    source: Path, prepared: Path, task: Task, calibration: Sequence[Sequence[int]], held_out: Sequence[Sequence[int]]
) -> dict[str, Activations]:
    """The quantised linears of `prepared` by name. Texts are token ids; without calibration its range is unknown."""
    module = _load(source, task)
    linears = dict(module.named_modules())
    rounded = dict(dequantised(prepared))
    found = {name: Activations() for name in rounded}
    watched = {name: linears[name] for name in rounded}
    with _watching(watched, lambda name, x: _widen(found[name], x)):
        _run(module, calibration[:_WINDOWS])
    full = {}
    for name, weight in rounded.items():
        parameter = linears[name].weight
        full[name] = parameter.data
        parameter.data = weight.to(parameter.device, parameter.dtype)
    with _watching(watched, lambda name, x: _count(found[name], x, watched[name].weight - full[name])):
        _run(module, held_out[:_WINDOWS])
    return found


def dequantised(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The quantised linears of a checkpoint as float32 [out, in]."""
    store = TensorStore(folder)
    quantization = read_json(folder / CONFIG)["quantization_config"]
    for name in sorted(store.names):
        module, _, part = name.rpartition(".")
        if part == "qweight":
            yield module, gptq_layout.read(store, module, quantization).dequantised()
        elif part == "weight_scale":
            yield module, store.get(f"{module}.weight").float() * store.get(name)[:, None]


def _load(folder: Path, task: Task) -> Any:
    transformers: Any = importlib.import_module("transformers")
    auto = (
        transformers.AutoModelForCausalLM
        if task is Task.GENERATION
        else transformers.AutoModelForSequenceClassification
    )
    where = device()
    dtype = compute_dtype(TensorStore(folder).weights, where, available_memory_bytes(where))
    return auto.from_pretrained(folder, dtype=dtype, local_files_only=True).to(where).eval().requires_grad_(False)


@torch.inference_mode()
def _run(module: Any, windows: Sequence[Sequence[int]]) -> None:
    for ids in windows:
        module(input_ids=torch.tensor([list(ids)], device=module.device))


@contextmanager
def _watching(linears: Mapping[str, Any], see: Callable[[str, torch.Tensor], None]) -> Iterator[None]:
    """Shows every input [tokens, in] of the linears."""

    def hook(name: str) -> Callable[[Any, tuple[torch.Tensor]], None]:
        return lambda _, inputs: see(name, inputs[0].reshape(-1, inputs[0].shape[-1]))

    handles = [linear.register_forward_pre_hook(hook(name)) for name, linear in linears.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _widen(activations: Activations, x: torch.Tensor) -> None:
    activations.largest = max(activations.largest, float(x.abs().max()))


def _count(activations: Activations, x: torch.Tensor, change: torch.Tensor) -> None:
    sizes = x.abs()
    activations.values += x.numel()
    activations.beyond += int((sizes > activations.largest).sum())
    activations.lost += int(((sizes < sizes.amax(dim=1, keepdim=True) * _INT8_HALF_STEP) & (sizes > 0)).sum())
    activations.error += float((x @ change.t()).square().sum(dtype=torch.float64))
    activations.tokens += len(x)
