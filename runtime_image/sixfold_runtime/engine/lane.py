"""Sequences that decode together: one row each in the target's KV cache and, while drafted for, in the draft's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from sixfold_runtime.engine.drafter import NO_DRAFT, Drafter
from sixfold_runtime.engine.forward import Forward
from sixfold_runtime.engine.kv_cache import KVCache
from sixfold_runtime.engine.picker import Draft, Picked
from sixfold_runtime.engine.pipeline import Picks, Task
from sixfold_runtime.engine.sequence import Sequence, slices_of
from sixfold_runtime.engine.task_slice import TaskSlice


@dataclass
class Flight:
    """A step whose tokens are being picked."""

    picks: Picks
    sequences: list[Sequence]
    """Row by row."""
    contexts: dict[Sequence, int]
    """Tokens of each context when the step began."""
    drafts: dict[Sequence, Draft] = field(default_factory=dict)
    draft_seconds: float = 0.0
    began_seconds: float = 0.0


class Lane:
    """One batch of decoding. The sampler pipeline needs two, so that one computes while the other is sampled.

    Attributes:
        flight: the step on its way, None between steps.
    """

    def __init__(self, forward: Forward, drafter: Drafter | None) -> None:
        self._forward = forward
        self.drafter = drafter
        self.sequences: list[Sequence] = []
        self.flight: Flight | None = None
        self._cache = forward.new_cache()
        self._slices: list[TaskSlice | None] | None = None

    @property
    def kv_bytes(self) -> int:
        return self._cache.allocated_bytes + (self.drafter.kv_bytes if self.drafter else 0)

    @property
    def kv_used_bytes(self) -> int:
        return self._cache.used_bytes + (self.drafter.kv_used_bytes if self.drafter else 0)

    def join(self, sequence: Sequence, group: KVCache, row: int) -> None:
        """Take a sequence whose prompt lies in a row of another cache."""
        self._cache.append(group, row)
        self.sequences.append(sequence)
        self._slices = slices_of(self.sequences)

    def leave(self, sequence: Sequence) -> None:
        """Give up the row of a sequence; the last row takes its place. Not while a step is on its way."""
        row = self.sequences.index(sequence)
        self._cache.remove(row)
        last = self.sequences.pop()
        if last is not sequence:
            self.sequences[row] = last
        self._slices = slices_of(self.sequences)
        if self.drafter is not None:
            self.drafter.leave(sequence)

    def kept(self, sequence: Sequence) -> tuple[KVCache, int, int]:
        """The cache and row of a sequence, and how many tokens of its context it holds there."""
        row = self.sequences.index(sequence)
        # An answer that ended inside of a draft is shorter than what was accepted.
        return self._cache, row, min(self._cache.lengths[row], len(sequence.context))

    def verify(self, drafts: dict[Sequence, Draft]) -> tuple[torch.Tensor, list[Task]]:
        """One forward over each row's last token and what was drafted after it.

        Returns:
            float32 logits [rows, 1 + longest draft, vocabulary], and what is to be picked from each row.
        """
        of_row = [drafts.get(sequence, NO_DRAFT) for sequence in self.sequences]
        tokens = [[sequence.context[-1], *draft.tokens] for sequence, draft in zip(self.sequences, of_row, strict=True)]
        if any(draft.tokens for draft in of_row):
            logits = self._forward(tokens, self._cache, every_position=True, slices=self._slices)
        else:
            logits = self._forward(tokens, self._cache, slices=self._slices)[:, None]
        return logits, [
            Task(sequence.picker, draft, 1 + len(draft.tokens))
            for sequence, draft in zip(self.sequences, of_row, strict=True)
        ]

    def roll_back(self, contexts: dict[Sequence, int]) -> None:
        """After a forward that failed: forget what it may have written, and what was drafted for it."""
        self._cache.truncate([len(sequence.context) - 1 for sequence in self.sequences])
        if self.drafter is not None:
            self.drafter.settle(contexts, {})

    def settle(self, flight: Flight, picked: list[Picked]) -> None:
        """Keep what was accepted of the drafts, in both caches."""
        if not any(draft.tokens for draft in flight.drafts.values()):
            return
        accepted = {sequence: result.accepted for sequence, result in zip(flight.sequences, picked, strict=True)}
        # Those that joined meanwhile stand behind the rows of the step.
        kept = [flight.contexts[sequence] + accepted[sequence] for sequence in flight.sequences]
        self._cache.truncate(kept + self._cache.lengths[len(kept) :])
        if self.drafter is not None:
            self.drafter.settle(flight.contexts, accepted)


class Lanes:
    """One, or two from when the sampler pipeline is first used: while one computes, the other is sampled."""

    def __init__(self, new: Callable[[], Lane]) -> None:
        self._new = new
        self._lanes = [new()]

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes)

    @property
    def first(self) -> Lane:
        return self._lanes[0]

    @property
    def shortest(self) -> Lane:
        """With the fewest sequences."""
        return min(self._lanes, key=lambda lane: len(lane.sequences))

    @property
    def kv_bytes(self) -> int:
        return sum(lane.kv_bytes for lane in self._lanes)

    @property
    def kv_used_bytes(self) -> int:
        return sum(lane.kv_used_bytes for lane in self._lanes)

    def add_second(self) -> None:
        """If it isn't there yet."""
        if len(self._lanes) == 1:
            self._lanes.append(self._new())

    def of(self, sequence: Sequence) -> Lane | None:
        """In which a sequence decodes."""
        return next((lane for lane in self._lanes if sequence in lane.sequences), None)
