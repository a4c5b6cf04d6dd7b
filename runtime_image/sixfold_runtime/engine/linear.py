"""Linear layers of the engine's own decoder: several named modules of a checkpoint computed side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from sixfold_runtime.engine.checkpoint import TensorStore

_MAX_TRANSPOSED_WEIGHTS = 1 << 20


class Linear(Protocol):
    """y = W x + b. Implementations name this class as their base, for the methods that it has a body for."""

    in_features: int
    out_features: int
    weight_bytes: int
    """Resident, with scales, zero points and biases."""
    kernel: str
    """How it computes ("dense", "int4", "int8"): for logs, metrics and the pseudo-quantisation check."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, in_features] -> [n, out_features], in the type of x. The result is the caller's to overwrite."""

    def write(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out = self(x); out is [n, out_features]."""
        out.copy_(self(x))

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> None:
        """total += self(x), in place; total is [n, out_features]."""
        total += self(x)


class DenseLinear(Linear):
    """Floating-point weights.

    Measured on a CPU in fp32: a product of few rows is up to 1.6 times as fast where small weights lie as
    [in_features, out_features]; with large ones memory decides. Half types are faster the other way round.
    """

    kernel = "dense"

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, shared: bool = False, as_stored: bool = False
    ) -> None:
        """
        Args:
            weight: [out_features, in_features] in the compute type, on its device.
            bias: [out_features], likewise.
            shared: the weight belongs to another module too: where that costs little it isn't copied.
            as_stored: the weight lies over a mapped file: it is never copied.
        """
        self.out_features, self.in_features = weight.shape
        transposed = (
            not as_stored
            and weight.device.type == "cpu"
            and weight.dtype == torch.float32
            and weight.numel() <= _MAX_TRANSPOSED_WEIGHTS
        )
        self._weight = weight.t().contiguous() if transposed else weight.t()
        self._bias = bias
        owned = 0 if shared and not transposed else self._weight.nbytes
        self.weight_bytes = owned + (0 if bias is None else bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, self._weight) if self._bias is None else torch.addmm(self._bias, x, self._weight)

    def write(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if self._bias is None:
            torch.mm(x, self._weight, out=out)
        else:
            torch.addmm(self._bias, x, self._weight, out=out)

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> None:
        total.addmm_(x, self._weight)
        if self._bias is not None:
            total += self._bias


class ReorderedLinear(Linear):
    """A linear whose weights can't be permuted in advance: its inputs and outputs are."""

    def __init__(
        self, inner: Linear, output_order: torch.Tensor | None = None, input_order: torch.Tensor | None = None
    ) -> None:
        self._inner, self._output_order, self._input_order = inner, output_order, input_order
        self.in_features, self.out_features = inner.in_features, inner.out_features
        self.weight_bytes, self.kernel = inner.weight_bytes, inner.kernel

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self._inner(x if self._input_order is None else x[:, self._input_order])
        return y if self._output_order is None else y[:, self._output_order]


class SideBySide(Linear):
    """Linears of different kinds that share their input, such as where only some modules of a layer are quantised."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self._parts = parts
        self.in_features = parts[0].in_features
        self.out_features = sum(part.out_features for part in parts)
        self.weight_bytes = sum(part.weight_bytes for part in parts)
        self.kernel = "+".join(sorted({part.kernel for part in parts}))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self._parts], dim=1)


def build_linear(
    store: TensorStore,
    names: Sequence[str],
    quantization: dict[str, Any] | None,
    dtype: torch.dtype,
    device: torch.device,
    *,
    output_order: torch.Tensor | None = None,
    input_order: torch.Tensor | None = None,
) -> Linear:
    """One linear that computes the outputs of the named modules (such as q_proj, k_proj, v_proj) side by side.

    Args:
        names: of modules with one input; a module's bias is used where the checkpoint has one.
        quantization: `quantization_config` of the checkpoint's config.json.
        dtype: of inputs and outputs.
        output_order: int64 [out_features]: output i is what would be output output_order[i].
        input_order: int64 [in_features]: input i is what would be input input_order[i].
    """
    kinds = {name: _kind(store, name) for name in names}
    if set(kinds.values()) != {"dense"}:
        if len(set(kinds.values())) > 1:
            inner: Linear = SideBySide([build_linear(store, [name], quantization, dtype, device) for name in names])
        else:
            inner = _quantized(kinds[names[0]], store, names, quantization, dtype, device, output_order)
            output_order = None
        if output_order is None and input_order is None:
            return inner
        orders = (None if order is None else order.to(device) for order in (output_order, input_order))
        return ReorderedLinear(inner, *orders)
    weight = torch.cat([store.get(f"{name}.weight").to(dtype) for name in names])
    biases = [store.get(f"{name}.bias").to(dtype) if store.has(f"{name}.bias") else None for name in names]
    bias = None
    if any(part is not None for part in biases):
        sizes = [store.shape(f"{name}.weight")[0] for name in names]
        parts = zip(biases, sizes, strict=True)
        bias = torch.cat([torch.zeros(size, dtype=dtype) if part is None else part for part, size in parts])
    if output_order is not None:
        weight, bias = weight[output_order], None if bias is None else bias[output_order]
    if input_order is not None:
        weight = weight[:, input_order]
    return DenseLinear(weight.to(device), None if bias is None else bias.to(device))


def _kind(store: TensorStore, name: str) -> str:
    if store.has(f"{name}.qweight"):
        return "gptq"
    return "int8" if store.has(f"{name}.weight_scale") else "dense"


def _quantized(
    kind: str,
    store: TensorStore,
    names: Sequence[str],
    quantization: dict[str, Any] | None,
    dtype: torch.dtype,
    device: torch.device,
    output_order: torch.Tensor | None,
) -> Linear:
    # Imported here: quantized.py builds upon this module.
    from sixfold_runtime.engine import quantized

    build = quantized.gptq_linear if kind == "gptq" else quantized.int8_linear
    return build(store, names, quantization or {}, dtype, device, output_order)
