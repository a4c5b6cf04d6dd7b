"""Linears over quantised weights: GPTQ at 2, 3, 4 and 8 bits, and this project's INT8.

Up to 4 bits, GPTQ weights run in torch's int4 kernels (a CPU's own, tinygemm on CUDA), which hold 4 bits a weight and
want bf16. An 8-bit integer is two 4-bit ones, q = 16 h + l, so an 8-bit linear is a 4-bit linear of twice the width
over the input twice: exact, group by group, in one call. What the kernels can't take is dequantised at load, and says
so in `kernel`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from sixfold_runtime.engine import gptq_layout, lora
from sixfold_runtime.engine.checkpoint import TensorStore
from sixfold_runtime.engine.errors import ModelLoadError
from sixfold_runtime.engine.gptq_layout import GptqWeight
from sixfold_runtime.engine.linear import DenseLinear, Linear, ReorderedLinear, SideBySide

log = logging.getLogger(__name__)

_KERNEL_GROUPS = (256, 128, 64, 32)
"""Input channels of a group that the int4 kernels know; a larger group is several of these with equal scales."""
_MIDDLE = 8
"""The kernels compute (q - 8) * scale + zero."""
_TINYGEMM_CAPABILITY = (8, 0)
_UNPACK_FROM_ROWS = 48
"""The CPU kernel takes as long again for each further row; from here on (measured), unpacking for the call and one bf16
product are faster."""
_BLOCK = 64
"""Outputs that the CPU kernel's layout keeps together: for each input 32 bytes, with those from the 33rd on above."""
_UNPACKED_BLOCKS = 4
"""Unpacked at a time, so that they stay cached."""


def gptq_linear(
    store: TensorStore,
    names: Sequence[str],
    quantization: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    output_order: torch.Tensor | None = None,
) -> Linear:
    """The named modules side by side: in one kernel call where bits and groups are equal, else one after the other.

    Args:
        output_order: int64 [out]: output i is what would be output output_order[i].

    Raises:
        ModelLoadError: the tensors are no GPTQ layout that is known.
    """
    weights = [gptq_layout.read(store, name, quantization) for name in names]
    together = gptq_layout.side_by_side(weights)
    if together is None:
        parts = SideBySide([gptq_linear(store, [name], quantization, dtype, device) for name in names])
        return parts if output_order is None else ReorderedLinear(parts, output_order.to(device))
    if output_order is not None:
        together = together.reordered(output_order)
    return lora.beside(_kernel(together, names, dtype, device), store, names, dtype, device, output_order)


def int8_linear(
    store: TensorStore,
    names: Sequence[str],
    quantization: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    output_order: torch.Tensor | None = None,
) -> Linear:
    """The named modules of an INT8 checkpoint side by side.

    Args:
        output_order: int64 [out]: output i is what would be output output_order[i].

    Raises:
        ModelLoadError: a weight is not int8, or its scales don't fit.
    """
    weights, scales, biases = [], [], []
    for name in names:
        weight, scale = store.get(f"{name}.weight"), store.get(f"{name}.weight_scale")
        if weight.dtype != torch.int8 or scale.shape != weight.shape[:1]:
            raise ModelLoadError(
                f"{store.folder}: {name} is no INT8 linear: weight {weight.dtype} {list(weight.shape)} "
                f"with weight_scale {list(scale.shape)}"
            )
        weights.append(weight)
        scales.append(scale.float())
        has_bias = store.has(f"{name}.bias")
        biases.append(store.get(f"{name}.bias").float() if has_bias else torch.zeros(len(weight)))
    weight, scale, bias = torch.cat(weights), torch.cat(scales), torch.cat(biases)
    if output_order is not None:
        weight, scale, bias = weight[output_order], scale[output_order], bias[output_order]
    linear = Int8Linear(weight, scale, bias if bias.any() else None, device)
    return lora.beside(linear, store, names, dtype, device, output_order)


