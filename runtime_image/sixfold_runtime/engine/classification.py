"""Classification with one model: one forward a batch, never a decoding loop."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sixfold_runtime.engine.errors import RequestError
from sixfold_runtime.engine.loader import LoadedModel, broken_weights
from sixfold_runtime.engine.metrics import CLASSIFY, ModelMetrics
from sixfold_runtime.engine.protocol import Classify, Done, FinishReason, LabelScore
from sixfold_runtime.engine.scheduler import Limits
from sixfold_runtime.engine.work import (
    CurrentConfig,
    Key,
    Output,
    check_prompt,
    engine_error,
    failed,
    non_finite,
    overloaded,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Waiting:
    key: Key
    request: Classify
    arrived_seconds: float


def batch_size(lengths: Sequence[int], max_rows: int, max_tokens: int) -> int:
    """How many of the first texts go into one batch whose padded size is at most `max_tokens`; at least one."""
    longest = 0
    for count, length in enumerate(lengths, start=1):
        longest = max(longest, length)
        if count > max_rows or (count > 1 and count * longest > max_tokens):
            return count - 1
    return len(lengths)


class ClassificationRunner:
    """Labels texts with one model. Used from one thread."""

    def __init__(
        self,
        model: LoadedModel,
        limits: Limits,
        config: CurrentConfig,
        metrics: ModelMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._limits = limits
        self._waiting: deque[_Waiting] = deque()
        config_of_model = model.module.config.get_text_config()
        self._pad_id: int | None = getattr(config_of_model, "pad_token_id", None)
        # A decoder finds its last token by looking for the padding: without a padding id it can't be batched.
        self._max_rows = limits.max_running if self._pad_id is not None else 1
        self.running = 0
        """Always 0 between steps: a batch ends within its step."""
        self.kv_bytes = 0

    def warm_up(self, kv_budget_bytes: int) -> None:
        """Run a first forward. Raises ModelLoadError if the model computes no finite logits."""
        if not bool(torch.isfinite(self._logits([[0, 0]])).all()):
            raise broken_weights(self._model)

    @property
    def context_tokens(self) -> int:
        return self._model.context_tokens

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, key: Key, request: Classify) -> None:
        """Queue a request.

        Raises:
            RequestError: it can't be served; nothing was queued.
        """
        check_prompt(request.token_ids, self._model.vocabulary_tokens)
        if len(request.token_ids) > self.context_tokens:
            raise RequestError(
                400,
                "context_length_exceeded",
                f"the text has {len(request.token_ids)} tokens, the context of the model is {self.context_tokens}",
            )
        if len(self._waiting) >= self._limits.max_waiting:
            raise overloaded(len(self._waiting))
        self._waiting.append(_Waiting(key, request, self._clock()))

    def cancel(self, key: Key) -> None:
        """Forget a request. An unknown one is ignored."""
        kept = deque(waiting for waiting in self._waiting if waiting.key != key)
        if len(kept) < len(self._waiting):
            self._waiting = kept
            self._metrics.ended(self._config().stable.level, "cancelled")

    def step(self) -> list[Output]:
        """One batch, first come, first served."""
        lengths = [len(waiting.request.token_ids) for waiting in self._waiting]
        count = batch_size(lengths, self._max_rows, self._limits.prefill_tokens)
        batch = [self._waiting.popleft() for _ in range(count)]
        level = self._config().stable.level
        now = self._clock()
        for waiting in batch:
            self._metrics.queued(now - waiting.arrived_seconds)
        try:
            logits = self._logits([waiting.request.token_ids for waiting in batch])
            scores = torch.softmax(logits, dim=-1).cpu()
            finite = torch.isfinite(logits).all(dim=-1).tolist()
        except Exception:
            log.exception("model %s: a forward of %d texts failed", self._model.served.name, len(batch))
            failure = engine_error()
            return [self._fail(waiting, level, failure) for waiting in batch]
        self._metrics.forward(CLASSIFY, sum(lengths[:count]), count * max(lengths[:count]))
        return [
            self._finish(waiting, level, scores[row].tolist())
            if finite[row]
            else self._fail(waiting, level, non_finite())
            for row, waiting in enumerate(batch)
        ]

    @torch.inference_mode()
    def _logits(self, token_ids: list[list[int]]) -> torch.Tensor:
        """float32 [texts, labels]. Padded on the right and masked."""
        longest = max(len(ids) for ids in token_ids)
        device, pad = self._model.device, self._pad_id or 0
        output = self._model.module(
            input_ids=torch.tensor([ids + [pad] * (longest - len(ids)) for ids in token_ids], device=device),
            attention_mask=torch.tensor(
                [[1] * len(ids) + [0] * (longest - len(ids)) for ids in token_ids], device=device
            ),
        )
        logits: torch.Tensor = output.logits
        return logits.float()

    def _finish(self, waiting: _Waiting, level: int, scores: list[float]) -> Output:
        self._metrics.ended(level, "classified")
        labelled = [LabelScore(label, score) for label, score in zip(self._model.labels, scores, strict=True)]
        done = Done(
            id=waiting.request.id,
            finish_reason=FinishReason.STOP,
            level=level,
            prompt_tokens=len(waiting.request.token_ids),
            scores=sorted(labelled, key=lambda entry: -entry.score),
        )
        return waiting.key[0], done

    def _fail(self, waiting: _Waiting, level: int, error: RequestError) -> Output:
        self._metrics.ended(level, error.code)
        return waiting.key[0], failed(waiting.request.id, level, error, len(waiting.request.token_ids))
