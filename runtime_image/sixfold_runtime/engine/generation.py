"""Generation with one set of weights: prefill, draft, verify, pick, and what each step gives its streams."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from sixfold_api.generation import MAX_DRAFT_TOKENS
from sixfold_api.modes import Mode
from sixfold_runtime.engine.device import fastest_threads, set_threads
from sixfold_runtime.engine.drafter import NO_DRAFT, Drafter
from sixfold_runtime.engine.errors import RequestError
from sixfold_runtime.engine.forward import make_forward
from sixfold_runtime.engine.intake import Intake
from sixfold_runtime.engine.lane import Flight, Lane
from sixfold_runtime.engine.loader import LoadedModel
from sixfold_runtime.engine.memory import measure
from sixfold_runtime.engine.metrics import DECODE, ModelMetrics
from sixfold_runtime.engine.picker import Picked
from sixfold_runtime.engine.pipeline import LogitsSampler, Task, slot_bytes
from sixfold_runtime.engine.prompts import PromptGroup
from sixfold_runtime.engine.protocol import Generate
from sixfold_runtime.engine.samplers import Samplers
from sixfold_runtime.engine.scheduler import Limits, Prefill, Scheduler
from sixfold_runtime.engine.sequence import Sequence
from sixfold_runtime.engine.slice_pool import SlicePool
from sixfold_runtime.engine.slice_queue import SliceQueue
from sixfold_runtime.engine.speculation import Speculation
from sixfold_runtime.engine.work import (
    CurrentConfig,
    Key,
    Output,
    RunnerNotes,
    engine_error,
    non_finite,
    out_of_memory,
    overloaded,
)

log = logging.getLogger(__name__)
_LANES = 2
"""While one computes, the other is sampled."""


class GenerationRunner:
    """Owns the KV caches and the running sequences of one set of weights. Used from one thread.

    Attributes:
        slices: of the tasks; None where there can't be any.
    """

    def __init__(
        self,
        target: LoadedModel,
        limits: Limits,
        config: CurrentConfig,
        metrics: ModelMetrics,
        *,
        draft: LoadedModel | None = None,
        slices: SlicePool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            draft: has the target's tokenizer; without one every request is decoded plainly.
            slices: of the target's tasks, for its decoder; closed with this runner. None: it can't have any.
        """
        self._model = target
        self._draft = draft
        self._forward = make_forward(target)
        self._draft_forward = None if draft is None else make_forward(draft)
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._sequences: dict[Key, Sequence] = {}
        self._prompts = PromptGroup(self._forward, metrics)
        self._lanes = [self._lane()]
        self._intake = Intake(target, self._forward, draft is not None, config, clock)
        self._scheduler: Scheduler[Key] = Scheduler(limits)
        self.slices = slices
        self._tasks = SliceQueue(slices)
        self._speculation = Speculation(target.served.name, metrics, clock, MAX_DRAFT_TOKENS)
        step_bytes = slot_bytes(limits.max_running, MAX_DRAFT_TOKENS, target.vocabulary_tokens)
        self._samplers = Samplers(target.device, step_bytes, metrics.buffer_wait)
        self._threads = 0
        """That a step is computed with; 0 leaves it as it is."""

    def warm_up(self, kv_budget_bytes: int) -> None:
        """Run first forwards; derive from them what the KV caches may hold, how far to draft, and the threads.

        Raises:
            ModelLoadError: a model computes no finite logits, or there is no memory for a KV cache.
        """
        models = [(self._model, self._forward)]
        if self._draft is not None and self._draft_forward is not None:
            models.append((self._draft, self._draft_forward))
        limits = self._scheduler.limits
        budget = measure(models, kv_budget_bytes, limits.max_running)
        self._intake.context_tokens = budget.context_tokens
        self._scheduler = Scheduler(replace(limits, kv_tokens=budget.kv_tokens))
        self._speculation.cap_tokens = budget.draft_tokens
        if self._model.device.type == "cpu":
            cache = self._forward.new_cache(1)
            self._threads = fastest_threads(lambda: self._forward([[0]], cache), set_threads())
            log.info("model %s: %d threads compute a step", self._model.served.name, self._threads)

    @property
    def context_tokens(self) -> int:
        return self._intake.context_tokens

    @property
    def running(self) -> int:
        return self._scheduler.running

    @property
    def waiting(self) -> int:
        return self._scheduler.waiting + len(self._tasks)

    @property
    def can_step(self) -> bool:
        """Whether a step would do something: not while all that wait, wait for slices."""
        return self._scheduler.running > 0 or self._scheduler.waiting > 0 or self._tasks.has_news

    @property
    def kv_bytes(self) -> int:
        return self._prompts.cache.allocated_bytes + sum(lane.kv_bytes for lane in self._lanes)

    @property
    def notes(self) -> RunnerNotes:
        """Of now; read from any thread."""
        problems = {Mode.SPECULATIVE: self._speculation.fault, Mode.SAMPLER_PIPELINE: self._samplers.problem}
        if self._config().stable.generation_subgraphs is not None:
            problems[Mode.SUBGRAPHS] = self._tasks.why_none
        unsupported = {mode: problem for mode, problem in problems.items() if problem}
        return RunnerNotes(unsupported, self._speculation.shortened)

    def adapt(self) -> bool:
        """Follow the configuration, so that `notes` are of now, and take slices that came."""
        self._samplers.current(self._config().stable.sampler_pipeline)
        return self.slices is not None and self.slices.adapt()

    def close(self) -> None:
        """Give up what isn't memory of this object: the sampler's threads."""
        self._samplers.current(None)
        if self.slices is not None:
            self.slices.close()

    def submit(self, key: Key, request: Generate) -> None:
        """Queue a request.

        Raises:
            RequestError: it can't be served; nothing was queued.
        """
        sequence = self._intake.sequence(key, request)
        self._tasks.check(request.task)
        if self.waiting >= self._scheduler.limits.max_waiting:
            raise overloaded(self.waiting)
        has_slice = self._tasks.take(sequence)
        self._sequences[key] = sequence
        if has_slice:
            self._scheduler.admit(sequence.entry)

    def cancel(self, key: Key) -> None:
        """Forget a request; nothing more is computed or said about it. An unknown one is ignored."""
        sequence = self._sequences.get(key)
        if sequence is not None:
            self._metrics.ended(sequence.level, "cancelled")
            self._forget(sequence)

    def withdraw(self) -> list[tuple[Key, Generate]]:
        """Take back the requests that have not begun, oldest first."""
        sequences = [self._sequences[key] for key in self._scheduler.withdraw()] + self._tasks.withdraw()
        for sequence in sequences:
            del self._sequences[sequence.key]
            self._tasks.release(sequence)
        return [(s.key, s.request) for s in sorted(sequences, key=lambda s: s.arrived_seconds)]

    def step(self) -> list[Output]:
        """The next tokens of every running sequence, and a piece of prefill."""
        if self._threads and torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)  # another model of this engine may be faster with others
        outputs: list[Output] = []
        if self._tasks.has_news:
            self._admit_waiting(outputs)
        plan = self._scheduler.step()
        for key in plan.admitted:
            self._intake.begin(self._sequences[key])
            self._metrics.queued(self._clock() - self._sequences[key].arrived_seconds)
        sampler = self._samplers.current(self._config().stable.sampler_pipeline)
        while sampler is not self._samplers.inline and len(self._lanes) < _LANES:
            self._lanes.append(self._lane())
        for lane in self._lanes:
            if lane.flight is not None:
                self._land(lane, lane.flight, outputs)
            if lane.sequences:
                self._guarded(lane.sequences, lambda lane=lane: self._launch(lane, sampler), outputs)  # type: ignore[misc]
            if lane.flight is not None and sampler is self._samplers.inline:
                self._land(lane, lane.flight, outputs)
        if plan.prefill is not None:
            prefill = plan.prefill
            sequences = [self._sequences[key] for key in prefill.keys]
            self._guarded(sequences, lambda: self._prefill(prefill, sequences, outputs), outputs)
        return outputs

    def _admit_waiting(self, outputs: list[Output]) -> None:
        """Queue those whose slice has come."""
        ready, refused = self._tasks.retry()
        for sequence in ready:
            self._scheduler.admit(sequence.entry)
        outputs += [self._fail(sequence, error) for sequence, error in refused]

    def _lane(self) -> Lane:
        drafter = None
        if self._draft is not None and self._draft_forward is not None:
            drafter = Drafter(self._draft_forward, self._draft.context_tokens, self._model.vocabulary_tokens)
        return Lane(self._forward, drafter)

    def _guarded(self, sequences: Iterable[Sequence], compute: Callable[[], None], outputs: list[Output]) -> None:
        """Run a forward; whatever it raises fails the requests in it and nothing else."""
        affected = list(sequences)
        try:
            compute()
        except Exception as error:
            log.exception("model %s: a forward of %d requests failed", self._model.served.name, len(affected))
            failure = out_of_memory() if isinstance(error, torch.OutOfMemoryError) else engine_error()
            outputs += [self._fail(sequence, failure) for sequence in affected if sequence.key in self._sequences]

    def _launch(self, lane: Lane, sampler: LogitsSampler) -> None:
        """Draft and verify a lane's next tokens, and hand the logits to the sampler."""
        drafts, draft_seconds = self._speculation.draft(lane)
        contexts = {sequence: len(sequence.context) for sequence in lane.sequences}
        began = self._clock()
        try:
            logits, tasks = lane.verify(drafts)
        except torch.OutOfMemoryError:
            if not drafts:
                raise
            self._speculation.out_of_memory()
            lane.roll_back(contexts)
            drafts = {}
            logits, tasks = lane.verify(drafts)
        computed = sum(task.positions for task in tasks)
        self._metrics.forward(DECODE, computed, logits.shape[0] * logits.shape[1])
        picks = sampler.submit(logits, tasks)
        lane.flight = Flight(picks, list(lane.sequences), contexts, drafts, draft_seconds, began)

    def _land(self, lane: Lane, flight: Flight, outputs: list[Output]) -> None:
        """Take what the sampler picked."""
        picked = flight.picks.result()
        lane.flight = None
        lane.settle(flight, picked)
        self._speculation.settled(flight, picked, self._clock() - flight.began_seconds)
        for sequence, result in zip(flight.sequences, picked, strict=True):
            if sequence.is_cancelled:
                lane.leave(sequence)
            else:
                self._advance(sequence, result, outputs)

    def _prefill(self, prefill: Prefill[Key], sequences: list[Sequence], outputs: list[Output]) -> None:
        logits = self._prompts.compute(prefill, sequences)
        if not prefill.finishes:
            return
        # The first token is wanted at once, so it is picked in line.
        tasks = [Task(sequence.picker, NO_DRAFT, 1) for sequence in sequences]
        picked = self._samplers.inline.submit(logits[:, None], tasks).result()
        lanes = self._lanes if self._samplers.is_overlapping else self._lanes[:1]
        for row, sequence in enumerate(sequences):
            min(lanes, key=lambda lane: len(lane.sequences)).join(sequence, self._prompts.cache, row)
        self._prompts.clear()
        for sequence, result in zip(sequences, picked, strict=True):
            self._advance(sequence, result, outputs)

    def _advance(self, sequence: Sequence, picked: Picked, outputs: list[Output]) -> None:
        """Add what was picked for a sequence to its answer."""
        sink = sequence.key[0]
        if not picked.finite:
            self._metrics.non_finite()
            outputs.append(self._fail(sequence, non_finite()))
        elif picked.faulty:
            outputs.append(self._fail(sequence, engine_error()))
        else:
            self._metrics.generated(sequence.level, picked.accepted, len(picked.tokens) - picked.accepted)
            outputs.append((sink, sequence.add(picked)))
            if picked.reason is not None:
                self._forget(sequence)
                self._metrics.ended(sequence.level, picked.reason.value)
                outputs.append((sink, sequence.done(picked.reason)))

    def _fail(self, sequence: Sequence, error: RequestError) -> Output:
        self._forget(sequence)
        self._metrics.ended(sequence.level, error.code)
        return sequence.key[0], sequence.failed(error)

    def _forget(self, sequence: Sequence) -> None:
        del self._sequences[sequence.key]
        self._scheduler.cancel(sequence.key)
        self._speculation.forget(sequence)
        self._tasks.release(sequence)
        lane = next((lane for lane in self._lanes if sequence in lane.sequences), None)
        if lane is not None and lane.flight is not None and sequence in lane.flight.contexts:
            sequence.is_cancelled = True
        elif lane is not None:
            lane.leave(sequence)
        elif not self._scheduler.is_prefilling:
            self._prompts.clear()
