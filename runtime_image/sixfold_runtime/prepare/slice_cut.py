"""Cut a task slice out of a checkpoint that was tuned for the task from a trunk."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import torch

from sixfold_api.scalars import Task
from sixfold_api.subgraphs import SliceReport
from sixfold_runtime.engine.checkpoint import TensorStore
from sixfold_runtime.engine.loader import LoadedModel
from sixfold_runtime.engine.slice_file import slice_info, write_slice
from sixfold_runtime.engine.task_slice import TaskSlice
from sixfold_runtime.prepare.failures import PreparationError, Reason
from sixfold_runtime.prepare.files import read_config
from sixfold_runtime.prepare.slice_diff import difference
from sixfold_runtime.prepare.slice_trunk import SliceTrunk, label_logits, open_model, open_trunk, own_task, token_logits

TOLERANCE = 1e-5
"""By so much, relative to the largest logit (and at least absolutely), logits with the slice may differ."""
_CPU = torch.device("cpu")
_SAMPLE_TOKENS = (1, 2, 5, 9, 16, 24, 40, 64)


def cut(
    trunk: SliceTrunk | Path, checkpoint: Path, target: Path, log: Callable[[str], None], task: Task | None = None
) -> SliceReport:
    """Write what `checkpoint` has of its own to `target`, once its logits are those of the checkpoint.

    Args:
        trunk: the opened trunk, or its folder. Logits are compared on the CPU, where fp32 is exact enough.
        task: of the slice; absent means what the checkpoint's architecture is for.

    Raises PreparationError(UnusableSlice): the checkpoint isn't the trunk with other feed-forward parts and head, it is
        for another task, or trunk and slice don't give its logits.
    """
    began = time.monotonic()
    _require_task(checkpoint, task)
    folder = trunk if isinstance(trunk, Path) else trunk.folder
    _require_full_precision(folder)
    _require_full_precision(checkpoint)
    if isinstance(trunk, Path) or trunk.model.device != _CPU:
        trunk = open_trunk(folder, _CPU)
    tuned = open_model(checkpoint, _CPU)
    trunk.require_task(tuned.served.task)
    layers = [trunk.host.mlp_modules(index) for index in range(trunk.host.layers)]
    found = difference(TensorStore(folder), TensorStore(checkpoint), layers, tuned.served.task)
    partial = target.with_name(f".{target.name}.new")
    write_slice(partial, found.tensors, tuned.served.task, tuned.labels, trunk.fingerprint)
    try:
        distance = _distance(trunk, tuned, trunk.load(partial))
        partial.rename(target)
    finally:
        partial.unlink(missing_ok=True)
    info = slice_info(target)
    ranks = f" of ranks {min(found.deltas.values())} to {max(found.deltas.values())}" if found.deltas else ""
    log(
        f"{info.name}: {found.replaced} modules replaced, {len(found.deltas)} low-rank deltas{ranks}, "
        f"{info.size_bytes} bytes; logits differ by {distance:.1e} at most; {time.monotonic() - began:.1f} s"
    )
    return SliceReport(name=info.name, task=info.task, size_bytes=info.size_bytes)


def _require_task(checkpoint: Path, task: Task | None) -> None:
    own = own_task(checkpoint)
    if task is not None and task is not own:
        raise PreparationError(
            Reason.UNUSABLE_SLICE, f"{checkpoint.name} is a model for {own}, and the slice is to be for {task}"
        )


def _require_full_precision(folder: Path) -> None:
    if read_config(folder).get("quantization_config"):
        raise PreparationError(
            Reason.UNUSABLE_SLICE,
            f"{folder.name} is quantised, so nothing in it equals other weights: cut from full-precision weights, or "
            "train an adapter over the quantised trunk (`sixfold prepare slice train`)",
        )


def _distance(trunk: SliceTrunk, tuned: LoadedModel, task_slice: TaskSlice) -> float:
    """Largest difference of a logit between trunk with slice and the checkpoint, on random texts.

    Raises PreparationError(UnusableSlice): it is more than TOLERANCE.
    """
    order = random.Random(0)
    texts = [
        [order.randrange(tuned.vocabulary_tokens) for _ in range(min(length, tuned.context_tokens))]
        for length in _SAMPLE_TOKENS
    ]
    logits = token_logits if task_slice.task is Task.GENERATION else label_logits
    worst = 0.0
    pairs = zip(logits(trunk.model, texts, task_slice), logits(tuned, texts, None), strict=True)
    for sliced, whole in pairs:
        distance = float((sliced - whole).abs().max())
        if not distance <= TOLERANCE * max(1.0, float(whole.abs().max())):
            raise PreparationError(
                Reason.UNUSABLE_SLICE,
                f"trunk and slice don't give the checkpoint's logits: they differ by {distance:.2g}, and {TOLERANCE} "
                "of the largest is allowed; the slice was not written",
            )
        worst = max(worst, distance)
    return worst
