"""The pseudo-quantisation check on a folder: are its weights computed with as they are stored?"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from sixfold_runtime.engine.checkpoint import TensorStore
from sixfold_runtime.engine.device import available_memory_bytes
from sixfold_runtime.engine.kernel_check import check_kernels
from sixfold_runtime.engine.linear import Linear, build_linear
from sixfold_runtime.engine.loader import compute_dtype
from sixfold_runtime.engine.quantized_module import quantised_names
from sixfold_runtime.prepare.evaluate import device
from sixfold_runtime.prepare.files import CONFIG, read_json


def check(source: Path, prepared: Path) -> dict[str, Any]:
    """Build every quantised linear as the engine does; what `KernelCheck` found, as JSON, on this Job's device."""
    where = device()
    available = available_memory_bytes(where)
    store = TensorStore(prepared)
    quantization = read_json(prepared / CONFIG)["quantization_config"]
    dtype = compute_dtype(store.weights, where, available, quantization)
    full_dtype = compute_dtype(TensorStore(source).weights, where, available)
    linears: dict[tuple[str, ...], Linear] = {
        (name,): build_linear(store, [name], quantization, dtype, where) for name in quantised_names(store)
    }
    return dataclasses.asdict(check_kernels(linears, store, dtype, full_dtype, where)) | {"device": where.type}
