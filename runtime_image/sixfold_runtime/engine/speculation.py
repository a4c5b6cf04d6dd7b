"""Speculative decoding in the engine's loop: for whom and how far to draft, and what came of it.

The lengths are decided in `modes/draft_length.py`; here they meet the limits of the moment: what a request may still
generate, how far the draft reaches, and memory. A fault of the draft ends drafting, never a request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as ListOf

import numpy as np
import numpy.typing as npt
import torch

from sixfold_api.generation import Acceptance, DraftLength, Guard
from sixfold_api.runtime_config import SpeculativeConfig
from sixfold_runtime.engine.drafter import Drafter
from sixfold_runtime.engine.lane import Flight, Lane
from sixfold_runtime.engine.metrics import DECODE, ModelMetrics
from sixfold_runtime.engine.picker import Draft, Picked
from sixfold_runtime.engine.pipeline import LogitsSampler
from sixfold_runtime.engine.sequence import Sequence
from sixfold_runtime.modes.acceptance import Coherence, Lossless, Threshold
from sixfold_runtime.modes.draft_length import DraftLengths, Row, make

log = logging.getLogger(__name__)


def acceptance_of(config: SpeculativeConfig | None, embeddings: torch.Tensor) -> Lossless | Threshold:
    """The rule by which a request's drafted tokens are accepted; `embeddings` are the target's [vocabulary, hidden]."""
    if config is None or config.acceptance is Acceptance.LOSSLESS:
        return Lossless()

    def embedded(tokens: ListOf[int]) -> npt.NDArray[np.float32]:
        rows: npt.NDArray[np.float32] = embeddings[list(tokens)].float().cpu().numpy()
        return rows

    coherence = Coherence(embedded, config.min_cosine) if config.guard is Guard.COHERENCE else None
    return Threshold(config.min_probability, coherence)


class Speculation:
    """Decides and counts for all lanes of a model.

    Attributes:
        fault: why nothing is drafted any more; "" while all is well.
        cap_tokens: most tokens that memory allows to draft at a time.
        shortened: why drafts are shorter than asked for; "" while they aren't.
    """

    def __init__(self, name: str, metrics: ModelMetrics, clock: Callable[[], float], cap_tokens: int) -> None:
        self._name = name
        self._metrics = metrics
        self._clock = clock
        self.cap_tokens = cap_tokens
        self._strategies: dict[tuple[DraftLength, int], DraftLengths] = {}
        self.fault = ""
        self.shortened = ""

    def launch(self, lane: Lane, sampler: LogitsSampler) -> Flight:
        """Draft and verify a lane's next tokens, and hand the logits to the sampler."""
        drafts, draft_seconds = self.draft(lane)
        contexts = {sequence: len(sequence.context) for sequence in lane.sequences}
        began = self._clock()
        try:
            logits, tasks = lane.verify(drafts)
        except torch.OutOfMemoryError:
            if not drafts:
                raise
            self.out_of_memory()
            lane.roll_back(contexts)
            drafts = {}
            logits, tasks = lane.verify(drafts)
        self._metrics.forward(DECODE, sum(task.positions for task in tasks), logits.shape[0] * logits.shape[1])
        picks = sampler.submit(logits, tasks)
        lane.flight = Flight(picks, list(lane.sequences), contexts, drafts, draft_seconds, began)
        return lane.flight

    def land(self, lane: Lane, flight: Flight) -> list[Picked]:
        """What the sampler picked for each sequence of a flight; what was rejected is forgotten."""
        picked = flight.picks.result()
        lane.flight = None
        lane.settle(flight, picked)
        self.settled(flight, picked, self._clock() - flight.began_seconds)
        return picked

    def draft(self, lane: Lane) -> tuple[dict[Sequence, Draft], float]:
        """Draft for a lane; returns the drafts of those that have any, and the seconds it took."""
        if lane.drafter is None or self.fault:
            return {}, 0.0
        lengths = self._lengths(lane, lane.drafter)
        if not lengths:
            return {}, 0.0
        started = self._clock()
        try:
            drafts = lane.drafter.propose(lengths)
        except Exception as error:  # the target goes on alone
            log.exception("model %s: drafting failed, so decoding is plain from now on", self._name)
            self.fault = f"drafting failed ({type(error).__name__}: {error}); the log of the pod has more"
            lane.drafter.clear()
            return {}, 0.0
        return drafts, self._clock() - started

    def out_of_memory(self) -> None:
        """A step with drafts needed more memory than there is: draft half as many from now on."""
        longest = min(self.cap_tokens, max((tokens for _, tokens in self._strategies), default=1))
        self.cap_tokens = longest // 2
        self.shortened = f"memory is short: at most {self.cap_tokens} tokens are drafted at a time"
        log.warning("model %s: %s", self._name, self.shortened)

    def settled(self, flight: Flight, picked: list[Picked], verify_seconds: float) -> None:
        """Learn from a step."""
        longest = max((len(draft.tokens) for draft in flight.drafts.values()), default=0)
        used: dict[int, DraftLengths] = {}
        for sequence, result in zip(flight.sequences, picked, strict=True):
            if sequence.speculative is None:
                continue
            strategy = self._strategy(sequence.speculative)
            used[id(strategy)] = strategy
            drafted = len(flight.drafts[sequence].tokens) if sequence in flight.drafts else 0
            self._metrics.draft_length(drafted)
            if drafted:
                sequence.drafted_tokens += drafted
                self._metrics.speculated(sequence.level, drafted, result.accepted)
            # Drafts behind the end of an answer were neither accepted nor rejected.
            judged = result.accepted if len(result.tokens) == result.accepted else drafted
            strategy.observe(sequence, flight.contexts[sequence], judged, result.accepted)
        for strategy in used.values():
            strategy.measured(len(flight.sequences), longest, flight.draft_seconds, verify_seconds)
        if longest:
            self._metrics.draft_seconds(flight.draft_seconds)
            self._metrics.verify_seconds(verify_seconds)

    def forget(self, sequence: Sequence) -> None:
        for strategy in self._strategies.values():
            strategy.forget(sequence)

    def _lengths(self, lane: Lane, drafter: Drafter) -> dict[Sequence, int]:
        """Sequences that tokens are drafted for now, and how many."""
        configs = [sequence.speculative for sequence in lane.sequences if sequence.speculative is not None]
        lengths: dict[Sequence, int] = {}
        for strategy in {id(strategy): strategy for strategy in map(self._strategy, configs)}.values():
            # Each sees the whole batch, since that is what its measured times are of; the others' rows have no room.
            rows = [self._row(sequence, drafter, strategy) for sequence in lane.sequences]
            drafts = zip(lane.sequences, strategy.lengths(rows), strict=True)
            lengths |= {sequence: length for sequence, length in drafts if length > 0}
        return lengths

    def _row(self, sequence: Sequence, drafter: Drafter, strategy: DraftLengths) -> Row:
        if sequence.speculative is None or self._strategy(sequence.speculative) is not strategy:
            return Row(sequence, len(sequence.context), room_tokens=0)
        # The target adds a token of its own to each draft.
        room = min(sequence.room_tokens - 1, drafter.reach_tokens(sequence), self.cap_tokens)
        return Row(sequence, len(sequence.context), max(0, room), drafter.lag_tokens(sequence))

    def _strategy(self, config: SpeculativeConfig) -> DraftLengths:
        key = self._strategy_key(config)
        if key not in self._strategies:
            if self.cap_tokens < key[1]:
                self.shortened = f"memory is short: at most {self.cap_tokens} tokens are drafted at a time"
            self._strategies[key] = make(*key)
        return self._strategies[key]

    @staticmethod
    def _strategy_key(config: SpeculativeConfig) -> tuple[DraftLength, int]:
        single = config.acceptance is Acceptance.THRESHOLD and config.guard is Guard.SINGLE_TOKEN
        return config.length, 1 if single else config.num_tokens
