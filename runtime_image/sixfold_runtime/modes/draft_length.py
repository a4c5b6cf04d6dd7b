"""How many tokens a draft proposes at a time: the strategies of spec.generation.speculative.length."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from sixfold_api.generation import DraftLength
from sixfold_runtime.modes.draft_cost_model import CostModel
from sixfold_runtime.modes.draft_row import DraftLengths, Row

__all__ = ["CostModel", "DraftLengths", "Fixed", "Row", "StepDown", "make"]

FAILURES_TO_SINGLE = 3
SUCCESSES_TO_START_OVER = 5
LONG_CONTEXT_TOKENS = 2048
LONG_CONTEXT_LENGTH = 2


def make(strategy: DraftLength, max_tokens: int) -> DraftLengths:
    """A fresh rule for one pair of models that never drafts more than `max_tokens` (>= 1) at a time."""
    match strategy:
        case DraftLength.COST_MODEL:
            return CostModel(max_tokens)
        case DraftLength.STEP_DOWN:
            return StepDown(max_tokens)
        case DraftLength.FIXED:
            return Fixed(max_tokens)


class Fixed:
    """Always as many as allowed."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens

    def lengths(self, rows: Sequence[Row]) -> list[int]:
        return [min(self._max_tokens, row.room_tokens) for row in rows]

    def observe(self, key: Hashable, context_tokens: int, drafted: int, accepted: int) -> None:
        """It learns nothing."""

    def measured(self, rows: int, drafted: int, draft_seconds: float, verify_seconds: float) -> None:
        """It learns nothing."""

    def forget(self, key: Hashable) -> None:
        """It remembers nothing."""


@dataclass(slots=True)
class _Streak:
    length: int
    failures: int = 0
    successes: int = 0


class StepDown:
    """The source's rules, for each sequence by itself; a failure is a step in which a drafted token was rejected.

    One token less after each failure; after three failures in a row a single token; after five successes in a row it
    starts over with the most. At most two tokens beyond a context of 2,048. It never stops drafting.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._streaks: dict[Hashable, _Streak] = {}

    def lengths(self, rows: Sequence[Row]) -> list[int]:
        return [min(self._length(row), row.room_tokens) for row in rows]

    def _length(self, row: Row) -> int:
        streak = self._streaks.setdefault(row.key, _Streak(self._max_tokens))
        long = row.context_tokens > LONG_CONTEXT_TOKENS
        return min(streak.length, LONG_CONTEXT_LENGTH) if long else streak.length

    def observe(self, key: Hashable, context_tokens: int, drafted: int, accepted: int) -> None:
        streak = self._streaks.get(key)
        if streak is None or drafted == 0:  # a late word about a sequence that has ended
            return
        if accepted < drafted:
            streak.failures, streak.successes = streak.failures + 1, 0
            streak.length = 1 if streak.failures >= FAILURES_TO_SINGLE else max(1, streak.length - 1)
        else:
            streak.failures, streak.successes = 0, streak.successes + 1
            if streak.successes >= SUCCESSES_TO_START_OVER:
                streak.length = self._max_tokens

    def measured(self, rows: int, drafted: int, draft_seconds: float, verify_seconds: float) -> None:
        """Time doesn't matter to these rules."""

    def forget(self, key: Hashable) -> None:
        self._streaks.pop(key, None)
