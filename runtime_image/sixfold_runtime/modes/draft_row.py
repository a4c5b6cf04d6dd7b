"""What a rule for the length of drafts is told, and what it answers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of the batch, before a step."""

    key: Hashable
    context_tokens: int
    """Prompt and answer so far."""
    room_tokens: int
    """Most tokens that may be drafted for it now; 0 where none may (opted out, the answer's last token, no context)."""
    draft_lag_tokens: int = 0
    """Tokens of its context that the draft must read before it can propose."""


class DraftLengths(Protocol):
    """Decides how many tokens the draft proposes, for one pair of models. Used from one thread, reads no clock."""

    def lengths(self, rows: Sequence[Row]) -> list[int]:
        """Tokens to draft for each row of the next step, none above its room; 0 leaves the row undrafted."""

    def observe(self, key: Hashable, context_tokens: int, drafted: int, accepted: int) -> None:
        """The first `accepted` of a row's `drafted` tokens were kept and, if that is not all of them, the next one was
        rejected. What a stop cut off is neither: leave it out of `drafted`."""

    def measured(self, rows: int, drafted: int, draft_seconds: float, verify_seconds: float) -> None:
        """What a step of so many rows took: the draft's part, and all the rest with the picking. `drafted` is the
        longest draft in it, 0 for a plain step."""

    def forget(self, key: Hashable) -> None:
        """The sequence has ended. An unknown one is ignored."""
