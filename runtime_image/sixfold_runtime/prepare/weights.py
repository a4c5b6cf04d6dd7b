"""safetensors files, read without trusting them: the header is checked against the bytes that are there.

Format: 8 bytes of little-endian header length, a JSON header, then the tensors' bytes, without holes. Headers are read
without torch, which takes seconds to import.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from sixfold_runtime.prepare.failures import PreparationError, Reason

_MAX_HEADER_BYTES = 100 * 2**20
_CHUNK_BYTES = 64 * 2**20
_PREFIX_BYTES = 8


@dataclass(frozen=True)
class DataType:
    """A data type by the name that torch has for it."""

    name: str
    item_bytes: int
    is_floating_point: bool


DTYPES = {
    "F64": DataType("float64", 8, True),
    "F32": DataType("float32", 4, True),
    "F16": DataType("float16", 2, True),
    "BF16": DataType("bfloat16", 2, True),
    "F8_E4M3": DataType("float8_e4m3fn", 1, True),
    "F8_E5M2": DataType("float8_e5m2", 1, True),
    "I64": DataType("int64", 8, False),
    "I32": DataType("int32", 4, False),
    "I16": DataType("int16", 2, False),
    "I8": DataType("int8", 1, False),
    "U8": DataType("uint8", 1, False),
    "BOOL": DataType("bool", 1, False),
}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: `begin` and `end` are byte offsets after the header."""

    name: str
    dtype: DataType
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class WeightFile:
    """A weight file whose header was read: `data_begin` is the byte offset of the first tensor."""

    path: Path
    size_bytes: int
    data_begin: int
    tensors: tuple[TensorEntry, ...]


def parse_header(name: str, header: bytes, data_bytes: int) -> tuple[TensorEntry, ...]:
    """The tensors that a header describes, in the order of their bytes.

    Args:
        name: name of the file, for messages.
        header: the JSON text.
        data_bytes: number of bytes behind the header.

    Raises PreparationError: CorruptWeights, or UnsupportedFormat for a data type that can't be served.
    """
    try:
        content = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise _corrupt(name, f"its header is no JSON ({error})") from error
    if not isinstance(content, dict):
        raise _corrupt(name, "its header is no JSON object")
    content.pop("__metadata__", None)
    entries = sorted((_entry(name, key, value) for key, value in content.items()), key=lambda e: (e.begin, e.end))
    position = 0
    for entry in entries:
        if entry.begin != position:
            raise _corrupt(name, f"the bytes of {entry.name} begin at {entry.begin} and should begin at {position}")
        position = entry.end
    if position > data_bytes:
        raise _corrupt(name, f"it is cut off: the header promises {position} bytes of tensors, {data_bytes} are there")
    if position < data_bytes:
        raise _corrupt(name, f"{data_bytes - position} bytes at its end belong to no tensor")
    if not entries:
        raise _corrupt(name, "it holds no tensors")
    return tuple(entries)


def _entry(name: str, tensor: str, value: Any) -> TensorEntry:
    try:
        dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
        numbers = [*shape, begin, end]
    except (TypeError, KeyError, ValueError) as error:
        raise _corrupt(name, f"the header's entry of {tensor} lacks dtype, shape or data_offsets") from error
    if not isinstance(shape, list) or not all(type(number) is int and number >= 0 for number in numbers):
        raise _corrupt(name, f"the header's entry of {tensor} has numbers that are no sizes")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise PreparationError(
            Reason.UNSUPPORTED_FORMAT,
            f"{name}: {tensor} has data type {dtype!r}; known are {', '.join(DTYPES)}",
        )
    needed = math.prod(shape) * DTYPES[dtype].item_bytes
    if end - begin != needed:
        raise _corrupt(name, f"{tensor} has shape {shape} of {dtype}, {needed} bytes, and {end - begin} are set aside")
    return TensorEntry(tensor, DTYPES[dtype], tuple(shape), begin, end)


def _corrupt(name: str, what: str) -> PreparationError:
    return PreparationError(Reason.CORRUPT_WEIGHTS, f"{name} is corrupt: {what}. Fetch or write the file anew")


def read_header(path: Path) -> WeightFile:
    """What a weight file says that it holds. Raises PreparationError: CorruptWeights, UnsupportedFormat."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(_PREFIX_BYTES)
        header_bytes = int.from_bytes(prefix, "little")
        if len(prefix) < _PREFIX_BYTES or header_bytes > min(size - _PREFIX_BYTES, _MAX_HEADER_BYTES):
            raise _corrupt(path.name, f"it has {size} bytes and no header of a safetensors file")
        header = file.read(header_bytes)
    begin = _PREFIX_BYTES + header_bytes
    return WeightFile(path, size, begin, parse_header(path.name, header, size - begin))


def read_values(weights: WeightFile) -> str:
    """Read a weight file from end to end: its SHA-256, and that every floating-point value is finite.

    Raises PreparationError: CorruptWeights if the file ends too early, NonFiniteWeights.
    """
    digest = hashlib.sha256()
    with weights.path.open("rb") as file:
        digest.update(file.read(weights.data_begin))
        for tensor in weights.tensors:
            _read_tensor(file, weights.path.name, tensor, digest)
    return digest.hexdigest()


def _read_tensor(file: BinaryIO, name: str, tensor: TensorEntry, digest: Any) -> None:
    remaining = tensor.end - tensor.begin
    while remaining:
        chunk = bytearray(file.read(min(_CHUNK_BYTES, remaining)))
        if not chunk:
            raise _corrupt(name, f"it ended inside of {tensor.name}")
        digest.update(chunk)
        remaining -= len(chunk)
        if tensor.dtype.is_floating_point and not _is_finite(chunk, tensor.dtype):
            raise PreparationError(
                Reason.NON_FINITE_WEIGHTS,
                f"{name}: {tensor.name} holds NaN or infinite values; a model with them answers nonsense",
            )


def _is_finite(chunk: bytearray, dtype: DataType) -> bool:
    import torch

    values = torch.frombuffer(chunk, dtype=getattr(torch, dtype.name))
    if dtype.item_bytes == 1:
        values = values.float()
    return bool(values.isfinite().all())
