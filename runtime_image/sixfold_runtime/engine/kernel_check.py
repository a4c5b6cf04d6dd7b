"""The pseudo-quantisation check: whether quantised weights are computed with as such.

Small files prove nothing: weights may be stored in 4 bits and multiplied in full precision, which costs more than it
saves. So three things have to hold for a loaded decoder: a kernel of its own for each quantised linear, a step of one
of them that is faster than in full precision, and memory that is what the bits say.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from sixfold_runtime.engine.checkpoint import TensorStore
from sixfold_runtime.engine.linear import DenseLinear, Linear

log = logging.getLogger(__name__)

_GPTQ_PARTS = ("qweight", "qzeros", "scales", "bias")
_MAX_BYTES_RATIO = 1.25
"""Resident over expected: kernels pad, and hold zero points as floats."""
_MAX_SHARE_OF_FP16 = 0.30
"""Weights of 2 and 3 bits are held in 4, which is no pretence."""
_MIN_MEASURED_BYTES = 4 << 20
"""A smaller linear (in full precision) costs its calls, not its weights: times say nothing."""
_RUNS = 20


@dataclass(frozen=True)
class KernelCheck:
    """What was found, and the verdict."""

    kernels: dict[str, int]
    """Linears by kernel."""
    resident_bytes: int
    """Of all linears."""
    expected_bytes: int
    """Of the same: bits, scales and zero points as stored; modules left in full precision in the compute type."""
    fp16_bytes: int
    """Of the same in half precision."""
    measured: str
    """The linear whose step was measured, the largest quantised one; "" where none is large enough."""
    quantised_seconds: float
    full_seconds: float
    """Of its full-precision twin: the same shape, one row."""
    problem: str
    """Why the weights are only pretended to be quantised, for people; "" if they are quantised."""

    @property
    def is_quantised(self) -> bool:
        return not self.problem


class Loaded(Protocol):
    """A decoder or encoder.

    Attributes:
        linears: by the names of the modules that each computes.
        dtype: of activations.
    """

    linears: dict[tuple[str, ...], Linear]
    dtype: torch.dtype
    device: torch.device


def check_loaded(model: Loaded, store: TensorStore) -> KernelCheck:
    """Check a model that was loaded from `store`, and log the verdict. It is measured against what the engine computes
    full weights in: fp32 on a CPU, else the model's own type."""
    full_dtype = torch.float32 if model.device.type == "cpu" else model.dtype
    found = check_kernels(model.linears, store, model.dtype, full_dtype, model.device)
    if found.problem:
        log.warning("%s: quantised in name only: %s", store.folder, found.problem)
    else:
        kernels = ", ".join(f"{count} {kernel}" for kernel, count in sorted(found.kernels.items()))
        log.info(
            "%s: quantised linears (%s) take %.1f MB, half precision would take %.1f MB",
            store.folder, kernels, found.resident_bytes / 1e6, found.fp16_bytes / 1e6,
        )  # fmt: skip
    return found


def check_kernels(
    linears: Mapping[tuple[str, ...], Linear],
    store: TensorStore,
    dtype: torch.dtype,
    full_dtype: torch.dtype,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> KernelCheck:
    """Check loaded linears.

    Args:
        linears: by the names of the modules that each computes.
        store: of the checkpoint that they were built from.
        dtype: of activations.
        full_dtype: that the engine would compute in without quantisation.
    """
    kernels = Counter(linear.kernel for linear in linears.values())
    quantised = {names: linear for names, linear in linears.items() if any(_is_quantised(store, n) for n in names)}
    fp16_bytes = sum(2 * linear.in_features * linear.out_features for linear in linears.values())
    resident = sum(linear.weight_bytes for linear in linears.values())
    expected = sum(_expected_bytes(store, name, dtype) for names in linears for name in names)
    measured, seconds, full_seconds = "", 0.0, 0.0
    if quantised:
        names, linear = max(quantised.items(), key=lambda item: item[1].in_features * item[1].out_features)
        if linear.in_features * linear.out_features * full_dtype.itemsize >= _MIN_MEASURED_BYTES:
            measured = ", ".join(names)
            seconds = _step_seconds(linear, dtype, device, clock)
            twin = DenseLinear(torch.randn(linear.out_features, linear.in_features).to(device, full_dtype))
            full_seconds = _step_seconds(twin, full_dtype, device, clock)
    return KernelCheck(
        kernels=dict(kernels),
        resident_bytes=resident,
        expected_bytes=expected,
        fp16_bytes=fp16_bytes,
        measured=measured,
        quantised_seconds=seconds,
        full_seconds=full_seconds,
        problem=problem(kernels, len(quantised), resident, expected, fp16_bytes, seconds, full_seconds),
    )


def problem(
    kernels: Mapping[str, int],
    quantised: int,
    resident_bytes: int,
    expected_bytes: int,
    fp16_bytes: int,
    quantised_seconds: float,
    full_seconds: float,
) -> str:
    """Why this is pseudo-quantisation, "" if it isn't.

    Args:
        quantised: how many linears have quantised weights in the checkpoint.
        quantised_seconds: of a step of one of them; with `full_seconds` 0 where it wasn't measured.
    """
    if not quantised:
        return "no linear of the checkpoint is quantised"
    dequantised = sum(count for kernel, count in kernels.items() if "dequantised" in kernel)
    if dequantised:
        return (
            f"{dequantised} of {quantised} quantised linears have no kernel on this device and are computed in full "
            "precision: choose a group size of 32 or a multiple of it that divides the inputs, or another device"
        )
    if resident_bytes > max(_MAX_BYTES_RATIO * expected_bytes, _MAX_SHARE_OF_FP16 * fp16_bytes):
        return (
            f"the weights take {resident_bytes / 1e6:.1f} MB where their bits make {expected_bytes / 1e6:.1f} MB: "
            "they are held in another form than stored"
        )
    if quantised_seconds > full_seconds:
        return (
            f"a step of one linear takes {quantised_seconds * 1e3:.3f} ms quantised and {full_seconds * 1e3:.3f} ms "
            "in full precision: this device computes faster with full weights"
        )
    return ""


def _is_quantised(store: TensorStore, name: str) -> bool:
    return store.has(f"{name}.qweight") or store.has(f"{name}.weight_scale")


def _expected_bytes(store: TensorStore, name: str, dtype: torch.dtype) -> int:
    if store.has(f"{name}.qweight"):
        parts = [store.get(f"{name}.{part}") for part in _GPTQ_PARTS if store.has(f"{name}.{part}")]
        return sum(part.nbytes for part in parts)
    elements = math.prod(store.shape(f"{name}.weight"))
    if store.has(f"{name}.weight_scale"):
        return elements + 4 * store.shape(f"{name}.weight_scale")[0]
    return elements * dtype.itemsize


def _step_seconds(linear: Linear, dtype: torch.dtype, device: torch.device, clock: Callable[[], float]) -> float:
    """The shortest of some calls with one row."""
    x = torch.randn(1, linear.in_features).to(device, dtype)
    best = math.inf
    with torch.inference_mode():
        for _ in range(_RUNS):
            started = clock()
            linear(x)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best = min(best, clock() - started)
    return best
