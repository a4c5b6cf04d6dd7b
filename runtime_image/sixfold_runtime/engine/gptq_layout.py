"""The GPTQ checkpoint layout of AutoGPTQ and GPTQModel: packed integers, scales and zero points by name.

A weight is (integer - zero point) * scale; scale and zero point are those of its input channel's group. Integers of
`bits` bits lie one after the other, lowest bits first, in a stream of 32-bit words: `qweight` [words, out] along the
input channels, `qzeros` [groups, words] along the outputs. `g_idx` [in] is the group of each input channel: after
desc_act, channels are in another order than groups. Format "gptq" stores zero points minus one, "gptq_v2" as they are.

Bits and groups are read from the tensors' shapes, so per-module overrides (`dynamic`) need no look-up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sixfold_runtime.engine.checkpoint import TensorStore
from sixfold_runtime.engine.errors import ModelLoadError

BITS = (2, 3, 4, 8)
_WORD_BITS = 32
_FORMATS = ("gptq", "gptq_v2")
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
"""A one in each field of a word."""


@dataclass(frozen=True)
class GptqWeight:
    """One linear's weights, unpacked."""

    bits: int
    integers: torch.Tensor
    """uint8 [in, out]"""
    zeros: torch.Tensor
    """uint8 [groups, out]"""
    scales: torch.Tensor
    """float [groups, out], as stored"""
    group_of: torch.Tensor
    """int64 [in]: each input channel's group"""
    bias: torch.Tensor | None
    """float [out], as stored"""

    @property
    def group_size(self) -> int:
        return math.ceil(self.integers.shape[0] / self.scales.shape[0])

    def dequantised(self) -> torch.Tensor:
        """float32 [out, in]: the weights that the integers stand for."""
        centred = self.integers.float() - self.zeros[self.group_of].float()
        return (centred * self.scales[self.group_of].float()).t()

    def reordered(self, output_order: torch.Tensor) -> GptqWeight:
        """The same with output output_order[i] as output i."""
        return replace(
            self,
            integers=self.integers[:, output_order],
            zeros=self.zeros[:, output_order],
            scales=self.scales[:, output_order],
            bias=None if self.bias is None else self.bias[output_order],
        )

    def input_order(self) -> torch.Tensor | None:
        """int64 [in], the input channels sorted by group, or None where they are not groups of one size."""
        order = torch.argsort(self.group_of, stable=True)
        regular = torch.arange(len(order)) // self.group_size
        return order if torch.equal(self.group_of[order], regular) else None


def read(store: TensorStore, name: str, quantization: dict[str, Any]) -> GptqWeight:
    """Unpack the linear `name`.

    Args:
        quantization: `quantization_config` of config.json.

    Raises:
        ModelLoadError: a tensor is missing, the shapes don't belong together, or the format is another one.
    """
    layout = str(quantization.get("checkpoint_format") or quantization.get("format") or "gptq")
    if layout not in _FORMATS:
        raise ModelLoadError(
            f"{store.folder}: GPTQ weights in the format {layout!r}: only {' and '.join(_FORMATS)} are read; "
            "quantise again with one of them"
        )
    parts = {}
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        if not store.has(f"{name}.{part}"):
            raise ModelLoadError(f"{store.folder}: {name} has a qweight but no {part}: it is no GPTQ checkpoint")
        parts[part] = store.get(f"{name}.{part}")
    qweight, qzeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
    group_of = parts["g_idx"].long()
    (inputs,), (groups, outputs) = group_of.shape, scales.shape
    bits = qweight.shape[0] * _WORD_BITS // inputs
    words = math.ceil(outputs * bits / _WORD_BITS)
    if (
        bits not in BITS
        or qweight.dtype != torch.int32
        or qzeros.dtype != torch.int32
        or qweight.shape != (math.ceil(inputs * bits / _WORD_BITS), outputs)
        or qzeros.shape != (groups, words)
        or not 0 <= int(group_of.min()) <= int(group_of.max()) < groups
    ):
        raise ModelLoadError(
            f"{store.folder}: the tensors of {name} don't belong together (qweight {list(qweight.shape)} "
            f"{qweight.dtype}, qzeros {list(qzeros.shape)}, scales {list(scales.shape)}, g_idx {inputs}): "
            f"expected int32 words of {', '.join(map(str, BITS))} bits"
        )
    return GptqWeight(
        bits=bits,
        integers=unpack(qweight, bits, inputs),
        zeros=_zeros(qzeros, bits, outputs, minus_one=layout == "gptq"),
        scales=scales,
        group_of=group_of,
        bias=store.get(f"{name}.bias") if store.has(f"{name}.bias") else None,
    )


def side_by_side(weights: Sequence[GptqWeight]) -> GptqWeight | None:
    """One weight with the outputs of all, or None where their bits or groups differ."""
    first = weights[0]
    for other in weights[1:]:
        same = other.bits == first.bits and other.scales.shape[0] == first.scales.shape[0]
        if not same or not torch.equal(other.group_of, first.group_of):
            return None
    bias = None
    if any(weight.bias is not None for weight in weights):
        bias = torch.cat([torch.zeros(w.scales.shape[1]) if w.bias is None else w.bias.float() for w in weights])
    return replace(
        first,
        integers=torch.cat([weight.integers for weight in weights], dim=1),
        zeros=torch.cat([weight.zeros for weight in weights], dim=1),
        scales=torch.cat([weight.scales for weight in weights], dim=1),
        bias=bias,
    )


def unpack(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The integers of a packed stream.

    Args:
        words: int32 [n, columns].
        count: integers in each column; what the last word holds beyond them is dropped.

    Returns:
        uint8 [count, columns]
    """
    words_a_turn = bits // math.gcd(bits, _WORD_BITS)
    integers_a_turn = _WORD_BITS // math.gcd(bits, _WORD_BITS)
    turns = math.ceil(words.shape[0] / words_a_turn)
    integers = torch.empty((turns * integers_a_turn, words.shape[1]), dtype=torch.uint8)
    mask = (1 << bits) - 1
    for index in range(min(integers_a_turn, count)):
        word, shift = divmod(index * bits, _WORD_BITS)
        field = words[word::words_a_turn] >> shift
        kept = _WORD_BITS - shift
        if kept < bits:  # the rest is in the next word; >> has filled what is above the kept bits with the sign
            field = (field & ((1 << kept) - 1)) | (words[word + 1 :: words_a_turn] << kept)
        integers[index::integers_a_turn] = field & mask
    return integers[:count]


def _zeros(qzeros: torch.Tensor, bits: int, outputs: int, *, minus_one: bool) -> torch.Tensor:
    """uint8 [groups, outputs]. What was subtracted is added as it was subtracted.

    GPTQModel subtracts from whole words where fields don't straddle them: a zero point of 0 borrows from its
    neighbour, and only adding to whole words gives it back. Without such a zero point it makes no difference.
    """
    if minus_one and bits in _ONES:
        qzeros = qzeros + _ONES[bits]
    zeros = unpack(qzeros.t(), bits, outputs).t()
    return (zeros + 1) & ((1 << bits) - 1) if minus_one and bits not in _ONES else zeros
