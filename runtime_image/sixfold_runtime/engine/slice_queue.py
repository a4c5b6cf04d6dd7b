"""Generation requests that wait until the slice of their task is in memory; those behind them go on."""

from __future__ import annotations

from sixfold_runtime.engine.errors import RequestError
from sixfold_runtime.engine.sequence import Sequence
from sixfold_runtime.engine.slice_pool import SlicePool

_NO_POOL = "task slices are for Llama, Qwen2 and Qwen3 decoders; transformers computes this model"


class SliceQueue:
    """Used from the engine's thread; its length may be read from any.

    Attributes:
        why_none: for people, why there are no slices; "" where there can be.
    """

    def __init__(self, pool: SlicePool | None) -> None:
        self._pool = pool
        self.why_none = _NO_POOL if pool is None else ""
        self._waiting: list[Sequence] = []
        self._seen_changes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def has_news(self) -> bool:
        """Whether one that waits may have got its slice, or will never get it."""
        return bool(self._waiting) and self._pool is not None and self._pool.changes != self._seen_changes

    def check(self, task: str) -> None:
        """Refuse a task that can't be served; "" always can. Raises RequestError."""
        if task and self._pool is None:
            raise RequestError(400, "tasks_unsupported", f"task {task!r} can't be served: {self.why_none}")
        if task and self._pool is not None:
            self._pool.check(task)

    def take(self, sequence: Sequence) -> bool:
        """Give a sequence what it needs to begin; False: it waits here for it.

        Raises:
            RequestError: it can't be served; it doesn't wait.
        """
        has_all = self._acquire(sequence, had_to_wait=False)
        if not has_all:
            self._waiting.append(sequence)
        return has_all

    def retry(self) -> tuple[list[Sequence], list[tuple[Sequence, RequestError]]]:
        """Those that can begin now, oldest first, and those that never will; they wait no more."""
        assert self._pool is not None
        waiting, self._waiting, self._seen_changes = self._waiting, [], self._pool.changes
        ready: list[Sequence] = []
        refused: list[tuple[Sequence, RequestError]] = []
        for sequence in waiting:
            try:
                (ready if self._acquire(sequence, had_to_wait=True) else self._waiting).append(sequence)
            except RequestError as error:
                refused.append((sequence, error))
        return ready, refused

    def withdraw(self) -> list[Sequence]:
        """Take back all that wait."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def release(self, sequence: Sequence) -> None:
        """A sequence has ended, wherever it was."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        if sequence.task_slice is not None:
            assert self._pool is not None
            sequence.task_slice = None
            self._pool.release(sequence.request.task)

    def _acquire(self, sequence: Sequence, had_to_wait: bool) -> bool:
        task = sequence.request.task
        if not task:
            return True
        assert self._pool is not None, "check() lets no task pass without a pool"
        sequence.task_slice = self._pool.acquire(task, sequence.request.tenant, had_to_wait=had_to_wait)
        return sequence.task_slice is not None
