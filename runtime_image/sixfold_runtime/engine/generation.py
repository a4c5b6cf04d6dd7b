"""Generation with one set of weights: prefill, draft, verify, pick, and what each step gives its streams."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from sixfold_api.generation import MAX_DRAFT_TOKENS
from sixfold_api.modes import Mode
from sixfold_api.runtime_config import RuntimeConfig
from sixfold_runtime.engine.accounting import Accounting
from sixfold_runtime.engine.device import fastest_threads, set_threads
from sixfold_runtime.engine.drafter import NO_DRAFT, Drafter
from sixfold_runtime.engine.forward import Forward, make_forward
from sixfold_runtime.engine.intake import Intake
from sixfold_runtime.engine.kv_queue import KVQueue
from sixfold_runtime.engine.kv_reuse import KVReuse
from sixfold_runtime.engine.lane import Flight, Lane, Lanes
from sixfold_runtime.engine.live_sequences import LiveSequences
from sixfold_runtime.engine.loader import LoadedModel
from sixfold_runtime.engine.memory import measure
from sixfold_runtime.engine.metrics import ModelMetrics
from sixfold_runtime.engine.pipeline import LogitsSampler, Task, slot_bytes
from sixfold_runtime.engine.prompts import PromptGroup
from sixfold_runtime.engine.protocol import Generate
from sixfold_runtime.engine.samplers import Samplers
from sixfold_runtime.engine.scheduler import Limits, Prefill, Scheduler
from sixfold_runtime.engine.sequence import Sequence
from sixfold_runtime.engine.slice_pool import SlicePool
from sixfold_runtime.engine.slice_queue import SliceQueue
from sixfold_runtime.engine.speculation import Speculation
from sixfold_runtime.engine.waiting_room import WaitingRoom
from sixfold_runtime.engine.work import (
    CurrentConfig,
    Key,
    Output,
    RunnerNotes,
    failure_of,
    overloaded,
)

log = logging.getLogger(__name__)


class GenerationRunner:
    """Owns the KV caches and the running sequences of one set of weights. Used from one thread.

    Attributes:
        slices: of the tasks; None where there can't be any.
        kv: what is reused; None where nothing can be.
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
        kv: KVReuse | None = None,
        answered: Callable[[Sequence], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            draft: has the target's tokenizer; without one every request is decoded plainly.
            slices: of the target's tasks, for its decoder; closed with this runner. None: it can't have any.
            kv: finds and keeps keys and values of the target. None: every prompt is computed whole.
            answered: told of every complete answer.
        """
        self._model = target
        self._forward = make_forward(target)
        self._draft = None if draft is None else (draft, make_forward(draft))
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._prompts = PromptGroup(self._forward, metrics)
        self._lanes = Lanes(_lane_maker(target, self._forward, self._draft))
        can_reuse = kv is None or kv.shape is not None
        self._accounting = Accounting(self._forward, target.served.name, metrics.flops, clock, can_reuse=can_reuse)
        self._intake = Intake(target, self._forward, draft is not None, config, clock)
        self._scheduler: Scheduler[Key] = Scheduler(limits)
        self.slices = slices
        self._room = WaitingRoom(SliceQueue(slices), KVQueue(kv, clock))
        self.kv = kv
        self._speculation = Speculation(target.served.name, metrics, clock, MAX_DRAFT_TOKENS)
        step_bytes = slot_bytes(limits.max_running, MAX_DRAFT_TOKENS, target.vocabulary_tokens)
        self._sequences = LiveSequences(
            self._scheduler, self._room, self._prompts, self._lanes, self._speculation, self._accounting, metrics,
            kv, answered,
        )  # fmt: skip
        self._samplers = Samplers(target.device, step_bytes, metrics.buffer_wait)
        self._threads = 0
        """That a step is computed with; 0 leaves it as it is."""

    def warm_up(self, kv_budget_bytes: int) -> None:
        """Run first forwards; derive from them what the KV caches may hold, how far to draft, and the threads.

        Raises:
            ModelLoadError: a model computes no finite logits, or there is no memory for a KV cache.
        """
        models = [(self._model, self._forward), *([self._draft] if self._draft else [])]
        limits = self._scheduler.limits
        budget = measure(models, kv_budget_bytes, limits.max_running)
        self._intake.context_tokens = budget.context_tokens
        self._scheduler.limits = replace(limits, kv_tokens=budget.kv_tokens)
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
        return self._scheduler.waiting + len(self._room)

    @property
    def can_step(self) -> bool:
        """Whether a step would do something: not while all that wait, wait for slices or for keys and values."""
        return self._scheduler.running > 0 or self._scheduler.waiting > 0 or self._room.has_news

    @property
    def kv_bytes(self) -> int:
        return self._prompts.cache.allocated_bytes + self._lanes.kv_bytes

    @property
    def kv_used_bytes(self) -> int:
        """Of those, the ones that hold tokens."""
        return self._prompts.cache.used_bytes + self._lanes.kv_used_bytes

    @property
    def notes(self) -> RunnerNotes:
        """Of now; read from any thread."""
        problems = {Mode.SPECULATIVE: self._speculation.fault, Mode.SAMPLER_PIPELINE: self._samplers.problem}
        if self._config().stable.generation_subgraphs is not None:
            problems[Mode.SUBGRAPHS] = self._room.why_no_slices
        if self.kv is not None:
            problems[Mode.KV_CACHE_REUSE] = self.kv.problem
        unsupported = {mode: problem for mode, problem in problems.items() if problem}
        return RunnerNotes(unsupported, self._speculation.shortened)

    def adapt(self) -> bool:
        """Follow the configuration, so that `notes` are of now, and take slices that came."""
        self._samplers.current(self._config().stable.sampler_pipeline)
        if self.kv is not None:
            self.kv.adapt()
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
        self._room.check(request.task)
        if self.waiting >= self._scheduler.limits.max_waiting:
            raise overloaded(self.waiting)
        is_ready = self._room.take(sequence)
        self._sequences.add(sequence)
        if is_ready:
            self._scheduler.admit(sequence.entry)

    def cancel(self, key: Key) -> None:
        """Forget a request; nothing more is computed or said about it. An unknown one is ignored."""
        self._sequences.cancel(key)

    def keep_nothing_of(self, tenant: str) -> None:
        """What is being computed for a tenant is not kept."""
        theirs = [sequence for sequence in self._sequences if sequence.request.tenant == tenant]
        for sequence in theirs:
            sequence.may_keep = False
        self._accounting.forget(tenant, theirs)

    def withdraw(self) -> list[tuple[Key, Generate]]:
        """Take back the requests that have not begun, oldest first."""
        sequences = [self._sequences[key] for key in self._scheduler.withdraw()] + self._room.withdraw()
        for sequence in sequences:
            self._sequences.withdraw(sequence)
        return [(s.key, s.request) for s in sorted(sequences, key=lambda s: s.arrived_seconds)]

    def step(self) -> list[Output]:
        """The next tokens of every running sequence, and a piece of prefill."""
        if self._threads and torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)  # another model of this engine may be faster with others
        self._accounting.step_begins()
        outputs: list[Output] = []
        config = self._config()
        self._admit_waiting(outputs)
        plan = self._scheduler.step()
        for key in plan.admitted:
            self._begin(self._sequences[key], config)
        sampler = self._samplers.current(config.stable.sampler_pipeline)
        if sampler is not self._samplers.inline:
            self._lanes.add_second()
        for lane in self._lanes:
            if lane.flight is not None:
                self._land(lane, lane.flight, outputs)
            if lane.sequences:
                self._guarded(lane.sequences, lambda lane=lane: self._launch(lane, sampler), outputs)  # type: ignore[misc]
            if lane.flight is not None and sampler is self._samplers.inline:
                self._land(lane, lane.flight, outputs)
            self._accounting.charge(lane.sequences)
        if plan.prefill is not None:
            prefill = plan.prefill
            sequences = [self._sequences[key] for key in prefill.keys]
            self._guarded(sequences, lambda: self._prefill(prefill, sequences, outputs), outputs)
        return outputs

    def _admit_waiting(self, outputs: list[Output]) -> None:
        """Queue those that have what they waited for."""
        if self._room.has_news:
            ready, refused = self._room.retry()
            for sequence in ready:
                self._scheduler.admit(sequence.entry)
            outputs += [self._sequences.fail(sequence, error) for sequence, error in refused]
        for sequence in self._room.disappoint():
            self._scheduler.amend(sequence.entry)

    def _begin(self, sequence: Sequence, config: RuntimeConfig) -> None:
        self._intake.begin(sequence, config)
        self._room.begun(sequence)
        sequence.queued_seconds = self._clock() - sequence.arrived_seconds
        self._metrics.queued(sequence.queued_seconds)
        self._metrics.reused(sequence.level, sequence.cached_tokens)
        self._accounting.begins(sequence, config.of(sequence.arm).kv_reuse)

    def _guarded(self, sequences: Iterable[Sequence], compute: Callable[[], None], outputs: list[Output]) -> None:
        """Run a forward; whatever it raises fails the requests in it and nothing else."""
        affected, live = list(sequences), self._sequences
        try:
            compute()
        except Exception as error:
            log.exception("model %s: a forward of %d requests failed", self._model.served.name, len(affected))
            failure = failure_of(error)
            outputs += [live.fail(sequence, failure) for sequence in affected if sequence.key in live]

    def _launch(self, lane: Lane, sampler: LogitsSampler) -> None:
        self._accounting.launched(self._speculation.launch(lane, sampler))

    def _land(self, lane: Lane, flight: Flight, outputs: list[Output]) -> None:
        """Take what the sampler picked."""
        picked = self._speculation.land(lane, flight)
        self._accounting.landed(flight, picked)
        for sequence, result in zip(flight.sequences, picked, strict=True):
            if sequence.is_cancelled:
                lane.leave(sequence)
            else:
                self._sequences.advance(sequence, result, outputs)

    def _prefill(self, prefill: Prefill[Key], sequences: list[Sequence], outputs: list[Output]) -> None:
        began = self._clock()
        logits = self._prompts.compute(prefill, sequences)
        starts = [sequence.cached_tokens + prefill.start for sequence in sequences]
        self._accounting.prefilled(sequences, starts, prefill.counts)
        if not prefill.finishes:
            self._prompts.seconds += self._clock() - began
            self._accounting.charge_by_tokens(sequences, prefill.counts)
            return
        # The first token is wanted at once, so it is picked in line.
        tasks = [Task(sequence.picker, NO_DRAFT, 1) for sequence in sequences]
        picked = self._samplers.inline.submit(logits[:, None], tasks).result()
        self._accounting.charge_by_tokens(sequences, prefill.counts)
        if self.kv is not None:
            self.kv.computed(sequences, self._prompts.seconds + self._clock() - began)
        for row, sequence in enumerate(sequences):
            lane = self._lanes.shortest if self._samplers.is_overlapping else self._lanes.first
            lane.join(sequence, self._prompts.cache, row)
        self._prompts.clear()
        for sequence, result in zip(sequences, picked, strict=True):
            self._sequences.advance(sequence, result, outputs)


def _lane_maker(target: LoadedModel, forward: Forward, draft: tuple[LoadedModel, Forward] | None) -> Callable[[], Lane]:
    """Without the runner: who holds on to that would keep its weights in memory."""
    if draft is None:
        return lambda: Lane(forward, None)
    model, draft_forward = draft
    return lambda: Lane(forward, Drafter(draft_forward, model.context_tokens, target.vocabulary_tokens))
