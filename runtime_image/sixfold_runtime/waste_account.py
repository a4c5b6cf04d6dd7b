"""What one request cost so far: operations by what became of them, and seconds of the engine. Pure.

Counters only grow, and what a request cost turns out to be wasted only later, when a draft is rejected or its client
leaves. So each request has an account, which is counted when the request ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from sixfold_runtime.waste import Cause


@dataclass
class Account:
    """Floating-point operations, except where a name says otherwise."""

    useful: int = 0
    padding: int = 0
    rejected: int = 0
    recomputed: int = 0
    drafted: list[int] = field(default_factory=list)
    """Of each token that is drafted and not verified yet."""
    seen_tokens: int = 0
    """Leading ones of the prompt whose keys and values were computed before."""
    is_estimated: bool = False
    """They aren't reused because the mode is off."""
    is_lookup_worth_it: bool = True
    """False: looking for them would take longer than computing them, so that computing them is no waste."""
    block_tokens: int = 0
    """Of the blocks in which prompts are compared; 0: this one isn't."""
    engine_seconds: float = 0.0

    def draft(self) -> None:
        """Tokens are drafted anew; those that were never verified are lost."""
        if self.drafted:
            self.rejected += sum(self.drafted)
            self.drafted = []

    def prefill(self, token: int, pair: int, output: int, start: int, count: int, spent: int) -> None:
        """Tokens [start, start + count) of the prompt were computed.

        Args:
            token, pair, output: `ModelFlops.unit_costs`.
            spent: with padding.
        """
        end = start + count
        each = token + pair * end
        again = max(0, min(self.seen_tokens, end) - start) * each
        own = count * each + output
        self.recomputed += again
        self.useful += own - again
        self.padding += spent - own

    def decode(self, position: int, pair: int, context_tokens: int, drafted: int, spent: int) -> None:
        """A step computed the last token of the context, and `drafted` ones behind it.

        Args:
            position: of one token with its output; `pair` as in `ModelFlops.unit_costs`.
            spent: with padding.
        """
        own = _verified(position, pair, context_tokens, drafted)
        self.useful += own
        self.padding += spent - own

    def settle(self, position: int, pair: int, context_tokens: int, drafted: int, accepted: int) -> None:
        """Of what `decode` counted, the answer got `accepted` of the drafted tokens and one of the target's own."""
        rejected = _verified(position, pair, context_tokens, drafted)
        rejected -= _verified(position, pair, context_tokens, accepted)
        self.useful += sum(self.drafted[:accepted]) - rejected
        self.rejected += sum(self.drafted[accepted:]) + rejected
        self.drafted = []

    def totals(self, is_cancelled: bool) -> Iterator[tuple[int, Cause | None, bool]]:
        """Operations, their cause (None: useful), and whether they are waste by an estimate."""
        useful = self.useful + sum(self.drafted)
        if is_cancelled:
            yield useful + self.padding + self.rejected + self.recomputed, Cause.CANCELLED, False
            return
        yield useful, None, False
        yield self.padding, Cause.PADDING, False
        yield self.rejected, Cause.REJECTED_DRAFT, False
        yield self.recomputed, Cause.RECOMPUTED_PREFIX, self.is_estimated


def _verified(position: int, pair: int, context_tokens: int, drafted: int) -> int:
    """Every one of the positions is multiplied with all columns of its row."""
    return (1 + drafted) * (position + pair * (context_tokens + drafted))
