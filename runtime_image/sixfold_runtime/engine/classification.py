"""Classification with one model: batches that run layer by layer, never a decoding loop.

A step computes a part of one batch, at most up to the next layer where texts may leave: answers of those that do don't
wait for the others, and neither do other models of the engine. So a batch may be larger than what a step computes, and
what is left of it after exits is still enough to be computed efficiently.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec
import torch

from sixfold_api.modes import Mode
from sixfold_api.runtime_config import CANARY, STABLE, RuntimeConfig
from sixfold_runtime.engine.classification_accounting import ClassificationAccounting
from sixfold_runtime.engine.classification_queue import BatchSize, Text, TextQueue
from sixfold_runtime.engine.classification_run import Answer, LayeredRun, ModuleRun, Run, first_forward
from sixfold_runtime.engine.errors import RequestError
from sixfold_runtime.engine.exit_estimate import ExitEstimate
from sixfold_runtime.engine.exit_heads import ExitHeads
from sixfold_runtime.engine.exit_plan import ExitPlanner
from sixfold_runtime.engine.loader import LoadedModel, broken_weights
from sixfold_runtime.engine.metrics import CLASSIFY, ModelMetrics
from sixfold_runtime.engine.protocol import Classify, Done, FinishReason
from sixfold_runtime.engine.scheduler import Limits
from sixfold_runtime.engine.slice_pool import SlicePool
from sixfold_runtime.engine.work import (
    CurrentConfig,
    Key,
    Output,
    arm_in_use,
    check_prompt,
    failed,
    failure_of,
    non_finite,
)
from sixfold_runtime.modes.exit_drift import Drift

log = logging.getLogger(__name__)
_BATCH_STEPS = 4
"""A full batch takes about so many steps. Measured on a CPU: where less than 100 tokens are computed, each costs up to
2.6 times as much as among 150, so that a few survivors cost as much as many."""


class ClassificationRunner:
    """Labels texts with one model. Used from one thread."""

    def __init__(
        self,
        model: LoadedModel,
        limits: Limits,
        config: CurrentConfig,
        metrics: ModelMetrics,
        *,
        exits: ExitHeads | None = None,
        why_no_exits: str = "",
        slices: SlicePool | None = None,
        answered: Callable[[Text, Answer], None] = lambda _text, _answer: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            exits: of the model's own head.
            why_no_exits: for people, why there are none although the folder has some.
            slices: of the model's tasks.
            answered: told of every text that got its labels.
        """
        self._model = model
        self._trunk = model.trunk
        self._limits = limits
        self._config = config
        self._metrics = metrics
        self._answered = answered
        self._clock = clock
        self._slices = slices
        self._queue = TextQueue(limits.max_waiting, slices)
        self._run: Run | None = None
        self._planners = {arm: ExitPlanner(exits, why_no_exits or _why_no_exits(model)) for arm in (STABLE, CANARY)}
        self._follow(config())
        self._estimate = ExitEstimate(exits, clock)
        self._accounting = ClassificationAccounting(model, metrics.flops, self._estimate)
        metrics.exits.watch_drift(self._drift)
        self._pad_id: int | None = None
        if model.trunk is None:
            self._pad_id = getattr(model.module.config.get_text_config(), "pad_token_id", None)
        self.kv_bytes = 0

    def warm_up(self, kv_budget_bytes: int) -> None:
        """Run a first forward. Raises ModelLoadError if the model computes no finite values."""
        if not bool(torch.isfinite(first_forward(self._model, [0, 0])).all()):
            raise broken_weights(self._model)

    @property
    def context_tokens(self) -> int:
        return self._model.context_tokens

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def running(self) -> int:
        """Texts of the batch that is being computed. May be read from any thread."""
        run = self._run
        return 0 if run is None else sum(not text.cancelled for text in run.texts)

    @property
    def can_step(self) -> bool:
        """Whether a step would compute something: not while all that wait, wait for slices."""
        return self._run is not None or self._queue.can_form

    @property
    def unsupported(self) -> dict[Mode, str]:
        """Modes of the runner's own that are on but can't do anything, and why."""
        problem = next((planner.why_not for planner in self._planners.values() if planner.why_not), "")
        return {Mode.EARLY_EXIT: problem} if problem else {}

    def adapt(self) -> bool:
        """Follow the configuration and the slices. Returns whether others have to be told of a change."""
        before = self.unsupported
        self._follow(self._config())
        has_changed = self._slices is not None and self._slices.adapt()
        return has_changed or self.unsupported != before

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
        if request.top_k is not None and request.top_k < 1:
            raise RequestError(400, "invalid_top_k", f"top_k is {request.top_k}, must be at least 1")
        self._check_task(request.task)
        self._queue.add(Text(key, request, self._clock()))

    def cancel(self, key: Key) -> None:
        """Forget a request. An unknown one is ignored."""
        found = self._queue.cancel(key)
        for text in self._run.texts if self._run else ():
            if text.key == key and not text.cancelled:
                text.cancelled = found = True
                self._queue.release(text)
                self._accounting.ended(text)
        if found:
            self._metrics.ended(self._config().stable.level, "cancelled")

    def step(self) -> list[Output]:
        """Begin a batch where none is running, and compute a step of it."""
        began_seconds = self._clock()
        outputs = [] if self._run else self._begin()
        if self._run is not None:
            outputs += self._advance(self._run, began_seconds)
        return outputs

    def close(self) -> None:
        """Let go of what unfinished texts hold; nothing is computed after that."""
        for text in (*self._queue.withdraw(), *(self._run.texts if self._run else ())):
            self._queue.release(text)
        self._run = None

    def _check_task(self, task: str) -> None:
        """Raises RequestError: there is no such task, or no head without one."""
        name = self._model.served.name
        if task and self._slices is None:
            raise RequestError(400, "tasks_unsupported", f"model {name!r} has no tasks: transformers computes it")
        if task and self._slices is not None:
            self._slices.check(task)
        elif self._trunk is not None and self._trunk.own_head is None:
            known = ", ".join(task.name for task in self._slices.tasks) if self._slices is not None else "none"
            raise RequestError(400, "task_required", f"model {name!r} has no head of its own: name a task ({known})")

    def _begin(self) -> list[Output]:
        config = self._config()
        self._follow(config)
        size = self._empty_batch()
        texts, refused = self._queue.form(size)
        now = self._clock()
        for text in texts:
            self._stamp(text, config)
            text.queued_seconds = now - text.arrived_seconds
            self._metrics.queued(text.queued_seconds)
        if texts:
            self._run = self._new_run(texts)
            tokens = sum(text.tokens for text in texts)
            self._metrics.forward(CLASSIFY, tokens, size.positions if self._trunk is None else tokens)
        return [self._fail(text, error, config.of(text.request.arm).level) for text, error in refused]

    def _follow(self, config: RuntimeConfig) -> None:
        canary = config.canary
        self._planners[STABLE].follow(config.stable.early_exit)
        self._planners[CANARY].follow(None if canary is None else canary.config.early_exit)

    def _stamp(self, text: Text, config: RuntimeConfig) -> None:
        """What its arm obeys now; the text keeps that."""
        effective = config.of(text.request.arm)
        text.level, text.arm = effective.level, arm_in_use(config, text.request.arm)
        text.plan = self._planners[text.arm].plan if text.may_exit else None
        text.could_exit = text.may_exit and effective.early_exit is None and self._estimate.is_possible
        text.shadow_rate = 0.0 if effective.shadow is None else effective.shadow.sample_rate

    def _empty_batch(self) -> BatchSize:
        rows, tokens = self._limits.max_running, self._limits.prefill_tokens
        if self._trunk is not None:
            # Attention on CUDA pads: the memory of one long text among many short ones has to be bounded.
            return BatchSize(_BATCH_STEPS * rows, _BATCH_STEPS * tokens, padded=self._model.device.type == "cuda")
        # A decoder finds its last token by looking for the padding: without a padding id it can't be batched.
        return BatchSize(rows if self._pad_id is not None else 1, tokens, padded=True)

    def _new_run(self, texts: list[Text]) -> Run:
        if self._trunk is None:
            return ModuleRun(self._model, texts, self._pad_id or 0, self._accounting)
        glance = self._estimate.glance(self._trunk) if any(text.could_exit for text in texts) else None
        exits, step_tokens = self._metrics.exits, self._limits.prefill_tokens
        return LayeredRun(self._trunk, texts, exits, self._accounting, step_tokens, glance)

    def _advance(self, run: Run, began_seconds: float) -> list[Output]:
        try:
            answers = run.advance()
        except Exception as error:
            log.exception("model %s: a forward of %d texts failed", self._model.served.name, len(run.texts))
            failure = failure_of(error)
            self._run = None
            return [self._fail(text, failure, text.level) for text in run.texts if not text.cancelled]
        self._accounting.took(self._clock() - began_seconds)
        if not run.texts:
            self._run = None
        return [self._finish(answer) for answer in answers]

    def _finish(self, answer: Answer) -> Output:
        text = answer.text
        if not answer.is_finite:
            self._metrics.non_finite()
            return self._fail(text, non_finite(), text.level)
        self._queue.release(text)
        self._accounting.ended(text, is_answered=True)
        self._answered(text, answer)
        self._metrics.ended(text.level, "classified")
        if answer.layers is not None and not text.request.task:
            seconds = self._clock() - text.arrived_seconds
            self._metrics.exits.left(text.level, answer.layers, answer.exited, seconds)
            if text.plan is not None:
                text.plan.drift.add(text.tokens, answer.exited)
        done = Done(
            id=text.request.id,
            finish_reason=FinishReason.STOP,
            level=text.level,
            prompt_tokens=text.tokens,
            scores=answer.scores,
            token_labels=answer.token_labels,
            layers=answer.layers,
            exited=answer.exited,
            engine_seconds=text.account.engine_seconds,
            queued_seconds=text.queued_seconds,
        )
        return text.key[0], done

    def _fail(self, text: Text, error: RequestError, level: int) -> Output:
        self._queue.release(text)
        self._accounting.ended(text)
        self._metrics.ended(level, error.code)
        done = failed(text.request.id, level, error, text.tokens)
        return text.key[0], msgspec.structs.replace(done, engine_seconds=text.account.engine_seconds)

    def _drift(self) -> Drift | None:
        plan = self._planners[STABLE].plan
        return None if plan is None else plan.drift.current()


def _why_no_exits(model: LoadedModel) -> str:
    if model.trunk is None:
        return f"transformers computes model {model.served.name}, as a whole: it can't stop after a layer"
    return f"model {model.served.name} has no exit heads: prepare its variant with exitHeads"