def _kernel(weight: GptqWeight, names: Sequence[str], dtype: torch.dtype, device: torch.device) -> Linear:
    order, inputs = weight.input_order(), len(weight.group_of)
    group = next((size for size in _KERNEL_GROUPS if weight.group_size % size == 0 and inputs % size == 0), None)
    old = device.type == "cuda" and torch.cuda.get_device_capability(device) < _TINYGEMM_CAPABILITY
    if order is not None and group is not None and not old:
        return Int4Linear(weight, order, group, device)
    log.info(
        "%s: no int4 kernel for %d inputs in groups of %d on this device: dequantised to %s",
        ", ".join(names), inputs, weight.group_size, dtype,
    )  # fmt: skip
    return DequantisedLinear(
        weight.dequantised().to(device, dtype), None if weight.bias is None else weight.bias.to(device, dtype)
    )


class DequantisedLinear(DenseLinear):
    """Quantised weights that no kernel here can compute with: they cost what full precision costs."""

    kernel = "dequantised"


class Int4Linear(Linear):
    """Groups of 4-bit weights, or of 8-bit ones as two planes of 4 bits. Computes in bf16."""

    def __init__(self, weight: GptqWeight, order: torch.Tensor, group: int, device: torch.device) -> None:
        """
        Args:
            order: int64 [in], the input channels sorted by group.
            group: of the kernel: divides the weight's group size.
        """
        self.in_features, self.out_features = weight.integers.shape
        self.kernel = "int8-as-int4" if weight.bits == 8 else "int4"
        self._group, self._planes = group, 2 if weight.bits == 8 else 1
        sorted_already = torch.equal(order, torch.arange(self.in_features))
        self._order = None if sorted_already else order.int().to(device)
        integers, scales, zeros = _planes(weight, order)
        # The kernels take outputs by blocks.
        spare = -self.out_features % (16 if device.type == "cpu" else 8)
        integers = functional.pad(integers, (0, 0, 0, spare))
        scales_and_zeros = functional.pad(torch.stack((scales, zeros), dim=2), (0, 0, 0, spare))
        repeats = weight.group_size // group
        self._scales_and_zeros = scales_and_zeros.repeat_interleave(repeats, dim=0).to(device, torch.bfloat16)
        self._packed = _packed(integers, device)
        self._has_zeros = bool(zeros.any())
        self._unpackable = device.type == "cpu" and len(integers) % _BLOCK == 0 and _layout_is_known()
        self._bias = None if weight.bias is None else weight.bias.to(device, torch.bfloat16)
        tensors = (self._packed, self._scales_and_zeros, self._order, self._bias)
        self.weight_bytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        dtype, x = x.dtype, x.to(torch.bfloat16)
        # The kernels take no strides.
        x = x.contiguous() if self._order is None else x.index_select(1, self._order)
        if self._planes == 2:
            x = torch.cat((x, x), dim=1)
        if x.device.type == "cuda":
            y = torch._weight_int4pack_mm(x, self._packed, self._group, self._scales_and_zeros)
        elif self._unpackable and len(x) >= _UNPACK_FROM_ROWS:
            y = self._unpacked_product(x)
        else:
            y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self._packed, self._group, self._scales_and_zeros)
        if y.shape[1] != self.out_features:
            y = y[:, : self.out_features]
        return (y if self._bias is None else y + self._bias).to(dtype)

    def _unpacked_product(self, x: torch.Tensor) -> torch.Tensor:
        rows, inputs = x.shape
        scales, zeros = (part.contiguous().unsqueeze(1) for part in self._scales_and_zeros.unbind(2))
        y = x.new_empty(rows, scales.shape[2])
        packed = self._packed.view(-1, inputs, _BLOCK // 2)
        for first in range(0, len(packed), _UNPACKED_BLOCKS):
            blocks = packed[first : first + _UNPACKED_BLOCKS]
            outputs = slice(first * _BLOCK, (first + len(blocks)) * _BLOCK)
            weight = _unpack_blocks(blocks).view(torch.int8).sub_(_MIDDLE).to(torch.bfloat16)
            groups = weight.view(len(scales), self._group, -1)
            groups.mul_(scales[:, :, outputs])
            if self._has_zeros:
                groups.add_(zeros[:, :, outputs])
            y[:, outputs] = x @ weight
        return y


def _unpack_blocks(blocks: torch.Tensor) -> torch.Tensor:
    """uint8 [blocks, in, 32] as the CPU kernel keeps them -> integers uint8 [in, 64 * blocks]."""
    halves = zip(blocks & 15, blocks >> 4, strict=True)
    return torch.cat([half for pair in halves for half in pair], dim=1)


@functools.cache
def _layout_is_known() -> bool:
    """Whether torch packs on this processor as `_unpack_blocks` unpacks: the layout is torch's own affair."""
    integers = torch.randint(0, 16, (2 * _BLOCK, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    packed = _packed(integers, torch.device("cpu"))
    return torch.equal(_unpack_blocks(packed.view(2, 32, _BLOCK // 2)), integers.t())


def _planes(weight: GptqWeight, order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(integers uint8 [out, planes * in] below 16, scales and zeros float32 [planes * groups, out]) for the kernels.

    (q - z) * s is (q - 8) * s + (8 - z) * s; at 8 bits, with q = 16 h + l, it is
    (h - 8) * 16 s + (l - 8) * s + (136 - z) * s. Below 4 bits, q and z are moved to the middle, so that what bf16
    rounds is small.
    """
    integers = weight.integers[order].t()
    scales, zeros = weight.scales.float(), weight.zeros.float()
    if weight.bits < 8:
        middle = 1 << (weight.bits - 1)
        return integers + (_MIDDLE - middle), scales, (middle - zeros) * scales
    high_zeros = torch.zeros_like(scales)
    return (
        torch.cat((integers >> 4, integers & 15), dim=1),
        torch.cat((16 * scales, scales)),
        torch.cat((high_zeros, (17 * _MIDDLE - zeros) * scales)),
    )


def _packed(integers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`integers` (uint8 [out, in]) as the device's int4 kernel wants them."""
    if device.type == "cpu":
        packed: torch.Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(integers.int(), 1)
        return packed
    tiles = next(tiles for tiles in (8, 4, 2) if integers.shape[1] % (16 * tiles) == 0)
    pairs = (integers[:, ::2] << 4 | integers[:, 1::2]).to(device)
    return torch._convert_weight_to_int4pack(pairs, tiles)


class Int8Linear(Linear):
    """Symmetric int8 weights by output channel; activations are quantised row by row, so that no row depends on its
    batch-mates (dynamic quantisation as in ZeroQuant, Yao et al., arXiv 2206.01861)."""

    kernel = "int8"

    def __init__(
        self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, device: torch.device
    ) -> None:
        """`weight` is int8 [out, in], `scales` and `bias` float32 [out]."""
        self.out_features, self.in_features = weight.shape
        # The CUDA product wants inputs and outputs by eights, and more than 16 rows.
        padding = (0, -self.in_features % 8, 0, -self.out_features % 8) if device.type == "cuda" else (0, 0, 0, 0)
        self._weight = functional.pad(weight, padding).contiguous().to(device).t()
        self._pad_inputs, self._min_rows = padding[1], 17 if device.type == "cuda" else 1
        self._scales, self._bias = scales.to(device), None if bias is None else bias.to(device)
        self.weight_bytes = sum(
            tensor.nbytes for tensor in (self._weight, self._scales, self._bias) if tensor is not None
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = len(x)
        # A row of zeros must not be divided by zero; a NaN or an infinity stays in its row, through its scale.
        row_scales = x.abs().amax(1, keepdim=True).float().div_(127).clamp_min_(1e-30)
        quantised = (x / row_scales).round_().to(torch.int8)
        if self._pad_inputs or rows < self._min_rows:
            quantised = functional.pad(quantised, (0, self._pad_inputs, 0, max(0, self._min_rows - rows)))
        y = torch._int_mm(quantised, self._weight)[:rows, : self.out_features].float()
        y.mul_(self._scales).mul_(row_scales)
        if self._bias is not None:
            y += self._bias
        return y.to(x.dtype)
