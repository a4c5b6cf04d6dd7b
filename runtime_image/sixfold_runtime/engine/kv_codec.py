"""Keys and values of one block as bytes: 8 bits each with their scales, the token ids, and a checksum.

Keys have channels that are far larger than others, the same for all tokens, and values don't: so a key's scale is that
of its channel over the block, a value's that of its token over the channels, as in KIVI (Liu et al., 2024).
"""

from __future__ import annotations

import math
import struct
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

_MAGIC = b"6FKV"
_VERSION = 1
_HEADER = struct.Struct("<4sBxHHHH")
"""Magic, version, layers, KV heads, tokens, head dim."""
_CHECKSUM = struct.Struct("<I")
KEEP_BITS = 8


class BadBlockError(Exception):
    """Bytes that are no block, or not the one that was looked for; the message is one word for a metric."""


@dataclass(frozen=True)
class BlockShape:
    layers: int
    kv_heads: int
    tokens: int
    head_dim: int

    @property
    def value_bytes(self) -> int:
        """How long a block is as bytes."""
        heads = self.layers * self.kv_heads
        numbers, scales = 2 * heads * self.tokens * self.head_dim, heads * (self.head_dim + self.tokens)
        return _HEADER.size + 4 * self.tokens + 4 * scales + numbers + _CHECKSUM.size

    @property
    def float_bytes(self) -> int:
        """What its keys and values take as float32."""
        return 8 * self.layers * self.kv_heads * self.tokens * self.head_dim


@dataclass(frozen=True)
class Quantised:
    """Keys and values int8 [..., tokens, head_dim]; key scales float32 [..., head_dim], value scales [..., tokens]."""

    keys: torch.Tensor
    key_scales: torch.Tensor
    values: torch.Tensor
    value_scales: torch.Tensor

    def dequantise_into(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write floats into tensors [..., tokens, head_dim] of any float dtype; computed in float32."""
        torch.mul(self.keys, self.key_scales.unsqueeze(-2), out=keys)
        torch.mul(self.values, self.value_scales.unsqueeze(-1), out=values)


def quantise(keys: torch.Tensor, values: torch.Tensor, bits: int = KEEP_BITS) -> Quantised:
    """Round a block's keys and values [..., tokens, head_dim] symmetrically to `bits` bits, at most 8.

    What is kept has 8; fewer are for measuring why. NaN or an infinity yields scales that aren't finite.
    """
    steps = 2 ** (bits - 1) - 1
    numbers, scales = [], []
    for tensor, dim in ((keys, -2), (values, -1)):
        floats = tensor.float()
        scale = floats.abs().amax(dim, keepdim=True) / steps
        numbers.append((floats / torch.where(scale > 0, scale, 1.0)).round_().to(torch.int8))
        scales.append(scale.squeeze(dim))
    return Quantised(numbers[0], scales[0], numbers[1], scales[1])


def encode_blocks(
    keys: torch.Tensor, values: torch.Tensor, names: Sequence[bytes], token_ids: Sequence[int]
) -> Iterator[bytes]:
    """The bytes of successive blocks, quantised as they are asked for.

    Args:
        keys, values: [layers, kv_heads, len(names) * tokens of a block, head_dim], on the CPU.
        names: of the blocks; a block's bytes are good under its own name only.
        token_ids: of all the blocks.

    Raises:
        BadBlockError: keys or values aren't finite; the blocks before are good.
    """
    layers, heads, total, head_dim = keys.shape
    tokens = total // len(names)
    header = _HEADER.pack(_MAGIC, _VERSION, layers, heads, tokens, head_dim)
    for index, name in enumerate(names):
        span = slice(index * tokens, (index + 1) * tokens)
        block = quantise(keys[:, :, span], values[:, :, span])
        if not (block.key_scales.isfinite().all() and block.value_scales.isfinite().all()):
            raise BadBlockError("not_finite")
        parts = (block.key_scales, block.value_scales, block.keys, block.values)
        body = b"".join(part.contiguous().numpy().tobytes() for part in parts)
        content = header + array("I", token_ids[span]).tobytes() + body
        yield content + _CHECKSUM.pack(_checksum(content, name))


def check_block(value: bytes, name: bytes, shape: BlockShape) -> None:
    """Whether bytes are the whole block of this name. Raises BadBlockError: foreign, version, shape, truncated or
    checksum."""
    if len(value) < _HEADER.size or value[:4] != _MAGIC:
        raise BadBlockError("truncated" if _MAGIC.startswith(value[:4]) else "foreign")
    _, version, *sizes = _HEADER.unpack_from(value)
    if version != _VERSION:
        raise BadBlockError("version")
    if BlockShape(*sizes) != shape:
        raise BadBlockError("shape")
    if len(value) != shape.value_bytes:
        raise BadBlockError("truncated" if len(value) < shape.value_bytes else "foreign")
    content = memoryview(value)[: -_CHECKSUM.size]
    if _CHECKSUM.unpack_from(value, len(content))[0] != _checksum(content, name):
        raise BadBlockError("checksum")


def decode_block(value: bytes, shape: BlockShape, token_ids: Sequence[int]) -> Quantised:
    """A block from bytes that `check_block` has nothing against.

    Args:
        token_ids: that it has to be for.

    Raises:
        BadBlockError: tokens: it is for others.
    """
    begin = _HEADER.size + 4 * shape.tokens
    if value[_HEADER.size : begin] != array("I", token_ids).tobytes():
        raise BadBlockError("tokens")
    return _parts(value, begin, shape)


def _parts(value: bytes, offset: int, shape: BlockShape) -> Quantised:
    layers, heads, tokens, head_dim = shape.layers, shape.kv_heads, shape.tokens, shape.head_dim
    buffer, parts = bytearray(value), []  # a copy: tensors can't be read-only
    for dtype, sizes in (
        (torch.float32, (layers, heads, head_dim)),
        (torch.float32, (layers, heads, tokens)),
        (torch.int8, (layers, heads, tokens, head_dim)),
        (torch.int8, (layers, heads, tokens, head_dim)),
    ):
        part = torch.frombuffer(buffer, dtype=dtype, count=math.prod(sizes), offset=offset)
        offset += part.nbytes
        parts.append(part.view(sizes))
    key_scales, value_scales, keys, values = parts
    return Quantised(keys, key_scales, values, value_scales)


def _checksum(content: bytes | memoryview, name: bytes) -> int:
    """Begins with the name, so that a block that lies under another one's name fails."""
    return zlib.crc32(content, zlib.crc32(name))
