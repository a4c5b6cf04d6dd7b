"""A LoRA adapter on prepared weights: merged into full ones, beside quantised ones that it was retrained for."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sixfold_api.precision import Scheme
from sixfold_runtime.engine.checkpoint import TensorStore
from sixfold_runtime.engine.errors import ModelLoadError
from sixfold_runtime.engine.lora import RETRAINED_FILE, base_digest, read_adapter
from sixfold_runtime.prepare.artifact import copy_beside_weights
from sixfold_runtime.prepare.failures import PreparationError, Reason
from sixfold_runtime.prepare.files import ADAPTER, read_json, weight_files

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


def import_peft() -> Any:
    """PEFT, which is made to believe that there is no GPTQModel: the bases here are torch's own linears.

    Else it would import GPTQModel, twenty seconds that also change transformers, and refuse to work without optimum.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    imported = sys.modules.pop("gptqmodel", None)
    sys.modules["gptqmodel"] = None  # type: ignore[assignment]
    try:
        importlib.import_module("peft.import_utils").is_gptqmodel_available()  # it remembers its answer
    finally:
        del sys.modules["gptqmodel"]
        if imported is not None:
            sys.modules["gptqmodel"] = imported
    return importlib.import_module("peft")


def require_adapter(folder: Path) -> None:
    """Raises PreparationError(UnusableAdapter) if the folder holds no adapter in PEFT's format and safetensors."""
    content = read_json(folder / ADAPTER_CONFIG, Reason.UNUSABLE_ADAPTER)
    if content.get("peft_type") != "LORA":
        raise PreparationError(
            Reason.UNUSABLE_ADAPTER, f"{ADAPTER_CONFIG} describes {content.get('peft_type')!r}, expected LORA"
        )
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise PreparationError(
            Reason.UNUSABLE_ADAPTER,
            f"{ADAPTER_WEIGHTS} is missing: save the adapter with PEFT's save_pretrained, as safetensors",
        )


def put_on(source: Path, scheme: Scheme, adapter: Path, target: Path, log: Callable[[str], None]) -> None:
    """Write the model in `source` with the adapter to `target`.

    Raises PreparationError: UnusableAdapter, or AdapterNotRetrained for quantised weights that it doesn't know.
    """
    require_adapter(adapter)
    if scheme is Scheme.NONE:
        log(f"merging the adapter {adapter.name} into full-precision weights")
        _merge(source, adapter, target)
    else:
        _put_beside(source, scheme, adapter, target)


def _merge(source: Path, adapter: Path, target: Path) -> None:
    transformers: Any = importlib.import_module("transformers")
    peft = import_peft()
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto", local_files_only=True)
    try:
        merged = peft.PeftModel.from_pretrained(model, adapter).merge_and_unload(safe_merge=True)
    except Exception as error:  # foreign code on foreign input: it raises anything
        raise PreparationError(
            Reason.UNUSABLE_ADAPTER, f"{adapter.name} does not fit these weights: {error}"
        ) from error
    merged.save_pretrained(target)
    copy_beside_weights(source, target)


def _put_beside(source: Path, scheme: Scheme, adapter: Path, target: Path) -> None:
    store = TensorStore(source)
    path = adapter / RETRAINED_FILE
    marker = read_json(path, Reason.UNUSABLE_ADAPTER) if path.is_file() else {}
    if marker.get("base_digest") != base_digest(store):
        found = "for other weights" if marker else "on full precision"
        raise PreparationError(
            Reason.ADAPTER_NOT_RETRAINED,
            f"the adapter {adapter.name} was trained {found}, and these are quantised ({scheme}): run `sixfold prepare "
            f"lora --base {source} --adapter {adapter} --text FILE.jsonl --out FOLDER`, and give its folder as lora",
        )
    try:
        read_adapter(adapter)
    except ModelLoadError as error:
        raise PreparationError(Reason.UNUSABLE_ADAPTER, str(error)) from error
    copy_beside_weights(source, target)
    weights = weight_files(source, [path.name for path in source.iterdir()])
    for name in [*weights, *(path.name for path in source.glob("*.index.json"))]:
        shutil.copyfile(source / name, target / name)
    (target / ADAPTER).mkdir()
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS, RETRAINED_FILE):
        shutil.copyfile(adapter / name, target / ADAPTER / name)
