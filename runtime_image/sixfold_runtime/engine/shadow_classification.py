"""A classifier's answer computed again: through all layers, alone, by the same head."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch

from sixfold_api.scalars import Task
from sixfold_runtime.engine.classification_queue import Text
from sixfold_runtime.engine.classification_run import Answer, first_forward
from sixfold_runtime.engine.loader import LoadedModel
from sixfold_runtime.engine.shadow import GivenUpError, Pieces, ShadowJob, Shadows
from sixfold_runtime.engine.shadow_metrics import ShadowMetrics
from sixfold_runtime.engine.slice_pool import SlicePool
from sixfold_runtime.engine.task_slice import TaskSlice
from sixfold_runtime.engine.trunk import Trunk
from sixfold_runtime.modes.shadow import is_sampled


@dataclass(frozen=True)
class ClassificationShadow:
    """Takes the answers of one classifier."""

    shadows: Shadows
    model: LoadedModel
    slices: SlicePool | None
    metrics: ShadowMetrics
    piece_tokens: int
    """A piece computes at most so many tokens through all layers, or one layer."""

    def answered(self, text: Text, answer: Answer) -> None:
        """Level 0 isn't compared with itself."""
        if text.level == 0 or not is_sampled(text.request.id, text.shadow_rate):
            return
        # An answer that labels tokens differs if the label of any token does.
        labels = tuple(best.label for best in answer.token_labels or answer.scores[:1])
        token_ids, task = tuple(text.request.token_ids), text.request.task
        kind = Task.TOKEN_CLASSIFICATION if answer.token_labels else Task.CLASSIFICATION
        self.shadows.offer(
            ShadowJob(self.metrics, kind.value, text.level, text.arm, lambda: self._compare(token_ids, task, labels))
        )

    def _compare(self, token_ids: tuple[int, ...], task: str, labels: tuple[str, ...]) -> Pieces:
        if self.model.trunk is None:
            logits, names = first_forward(self.model, list(token_ids)), self.model.labels
        elif not task:
            logits, names = yield from self._logits(self.model.trunk, token_ids, None)
        else:
            task_slice = None if self.slices is None else self.slices.borrow(task)
            if task_slice is None or self.slices is None:
                raise GivenUpError(f"the slice of task {task} isn't in memory any more")
            try:
                logits, names = yield from self._logits(self.model.trunk, token_ids, task_slice)
            finally:
                self.slices.release(task)
        if not bool(torch.isfinite(logits).all()):
            raise GivenUpError("level 0 computes NaN or infinite logits")
        return labels == tuple(names[index] for index in logits.argmax(dim=-1).tolist())

    def _logits(
        self, trunk: Trunk, token_ids: tuple[int, ...], task_slice: TaskSlice | None
    ) -> Generator[None, None, tuple[torch.Tensor, tuple[str, ...]]]:
        """float32 [1, labels], of a token classification [tokens, labels]; and the labels."""
        head = trunk.own_head if task_slice is None else task_slice.head
        assert head is not None, "or there would be no answer"
        slices = None if task_slice is None else [task_slice]
        step_layers = max(1, self.piece_tokens * trunk.layers // len(token_ids))
        with torch.inference_mode():
            rows = trunk.embed([token_ids])
        for index in range(trunk.layers):
            with torch.inference_mode():
                rows = trunk.layer(index, rows, slices)
            if (index + 1) % step_layers == 0 and index + 1 < trunk.layers:
                _wait_for(trunk.device)
                yield
        with torch.inference_mode():
            return head(rows), head.labels


def _wait_for(device: torch.device) -> None:
    """Or pieces would pile up in a device's queue, and a request would wait for all of them."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
