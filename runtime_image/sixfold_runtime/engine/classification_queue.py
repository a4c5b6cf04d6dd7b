"""Texts that wait for a classifier, and which of them make the next batch: first come, first served.

A text takes its task slice when it comes, so that a slice is loaded while others are computed. One whose slice isn't
there yet is passed by those behind it, and asks again when the pool has changed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from sixfold_api.runtime_config import STABLE
from sixfold_runtime.engine.classification_accounting import TextAccount
from sixfold_runtime.engine.errors import RequestError
from sixfold_runtime.engine.exit_plan import ExitPlan
from sixfold_runtime.engine.protocol import Classify
from sixfold_runtime.engine.slice_pool import SlicePool
from sixfold_runtime.engine.task_slice import TaskSlice
from sixfold_runtime.engine.work import Key, overloaded


@dataclass(eq=False)
class Text:
    """One request on its way."""

    key: Key
    request: Classify
    arrived_seconds: float
    level: int = 0
    """Stamped at admission into a batch, as the next four."""
    arm: str = STABLE
    plan: ExitPlan | None = None
    """Where it may leave; None: nowhere."""
    could_exit: bool = False
    """It may leave nowhere only because early exit is off."""
    shadow_rate: float = 0.0
    """Share of answers like this one that are computed again."""
    task_slice: TaskSlice | None = None
    """Held until the end; None for the model's own head, and while it is being loaded."""
    cancelled: bool = False
    queued_seconds: float = 0.0
    """From its arrival until it began."""
    account: TextAccount = field(default_factory=TextAccount)

    @property
    def tokens(self) -> int:
        return len(self.request.token_ids)

    @property
    def is_ready(self) -> bool:
        """Nothing is missing to compute it."""
        return not self.request.task or self.task_slice is not None

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
        self._seen_changes = 0
        """Of the pool, when those without a slice last asked for it."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def can_form(self) -> bool:
        """Whether a text can start, or those that wait for a slice should ask again."""
        return any(text.is_ready for text in self._waiting) or (bool(self._waiting) and self._has_changed)

    def add(self, text: Text) -> None:
        """Raises RequestError: too many wait, or there is no slice for it; it doesn't wait."""
        if len(self._waiting) >= self._max_waiting:
            raise overloaded(len(self._waiting))
        self._acquire(text, had_to_wait=False)
        self._waiting.append(text)

    def cancel(self, key: Key) -> bool:
        """Returns whether it was there."""
        found = next((text for text in self._waiting if text.key == key), None)
        if found is None:
            return False
        self._waiting.remove(found)
        self.release(found)
        return True

    def form(self, size: BatchSize) -> tuple[list[Text], list[tuple[Text, RequestError]]]:
        """Take out the texts of a batch, as many as `size` takes, and those for which there is no slice any more."""
        refused = self._ask_again()
        batch: list[Text] = []
        passed: list[Text] = []
        while self._waiting:
            text = self._waiting[0]
            if not text.is_ready:
                passed.append(self._waiting.popleft())
            elif size.fits(text.tokens):
                size.add(text.tokens)
                batch.append(self._waiting.popleft())
            else:
                break
        self._waiting.extendleft(reversed(passed))
        return batch, refused

    def withdraw(self) -> list[Text]:
        """Take out all."""
        waiting = list(self._waiting)
        self._waiting.clear()
        return waiting

    def release(self, text: Text) -> None:
        """Give back the slice that a text holds, if it does."""
        if text.task_slice is not None:
            assert self._slices is not None
            text.task_slice = None
            self._slices.release(text.request.task)

    @property
    def _has_changed(self) -> bool:
        return self._slices is not None and self._slices.changes != self._seen_changes

    def _ask_again(self) -> list[tuple[Text, RequestError]]:
        """For slices that may have arrived or found room; those that will get none are taken out."""
        if self._slices is None or not self._has_changed:
            return []
        self._seen_changes = self._slices.changes
        refused: list[tuple[Text, RequestError]] = []
        for text in [text for text in self._waiting if not text.is_ready]:
            try:
                self._acquire(text, had_to_wait=True)
            except RequestError as error:
                self._waiting.remove(text)
                refused.append((text, error))
        return refused

    def _acquire(self, text: Text, had_to_wait: bool) -> None:
        """Raises RequestError: there is no slice for it."""
        task = text.request.task
        if not task:
            return
        assert self._slices is not None, "a text with a task comes only where there are slices"
        text.task_slice = self._slices.acquire(task, text.request.tenant, had_to_wait=had_to_wait)
