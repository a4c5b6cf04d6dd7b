"""Texts that wait for a classifier, and which of them make the next batch: first come, first served.

A text whose task slice is still being loaded is passed by those behind it, and is looked at again when the pool has
changed.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sixfold_runtime.engine.errors import RequestError
from sixfold_runtime.engine.protocol import Classify
from sixfold_runtime.engine.work import Key, engine_error, overloaded

if TYPE_CHECKING:
    from sixfold_runtime.engine.slice_pool import SlicePool
    from sixfold_runtime.engine.task_slice import TaskSlice

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Text:
    """One request on its way."""

    key: Key
    request: Classify
    arrived_seconds: float
    level: int = 0
    """Stamped at admission into a batch."""
    task_slice: TaskSlice | None = None
    """Held from admission to the end; None for the model's own head."""
    had_to_wait: bool = False
    """Its slice was not in memory when it could have started."""
    cancelled: bool = False

    @property
    def tokens(self) -> int:
        return len(self.request.token_ids)

    @property
    def may_exit(self) -> bool:
        """Exit heads are the model's own, and a request may ask for all layers."""
        return self.request.early_exit and not self.request.task


@dataclass
class BatchSize:
    """A batch that grows, and how large it may become."""

    max_rows: int
    max_tokens: int
    """A text that is longer makes a batch of its own."""
    padded: bool
    """Every text takes as many token positions as the longest."""
    rows: int = 0
    positions: int = 0
    _longest: int = 0

    def fits(self, tokens: int) -> bool:
        """Whether one more text does; the first always."""
        return not self.rows or (self.rows < self.max_rows and self._positions_with(tokens) <= self.max_tokens)

    def add(self, tokens: int) -> None:
        self.positions = self._positions_with(tokens)
        self._longest = max(self._longest, tokens)
        self.rows += 1

    def _positions_with(self, tokens: int) -> int:
        return (self.rows + 1) * max(self._longest, tokens) if self.padded else self.positions + tokens


class TextQueue:
    """Used from one thread; its length may be read from any."""

    def __init__(self, max_waiting: int, slices: SlicePool | None) -> None:
        self._max_waiting = max_waiting
        self._slices = slices
        self._waiting: deque[Text] = deque()
        self._loading: set[str] = set()
        """Tasks whose slice was not there when it was last asked for."""
        self._seen_changes = 0
        """Of the pool, when that was."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def can_form(self) -> bool:
        """Whether a text could start now, as far as is known."""
        self._look_again()
        if not self._loading:
            return bool(self._waiting)
        return any(text.request.task not in self._loading for text in self._waiting)

    def add(self, text: Text) -> None:
        """Raises RequestError: too many wait."""
        if len(self._waiting) >= self._max_waiting:
            raise overloaded(len(self._waiting))
        self._waiting.append(text)

    def cancel(self, key: Key) -> bool:
        """Returns whether it was there."""
        kept = deque(text for text in self._waiting if text.key != key)
        found = len(kept) < len(self._waiting)
        self._waiting = kept
        return found

    def form(self, size: BatchSize) -> tuple[list[Text], list[tuple[Text, RequestError]]]:
        """Take texts out for a batch, with their slices acquired, as many as `size` takes; and those that can't be
        served."""
        self._look_again()
        batch: list[Text] = []
        refused: list[tuple[Text, RequestError]] = []
        passed: deque[Text] = deque()
        while self._waiting:
            text = self._waiting[0]
            if text.request.task not in self._loading and not size.fits(text.tokens):
                break
            self._waiting.popleft()
            try:
                if self._acquire(text):
                    size.add(text.tokens)
                    batch.append(text)
                else:
                    passed.append(text)
            except RequestError as error:
                refused.append((text, error))
            except Exception:  # a fault of ours: it ends this text, not the batch
                log.exception("the slice of task %s can't be had", text.request.task)
                refused.append((text, engine_error()))
        self._waiting.extendleft(reversed(passed))
        return batch, refused

    def release(self, text: Text) -> None:
        """Give back the slice that a text holds, if it does."""
        if text.task_slice is not None:
            assert self._slices is not None
            text.task_slice = None
            self._slices.release(text.request.task)

    def _look_again(self) -> None:
        """Slices may have arrived, or found room."""
        if self._slices is not None and self._slices.changes != self._seen_changes:
            self._seen_changes = self._slices.changes
            self._loading.clear()

    def _acquire(self, text: Text) -> bool:
        """False where the text's slice is still being loaded. Raises RequestError: there will be none."""
        task = text.request.task
        if not task:
            return True
        if task in self._loading:
            return False
        assert self._slices is not None, "a text with a task is queued only where there are slices"
        text.task_slice = self._slices.acquire(task, text.request.tenant)
        if text.task_slice is None:
            text.had_to_wait = True
            self._loading.add(task)
            return False
        self._slices.count(task, text.had_to_wait)
        return True
