"""safetensors files, read without trusting them: the header is checked against the bytes that are there.

Format: 8 bytes of little-endian header length, a JSON header, then the tensors' bytes, without holes.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from sixfold_runtime.prepare.failures import PreparationError, Reason

_MAX_HEADER_BYTES = 100 * 2**20
_CHUNK_BYTES = 64 * 2**20
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: `begin` and `end` are byte offsets after the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class WeightFile:
    """A weight file that was read to its end."""

    sha256: str
    size_bytes: int
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
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != needed:
        raise _corrupt(name, f"{tensor} has shape {shape} of {dtype}, {needed} bytes, and {end - begin} are set aside")
    return TensorEntry(tensor, DTYPES[dtype], tuple(shape), begin, end)


def _corrupt(name: str, what: str) -> PreparationError:
    return PreparationError(Reason.CORRUPT_WEIGHTS, f"{name} is corrupt: {what}. Fetch or write the file anew")


def read(path: Path) -> WeightFile:
    """Read a weight file once, from end to end: header, SHA-256, and that every floating-point value is finite.

    Raises PreparationError: CorruptWeights, UnsupportedFormat, NonFiniteWeights.
    """
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        prefix = file.read(8)
        digest.update(prefix)
        header_bytes = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or header_bytes > min(size - 8, _MAX_HEADER_BYTES):
            raise _corrupt(path.name, f"it has {size} bytes and no header of a safetensors file")
        header = file.read(header_bytes)
        digest.update(header)
        tensors = parse_header(path.name, header, size - 8 - header_bytes)
        for tensor in tensors:
            _read_tensor(file, path.name, tensor, digest)
    return WeightFile(digest.hexdigest(), size, tensors)


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


def _is_finite(chunk: bytearray, dtype: torch.dtype) -> bool:
    values = torch.frombuffer(chunk, dtype=dtype)
    if dtype.itemsize == 1:
        values = values.float()
    return bool(values.isfinite().all())
