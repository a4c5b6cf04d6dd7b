"""The sequences of one runner until they end: what was picked goes to their streams, and what they hold is given up."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sixfold_runtime.engine.accounting import Accounting
from sixfold_runtime.engine.errors import RequestError
from sixfold_runtime.engine.kv_reuse import KVReuse
from sixfold_runtime.engine.lane import Lanes
from sixfold_runtime.engine.metrics import ModelMetrics
from sixfold_runtime.engine.picker import Picked
from sixfold_runtime.engine.prompts import PromptGroup
from sixfold_runtime.engine.scheduler import Scheduler
from sixfold_runtime.engine.sequence import Sequence
from sixfold_runtime.engine.speculation import Speculation
from sixfold_runtime.engine.waiting_room import WaitingRoom
from sixfold_runtime.engine.work import Key, Output, engine_error, non_finite


class LiveSequences:
    """By key. Used from one thread."""

    def __init__(
        self,
        scheduler: Scheduler[Key],
        room: WaitingRoom,
        prompts: PromptGroup,
        lanes: Lanes,
        speculation: Speculation,
        accounting: Accounting,
        metrics: ModelMetrics,
        kv: KVReuse | None,
        answered: Callable[[Sequence], None],
    ) -> None:
        """
        Args:
            kv: keeps keys and values of complete answers; None: nothing does.
            answered: told of every complete answer.
        """
        self._scheduler = scheduler
        self._room = room
        self._prompts = prompts
        self._lanes = lanes
        self._speculation = speculation
        self._accounting = accounting
        self._metrics = metrics
        self._kv = kv
        self._answered = answered
        self._sequences: dict[Key, Sequence] = {}

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def __contains__(self, key: Key) -> bool:
        return key in self._sequences

    def __getitem__(self, key: Key) -> Sequence:
        return self._sequences[key]

    def add(self, sequence: Sequence) -> None:
        self._sequences[sequence.key] = sequence

    def withdraw(self, sequence: Sequence) -> None:
        """One that has not begun, and that the scheduler or the waiting room has let go."""
        del self._sequences[sequence.key]
        self._room.release(sequence)

    def cancel(self, key: Key) -> None:
        """An unknown one is ignored."""
        sequence = self._sequences.get(key)
        if sequence is not None:
            self._metrics.ended(sequence.level, "cancelled")
            self.forget(sequence, is_cancelled=True)

    def advance(self, sequence: Sequence, picked: Picked, outputs: list[Output]) -> None:
        """Add what was picked for a sequence to its answer."""
        sink = sequence.key[0]
        if not picked.finite:
            self._metrics.non_finite()
            outputs.append(self.fail(sequence, non_finite()))
        elif picked.faulty:
            outputs.append(self.fail(sequence, engine_error()))
        else:
            self._metrics.generated(sequence.level, picked.accepted, len(picked.tokens) - picked.accepted)
            outputs.append((sink, sequence.add(picked)))
            if picked.reason is not None:
                self._keep(sequence)
                self._answered(sequence)
                self.forget(sequence)
                self._metrics.ended(sequence.level, picked.reason.value)
                outputs.append((sink, sequence.done(picked.reason)))

    def fail(self, sequence: Sequence, error: RequestError) -> Output:
        """End it with an error."""
        self.forget(sequence)
        self._metrics.ended(sequence.level, error.code)
        return sequence.key[0], sequence.failed(error)

    def forget(self, sequence: Sequence, is_cancelled: bool = False) -> None:
        """It gives up all that it holds."""
        self._accounting.ended(sequence, is_cancelled)
        del self._sequences[sequence.key]
        self._scheduler.cancel(sequence.key)
        self._speculation.forget(sequence)
        self._room.release(sequence)
        lane = self._lanes.of(sequence)
        if lane is not None and lane.flight is not None and sequence in lane.flight.contexts:
            sequence.is_cancelled = True
        elif lane is not None:
            lane.leave(sequence)
        elif not self._scheduler.is_prefilling:
            self._prompts.clear()

    def _keep(self, sequence: Sequence) -> None:
        """Its answer is complete: keep its keys and values for those that begin alike."""
        lane = self._lanes.of(sequence)
        if lane is not None:
            cache, row, tokens = lane.kept(sequence)
            self._accounting.computed(sequence, tokens)
            if self._kv is not None and sequence.may_keep:
                self._kv.keep(sequence, cache, row, tokens)
