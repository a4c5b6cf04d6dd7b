"""Generation with one model: prefill, decode, sample, and what each step gives its streams."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from sixfold_runtime.engine.errors import ModelLoadError, RequestError
from sixfold_runtime.engine.forward import CausalForward
from sixfold_runtime.engine.kv_cache import RaggedCache
from sixfold_runtime.engine.loader import LoadedModel, broken_weights
from sixfold_runtime.engine.metrics import DECODE, PREFILL, ModelMetrics
from sixfold_runtime.engine.protocol import Chunk, Done, FinishReason, Generate
from sixfold_runtime.engine.sampler import Sampler, sample
from sixfold_runtime.engine.scheduler import Entry, Limits, Prefill, Scheduler
from sixfold_runtime.engine.stream import OutputStream
from sixfold_runtime.engine.work import (
    CurrentConfig,
    Key,
    Output,
    check_prompt,
    check_sampling,
    failed,
    non_finite,
    overloaded,
)

log = logging.getLogger(__name__)


@dataclass
class _Sequence:
    """One request on its way. Its level is the current one until the first step, then it stays."""

    key: Key
    request: Generate
    stream: OutputStream
    sampler: Sampler
    arrived_seconds: float
    level: int
    level_sent: bool = False
    last_token: int = -1


class GenerationRunner:
    """Owns the KV cache and the running sequences of one model. Used from one thread."""

    def __init__(
        self,
        model: LoadedModel,
        limits: Limits,
        config: CurrentConfig,
        metrics: ModelMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._forward = CausalForward(model)
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._sequences: dict[Key, _Sequence] = {}
        self._group = RaggedCache()
        """The prompts being prefilled; row i is the i-th key of the scheduler's Prefill."""
        self._cache = RaggedCache()
        """The decoding sequences; row i is that of `_rows[i]`."""
        self._rows: list[Key] = []
        self._context_tokens = model.context_tokens
        self._scheduler: Scheduler[Key] = Scheduler(limits)

    def warm_up(self, kv_budget_bytes: int) -> None:
        """Run a first forward, and derive from it how many tokens the KV cache may hold.

        Raises:
            ModelLoadError: the model computes no finite logits, or there is no memory for a KV cache.
        """
        cache = RaggedCache([0])
        logits = self._forward([[0, 0]], cache)
        if not bool(torch.isfinite(logits).all()):
            raise broken_weights(self._model)
        kv_tokens = kv_budget_bytes // max(1, cache.bytes_per_token)
        if kv_tokens < self._context_tokens:
            log.warning(
                "model %s: memory for %d tokens of KV, so the context is cut from %d to that",
                self._model.served.name, kv_tokens, self._context_tokens,
            )  # fmt: skip
            self._context_tokens = kv_tokens
        if kv_tokens < 2:
            raise ModelLoadError(
                f"{self._model.served.path}: no memory for a KV cache, {kv_budget_bytes} bytes are left"
            )
        self._scheduler = Scheduler(replace(self._scheduler.limits, kv_tokens=kv_tokens))

    @property
    def context_tokens(self) -> int:
        return self._context_tokens

    @property
    def running(self) -> int:
        return self._scheduler.running

    @property
    def waiting(self) -> int:
        return self._scheduler.waiting

    @property
    def kv_bytes(self) -> int:
        return self._cache.allocated_bytes + self._group.allocated_bytes

    def submit(self, key: Key, request: Generate) -> None:
        """Queue a request.

        Raises:
            RequestError: it can't be served; nothing was queued.
        """
        check_prompt(request.token_ids, self._model.vocabulary_tokens)
        prompt_tokens, sampling = len(request.token_ids), request.sampling
        check_sampling(sampling)
        if prompt_tokens >= self._context_tokens:
            raise RequestError(
                400,
                "context_length_exceeded",
                f"the prompt has {prompt_tokens} tokens; with at least one to generate, "
                f"the context of {self._context_tokens} allows {self._context_tokens - 1}",
            )
        if not self._scheduler.can_admit():
            raise overloaded(self._scheduler.waiting)
        max_tokens = min(sampling.max_tokens, self._context_tokens - prompt_tokens)
        self._sequences[key] = _Sequence(
            key=key,
            request=request,
            stream=OutputStream(self._model.tokenizer.tokenizer, sampling.stop, self._model.eos_ids, max_tokens),
            sampler=Sampler(sampling),
            arrived_seconds=self._clock(),
            level=self._config().stable.level,
        )
        self._scheduler.admit(Entry(key, prompt_tokens, prompt_tokens + max_tokens))

    def cancel(self, key: Key) -> None:
        """Forget a request; nothing more is computed or said about it. An unknown one is ignored."""
        sequence = self._sequences.get(key)
        if sequence is not None:
            self._metrics.ended(sequence.level, "cancelled")
            self._forget(key)

    def step(self) -> list[Output]:
        """One token for every running sequence, and a piece of prefill."""
        plan = self._scheduler.step()
        for key in plan.admitted:
            sequence = self._sequences[key]
            sequence.level = self._config().stable.level
            self._metrics.queued(self._clock() - sequence.arrived_seconds)
        outputs: list[Output] = []
        if plan.decode:
            self._guarded(plan.decode, lambda: self._decode(outputs), outputs)
        if plan.prefill is not None:
            prefill = plan.prefill
            self._guarded(prefill.keys, lambda: self._prefill(prefill, outputs), outputs)
        return outputs

    def _guarded(self, keys: tuple[Key, ...], compute: Callable[[], None], outputs: list[Output]) -> None:
        """Run a forward; whatever it raises fails the requests in it and nothing else."""
        try:
            compute()
        except Exception as error:
            log.exception("model %s: a forward of %d requests failed", self._model.served.name, len(keys))
            if isinstance(error, torch.OutOfMemoryError):
                failure = RequestError(503, "out_of_memory", "the engine ran out of memory for this request")
            else:
                failure = RequestError(500, "engine_error", "the engine failed on this request; its log says why")
            outputs += [self._fail(self._sequences[key], failure) for key in keys if key in self._sequences]

    def _decode(self, outputs: list[Output]) -> None:
        sequences = [self._sequences[key] for key in self._rows]
        logits = self._forward([[sequence.last_token] for sequence in sequences], self._cache)
        self._metrics.forward(DECODE, len(sequences), len(sequences))
        self._advance(sequences, logits, outputs)

    def _prefill(self, prefill: Prefill[Key], outputs: list[Output]) -> None:
        sequences = [self._sequences[key] for key in prefill.keys]
        if prefill.start == 0:
            self._group = RaggedCache([0] * len(sequences))
        end = [prefill.start + count for count in prefill.counts]
        tokens = [
            sequence.request.token_ids[prefill.start : stop] for sequence, stop in zip(sequences, end, strict=True)
        ]
        logits = self._forward(tokens, self._group)
        self._metrics.forward(PREFILL, sum(prefill.counts), prefill.padded_tokens)
        if not prefill.finishes:
            return
        for row, sequence in enumerate(sequences):
            self._cache.append(self._group, row)
            self._rows.append(sequence.key)
        self._group.clear()
        self._advance(sequences, logits, outputs)

    def _advance(self, sequences: list[_Sequence], logits: torch.Tensor, outputs: list[Output]) -> None:
        """Sample a token for each sequence and add what came of it."""
        for sequence, token in zip(sequences, sample(logits, [s.sampler for s in sequences]), strict=True):
            if token is None:
                outputs.append(self._fail(sequence, non_finite()))
                continue
            sequence.last_token = token
            text, reason = sequence.stream.push(token)
            outputs.append((sequence.key[0], self._chunk(sequence, text)))
            if reason is not None:
                outputs.append(self._finish(sequence, reason))

    def _chunk(self, sequence: _Sequence, text: str) -> Chunk:
        level = None if sequence.level_sent else sequence.level
        sequence.level_sent = True
        return Chunk(id=sequence.request.id, text=text, tokens=1, level=level)

    def _finish(self, sequence: _Sequence, reason: FinishReason) -> Output:
        self._forget(sequence.key)
        self._metrics.ended(sequence.level, reason.value)
        done = Done(
            id=sequence.request.id,
            finish_reason=reason,
            level=sequence.level,
            prompt_tokens=len(sequence.request.token_ids),
            completion_tokens=sequence.stream.tokens,
        )
        return sequence.key[0], done

    def _fail(self, sequence: _Sequence, error: RequestError) -> Output:
        self._forget(sequence.key)
        self._metrics.ended(sequence.level, error.code)
        done = failed(
            sequence.request.id, sequence.level, error, len(sequence.request.token_ids), sequence.stream.tokens
        )
        return sequence.key[0], done

    def _forget(self, key: Key) -> None:
        del self._sequences[key]
        self._scheduler.cancel(key)
        if key in self._rows:
            row = self._rows.index(key)
            self._cache.remove(row)
            last = self._rows.pop()
            if last != key:
                self._rows[row] = last
        elif not self._scheduler.is_prefilling:
            self._group.clear()
