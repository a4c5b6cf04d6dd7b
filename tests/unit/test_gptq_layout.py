"""GPTQ checkpoints packed by hand, bit by bit: what is unpacked, and what linears make of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from sixfold_runtime.engine import gptq_layout
from sixfold_runtime.engine.checkpoint import TensorStore
from sixfold_runtime.engine.errors import ModelLoadError
from sixfold_runtime.engine.linear import build_linear

MULTIPLE = {2: 16, 3: 32, 4: 8, 8: 4}
"""Integers that fill whole words."""


def pack(integers: np.ndarray, bits: int) -> torch.Tensor:
    """int32 [words, columns] of integers [n, columns]: one stream of bits a column, lowest first."""
    stream = (integers[:, None, :] >> np.arange(bits)[None, :, None]) & 1
    octets = np.packbits(stream.reshape(-1, integers.shape[1]).astype(np.uint8), axis=0, bitorder="little")
    words = np.ascontiguousarray(octets.T).view("<i4").T
    return torch.from_numpy(words.copy(order="C").reshape(words.shape))


def save(
    folder: Path,
    bits: int,
    integers: np.ndarray,
    zeros: np.ndarray,
    group_of: np.ndarray,
    bias: torch.Tensor | None = None,
) -> TensorStore:
    """A checkpoint of one linear `m`; `zeros` are packed as they are."""
    scales = torch.rand(zeros.shape, generator=torch.Generator().manual_seed(1)).half()
    tensors = {
        "m.qweight": pack(integers, bits),
        "m.qzeros": pack(zeros.T, bits).t().contiguous(),
        "m.scales": scales,
        "m.g_idx": torch.from_numpy(group_of.astype(np.int32)),
    }
    if bias is not None:
        tensors["m.bias"] = bias
    save_file(tensors, folder / "model.safetensors")
    return TensorStore(folder)


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from(gptq_layout.BITS),
    words=st.integers(1, 9),
    columns=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
)
def test_unpacked_integers_are_those_packed(bits: int, words: int, columns: int, seed: int) -> None:
    integers = np.random.default_rng(seed).integers(0, 2**bits, (words * MULTIPLE[bits], columns))
    packed = pack(integers, bits)
    assert packed.shape[0] == integers.shape[0] * bits // 32
    unpacked = gptq_layout.unpack(packed, bits, len(integers))
    assert unpacked.dtype == torch.uint8
    assert np.array_equal(unpacked.numpy(), integers)


@pytest.mark.parametrize("bits", gptq_layout.BITS)
@pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
def test_weight_is_integer_less_zero_point_times_scale(tmp_path: Path, bits: int, layout: str) -> None:
    random = np.random.default_rng(bits)
    inputs, outputs, groups = 128, 32, 4
    integers = random.integers(0, 2**bits, (inputs, outputs))
    zeros = random.integers(1, 2**bits, (groups, outputs))
    group_of = random.permutation(np.arange(inputs) // (inputs // groups))  # as desc_act leaves them
    store = save(tmp_path, bits, integers, zeros - 1 if layout == "gptq" else zeros, group_of)
    weight = gptq_layout.read(store, "m", {"checkpoint_format": layout})
    assert (weight.bits, weight.group_size) == (bits, 32)
    scales = store.get("m.scales").float().numpy()
    expected = (integers - zeros[group_of]) * scales[group_of]
    assert np.array_equal(weight.dequantised().numpy(), expected.T.astype(np.float32))
    order = weight.input_order()
    assert order is not None
    assert np.array_equal(group_of[order.numpy()], np.arange(inputs) // 32)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zero_point_of_zero_borrows_from_its_neighbour(tmp_path: Path, bits: int) -> None:
    """GPTQModel subtracts the ones from whole words."""
    random = np.random.default_rng(9)
    zeros = random.integers(0, 2, (2, 32))
    store = save(tmp_path, bits, random.integers(0, 2**bits, (64, 32)), zeros, np.arange(64) // 32)
    tensors = {name: store.get(name).clone() for name in store.names}
    ones = int(pack(np.ones((32 // bits, 1), dtype=int), bits)[0, 0])
    tensors["m.qzeros"] -= ones
    save_file(tensors, tmp_path / "model.safetensors")
    assert np.array_equal(gptq_layout.read(TensorStore(tmp_path), "m", {}).zeros.numpy(), zeros)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("desc_act", [True, False])
@pytest.mark.parametrize(
    ("bits", "inputs", "group", "outputs", "kernel"),
    [
        (4, 128, 32, 32, "int4"),
        (4, 1024, 1024, 64, "int4"),
        (4, 96, -1, 40, "int4"),
        (3, 256, 128, 32, "int4"),
        (2, 256, 64, 128, "int4"),
        (8, 512, 512, 64, "int8-as-int4"),
        (8, 64, 32, 4, "int8-as-int4"),
        (4, 80, 16, 32, "dequantised"),
    ],
)
def test_linear_multiplies_by_the_weights(
    tmp_path: Path, bits: int, inputs: int, group: int, outputs: int, kernel: str, desc_act: bool, symmetric: bool
) -> None:
    """One row, a few, and as many as take the path that unpacks; with outputs that fill no block of the kernel."""
    random = np.random.default_rng(inputs + outputs)
    group = inputs if group == -1 else group
    integers = random.integers(0, 2**bits, (inputs, outputs))
    middle = 2 ** (bits - 1)
    zeros = np.full((inputs // group, outputs), middle) if symmetric else random.integers(1, 2**bits, (1, outputs))
    zeros = np.broadcast_to(zeros, (inputs // group, outputs))
    group_of = np.arange(inputs) // group
    group_of = random.permutation(group_of) if desc_act else group_of
    bias = torch.randn(outputs, generator=torch.Generator().manual_seed(2)).half()
    store = save(tmp_path, bits, integers, zeros - 1, group_of, bias)
    weight = gptq_layout.read(store, "m", {}).dequantised()
    linear = build_linear(store, ["m"], {}, torch.bfloat16, torch.device("cpu"))
    assert (linear.kernel, linear.in_features, linear.out_features) == (kernel, inputs, outputs)
    for rows in (1, 5, 64):
        x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).bfloat16()
        expected = x.float() @ weight.t() + bias.float()
        assert (linear(x).float() - expected).norm() / expected.norm() < 0.006


def test_groups_of_unequal_size_have_no_order(tmp_path: Path) -> None:
    integers = np.ones((64, 8), dtype=int)
    store = save(tmp_path, 4, integers, np.ones((2, 8), dtype=int), np.arange(64) // 40)
    assert gptq_layout.read(store, "m", {}).input_order() is None


def test_weights_with_other_groups_are_not_put_side_by_side(tmp_path: Path) -> None:
    integers, zeros = np.ones((64, 8), dtype=int), np.ones((2, 8), dtype=int)
    first = gptq_layout.read(save(tmp_path, 4, integers, zeros, np.arange(64) // 32), "m", {})
    second = gptq_layout.read(save(tmp_path, 4, integers, zeros, np.arange(64) % 2), "m", {})
    together = gptq_layout.side_by_side([first, first])
    assert together is not None
    assert together.integers.shape == (64, 16)
    assert torch.equal(together.dequantised(), torch.cat((first.dequantised(), first.dequantised())))
    assert gptq_layout.side_by_side([first, second]) is None


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        ("m.g_idx", "no g_idx"),
        ("m.qzeros", "don't belong together"),
        ("m.qweight", "don't belong together"),
    ],
)
def test_broken_layout_is_refused_by_name(tmp_path: Path, broken: str, expected: str) -> None:
    integers, zeros = np.ones((64, 8), dtype=int), np.ones((2, 8), dtype=int)
    store = save(tmp_path, 4, integers, zeros, np.arange(64) // 32)
    tensors = {name: store.get(name).clone() for name in store.names}
    if broken == "m.g_idx":
        del tensors[broken]
    else:
        tensors[broken] = tensors[broken][:1].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=expected):
        gptq_layout.read(TensorStore(tmp_path), "m", {})


def test_other_formats_are_refused(tmp_path: Path) -> None:
    store = save(tmp_path, 4, np.ones((64, 8), dtype=int), np.ones((2, 8), dtype=int), np.arange(64) // 32)
    with pytest.raises(ModelLoadError, match="marlin"):
        gptq_layout.read(store, "m", {"checkpoint_format": "marlin"})
