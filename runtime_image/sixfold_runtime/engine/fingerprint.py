"""Tells trunks apart: a task slice or exit heads compute only with the weights that they were made for.

A digest of all bytes would read gigabytes before the first answer. Names, types, shapes and a sample of each tensor's
bytes tell models apart just as well, since training changes weights everywhere; the artifact's own digest, of every
byte, is the preparation's.
"""

from __future__ import annotations

import hashlib

import torch

from sixfold_runtime.engine.checkpoint import TensorStore

_END_BYTES = 4096
_SAMPLES = 64
_SAMPLE_BYTES = 64


def trunk_fingerprint(store: TensorStore) -> str:
    """ "sha256:..." over the weights of a model folder, without its exit heads and task slices.

    Of each tensor, by name: type, shape, the first and last 4 KiB, and 64 samples of 64 bytes spread evenly.
    """
    digest = hashlib.sha256()
    for name in sorted(store.names):
        tensor = store.get(name)
        digest.update(f"{name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}\n".encode())
        _sample(tensor, digest)
    return f"sha256:{digest.hexdigest()}"


def _sample(tensor: torch.Tensor, digest: hashlib._Hash) -> None:
    if not tensor.numel():
        return
    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    size = len(content)
    if size <= 2 * _END_BYTES + _SAMPLES * _SAMPLE_BYTES:
        digest.update(content)
        return
    digest.update(content[:_END_BYTES])
    last = size - _SAMPLE_BYTES
    for index in range(_SAMPLES):
        begin = last * index // (_SAMPLES - 1)
        digest.update(content[begin : begin + _SAMPLE_BYTES])
    digest.update(content[-_END_BYTES:])
