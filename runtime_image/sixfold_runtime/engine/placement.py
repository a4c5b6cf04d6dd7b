"""Where full and quantised weights are: both in memory, or one of them at a time.

The decision is pure; what it needs is read from config.json and from the headers of the weight files, before any
weight is.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from sixfold_api.scalars import FullWeights
from sixfold_runtime.engine.checkpoint import TensorStore, quantization_of
from sixfold_runtime.engine.tokenizer import read_json

RESIDENT_ROWS, RESIDENT_TOKENS = 8, 8192
"""Two sets of weights have to leave memory for the KV of this many requests each, at full length or this one."""


def choose_placement(
    setting: FullWeights, available_bytes: int, full_bytes: int, quantized_bytes: int, kv_bytes: int
) -> FullWeights:
    """Resident if both sets of weights fit beside the KV caches, else Swap; what isn't Auto is obeyed.

    Args:
        available_bytes: memory without either set, what the draft takes subtracted.
        kv_bytes: memory that has to remain for KV caches.
    """
    if setting is not FullWeights.AUTO:
        return setting
    fits = full_bytes + quantized_bytes + kv_bytes <= available_bytes
    return FullWeights.RESIDENT if fits else FullWeights.SWAP


def kv_token_bytes(config: Mapping[str, Any], item_bytes: int) -> int:
    """Bytes of KV that one token takes in a decoder with this config.json; an upper bound for exotic ones."""
    heads = int(config.get("num_attention_heads") or config.get("n_head") or 1)
    hidden = int(config.get("hidden_size") or config.get("n_embd") or 0)
    layers = int(config.get("num_hidden_layers") or config.get("n_layer") or 0)
    head_dim = int(config.get("head_dim") or hidden // heads)
    return 2 * layers * int(config.get("num_key_value_heads") or heads) * head_dim * item_bytes


def needed_kv_bytes(folder: Path, item_bytes: int, kv_share: float) -> int:
    """Memory that two sets of weights have to leave, where `kv_share` of it becomes KV caches.

    Raises:
        ModelLoadError: there is no config.json.
    """
    config = read_json(folder / "config.json", required=True)
    tokens = min(int(config.get("max_position_embeddings") or RESIDENT_TOKENS), RESIDENT_TOKENS)
    return int(2 * RESIDENT_ROWS * tokens * kv_token_bytes(config, item_bytes) / kv_share)


def weight_bytes(folder: Path, device: torch.device, available_bytes: int) -> int:
    """About what the weights of a folder will take once loaded: as stored, or in fp32 where a CPU has room for that.

    Raises:
        ModelLoadError: the folder is no model's, or damaged.
    """
    store = TensorStore(folder)
    stored_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    is_quantized = quantization_of(read_json(folder / "config.json", required=True)) is not None
    fp32_bytes = store.weights.fp32_bytes
    if device.type == "cpu" and not is_quantized and fp32_bytes <= available_bytes // 2:
        return fp32_bytes
    return stored_bytes


def release_memory(device: torch.device, have_cycles: bool) -> None:
    """Give back what deleted weights held: to the driver, or to the operating system.

    Args:
        have_cycles: the weights hold themselves, as modules of transformers do. Collecting them stops the whole
            process for a good part of a second.
    """
    if have_cycles:
        gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with suppress(AttributeError, OSError):  # glibc keeps freed blocks below 32 MiB otherwise; others have no such call
        ctypes.CDLL(None).malloc_trim(0)
