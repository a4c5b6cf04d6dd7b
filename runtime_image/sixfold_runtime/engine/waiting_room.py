"""What generation requests wait for before they are queued: the slice of their task, then keys and values."""

from __future__ import annotations

from sixfold_runtime.engine.errors import RequestError
from sixfold_runtime.engine.kv_queue import KVQueue
from sixfold_runtime.engine.sequence import Sequence
from sixfold_runtime.engine.slice_queue import SliceQueue


class WaitingRoom:
    """Used from the engine's thread; its length may be read from any. Those that wait for nothing pass the others."""

    def __init__(self, slices: SliceQueue, kv: KVQueue) -> None:
        self._slices = slices
        self._kv = kv

    def __len__(self) -> int:
        return len(self._slices) + len(self._kv)

    @property
    def has_news(self) -> bool:
        """Whether one that waits may go on."""
        return self._slices.has_news or self._kv.has_news

    @property
    def why_no_slices(self) -> str:
        return self._slices.why_none

    def check(self, task: str) -> None:
        """Refuse a task that can't be served; "" always can. Raises RequestError."""
        self._slices.check(task)

    def take(self, sequence: Sequence) -> bool:
        """Give a sequence what it needs to begin; False: it waits here.

        Raises:
            RequestError: it can't be served; it doesn't wait.
        """
        # What was found depends on the slice: it has to be known first.
        return self._slices.take(sequence) and self._kv.take(sequence)

    def retry(self) -> tuple[list[Sequence], list[tuple[Sequence, RequestError]]]:
        """Those that can begin now, and those that never will; they wait no more."""
        ready, refused = self._slices.retry() if self._slices.has_news else ([], [])
        return [*self._kv.retry(), *(sequence for sequence in ready if self._kv.take(sequence))], refused

    def begun(self, sequence: Sequence) -> None:
        """A sequence that had all begins to be computed."""
        self._kv.begun(sequence)

    def disappoint(self) -> list[Sequence]:
        """Sequences that have not begun and whose arm has the mode off now, without what was found for them."""
        return self._kv.disappoint()

    def withdraw(self) -> list[Sequence]:
        """Take back all that wait."""
        return self._slices.withdraw() + self._kv.withdraw()

    def release(self, sequence: Sequence) -> None:
        """A sequence has ended or was taken back, wherever it was."""
        self._kv.release(sequence)
        self._slices.release(sequence)
