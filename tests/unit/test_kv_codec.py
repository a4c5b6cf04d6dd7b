"""Blocks of keys and values as bytes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sixfold_runtime.engine.kv_codec import (
    BadBlockError,
    BlockShape,
    Quantised,
    check_block,
    decode_block,
    encode_blocks,
    quantise,
)

SHAPE = BlockShape(layers=3, kv_heads=2, tokens=16, head_dim=8)
IDS = list(range(100, 148))
NAMES = [bytes([index]) * 32 for index in range(3)]


def tensors(blocks: int = 3, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    dice = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(3, 2, 16 * blocks, 8, generator=dice) for _ in range(2))
    keys[..., 3] *= 50  # a channel as keys have them
    return keys.to(dtype), values.to(dtype)


@cache
def encoded() -> list[bytes]:
    return list(encode_blocks(*tensors(), NAMES, IDS))


def decode(value: bytes, name: bytes = NAMES[0], shape: BlockShape = SHAPE, ids: Sequence[int] = IDS[:16]) -> Quantised:
    check_block(value, name, shape)
    return decode_block(value, shape, ids)


def decoded(values: list[bytes]) -> list[Quantised]:
    return [
        decode(value, name, SHAPE, IDS[16 * index : 16 * index + 16])
        for index, (value, name) in enumerate(zip(values, NAMES, strict=True))
    ]


def dequantise(blocks: Sequence[Quantised], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    planes = torch.empty(3, 2, 16 * len(blocks), 8, dtype=dtype), torch.empty(3, 2, 16 * len(blocks), 8, dtype=dtype)
    for index, block in enumerate(blocks):
        keys, values = (plane[:, :, 16 * index : 16 * index + 16] for plane in planes)
        block.dequantise_into(keys, values)
    return planes


def test_what_comes_back_is_what_was_rounded_and_every_block_has_the_promised_size() -> None:
    keys, values = tensors()
    assert {len(value) for value in encoded()} == {SHAPE.value_bytes}
    back = dequantise(decoded(encoded()))
    for original, returned in zip((keys, values), back, strict=True):
        psnr = 10 * torch.log10(original.abs().max() ** 2 / (original - returned).pow(2).mean())
        assert psnr > 42
    per_channel = keys.view(3, 2, 3, 16, 8).abs().amax(3, keepdim=True) / 254 * 1.001
    assert ((back[0] - keys).view(3, 2, 3, 16, 8).abs() <= per_channel).all()


def test_a_round_trip_of_a_round_trip_changes_nothing_that_matters() -> None:
    once = dequantise(decoded(encoded()))
    twice = dequantise(decoded(list(encode_blocks(*once, NAMES, IDS))))
    torch.testing.assert_close(once, twice, rtol=1e-6, atol=0)


def test_half_precision_comes_back_as_it_went() -> None:
    keys, values = dequantise(decoded(list(encode_blocks(*tensors(dtype=torch.bfloat16), NAMES, IDS))), torch.bfloat16)
    assert keys.dtype == values.dtype == torch.bfloat16
    torch.testing.assert_close(values, tensors(dtype=torch.bfloat16)[1], rtol=0.02, atol=0.02)


def test_four_bits_lose_more_than_eight_and_zeros_stay_zero() -> None:
    keys, values = tensors()

    def error(bits: int) -> float:
        back = torch.empty_like(keys), torch.empty_like(values)
        quantise(keys, values, bits).dequantise_into(*back)
        return float((back[0] - keys).pow(2).mean())

    assert error(4) > 100 * error(8)
    zeros, back = torch.zeros(1, 1, 16, 8), (torch.ones(1, 1, 16, 8), torch.ones(1, 1, 16, 8))
    quantise(zeros, zeros).dequantise_into(*back)
    assert not back[0].any() and not back[1].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_kept_and_what_is_before_it_is(bad: float) -> None:
    keys, values = tensors()
    values[1, 0, 20, 3] = bad
    blocks = encode_blocks(keys, values, NAMES, IDS)
    next(blocks)
    with pytest.raises(BadBlockError, match="not_finite"):
        next(blocks)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"", "truncated"),
        (b"6F", "truncated"),
        (b"some other program's", "foreign"),
        (encoded()[0][:-1], "truncated"),
        (encoded()[0] + b"\0", "foreign"),
        (b"6FKV\xff" + encoded()[0][5:], "version"),
        (encoded()[1], "checksum"),
        (next(encode_blocks(*tensors(1), NAMES[:1], range(16))), "tokens"),
    ],
)
def test_other_bytes_are_refused_with_a_reason(value: bytes, reason: str) -> None:
    with pytest.raises(BadBlockError, match=reason):
        decode(value)


def test_another_models_block_is_refused() -> None:
    with pytest.raises(BadBlockError, match="shape"):
        decode(encoded()[0], shape=BlockShape(3, 2, 8, 16))


@given(st.binary(max_size=64) | st.builds(lambda tail: encoded()[0][:20] + tail, st.binary(max_size=SHAPE.value_bytes)))
def test_no_bytes_at_all_do_anything_but_decode_or_be_refused(value: bytes) -> None:
    with pytest.raises(BadBlockError):
        decode(value)


@given(st.integers(0, SHAPE.value_bytes - 1), st.integers(1, 255))
def test_one_changed_byte_is_noticed(place: int, change: int) -> None:
    value = bytearray(encoded()[0])
    value[place] ^= change
    with pytest.raises(BadBlockError):
        decode(bytes(value))
