"""How far a value goes at a time: each step is small enough that one bad step hurts little. Pure."""

from __future__ import annotations

import math

from sixfold_api.scalars import duration_seconds, quantity_value

LIKELY_ENOUGH = 0.5
"""A drafted token that is accepted less often than this is better not drafted."""
FEWER_TOKENS, LONGER_WAIT, MORE_DISAGREEMENT, LOWER_THRESHOLD = 0.75, 1.5, 1.25, 0.02
MIN_BATCH_TOKENS = 128
LONGEST_TTL_SECONDS = 30 * 86400
_UNITS = ("Ti", "Gi", "Mi", "Ki")


def token_acceptance(drafted: int, share: float) -> float:
    """Chance that a drafted token is accepted if those before it were, given the share of drafted tokens that are.

    Each is accepted with the same chance a and only after the one before it (Leviathan et al. 2023, arXiv 2211.17192),
    so the share is (a + a^2 + … + a^drafted) / drafted. Solved by bisection.
    """
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if sum(middle**i for i in range(1, drafted + 1)) / drafted < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def supported_draft_tokens(drafted: int, share: float | None) -> int:
    """Fewer tokens to draft: as many as are accepted more often than not, one less at least and no less than half.

    Args:
        share: of the drafted tokens that are accepted; None takes one token less.
    """
    if share is None:
        return max(1, drafted - 1)
    chance = token_acceptance(drafted, min(max(share, 0.0), 1.0))
    supported = drafted if chance >= 1 else int(math.log(LIKELY_ENOUGH) / math.log(chance)) if chance > 0 else 0
    return max(1, drafted // 2, min(supported, drafted - 1))


def fewer_batch_tokens(tokens: int) -> int:
    """A quarter less, in sixteens."""
    return max(MIN_BATCH_TOKENS, int(tokens * FEWER_TOKENS) // 16 * 16)


def longer_wait(wait: str, longest: str) -> str:
    """Half as long again, at most `longest`."""
    seconds = min(max(duration_seconds(wait), 0.001) * LONGER_WAIT, duration_seconds(longest))
    return f"{int(seconds * 1000)}ms"


def longer_ttl(ttl: str) -> str:
    """Twice as long."""
    return f"{min(LONGEST_TTL_SECONDS, int(duration_seconds(ttl) * 2))}s"


def doubled_size(size: str) -> str:
    """Twice as many bytes, in the largest binary unit that is exact."""
    size_bytes = int(quantity_value(size) * 2)
    for power, unit in zip((4, 3, 2, 1), _UNITS, strict=True):
        if size_bytes and size_bytes % 1024**power == 0:
            return f"{size_bytes // 1024**power}{unit}"
    return str(size_bytes)


def lower_threshold(threshold: str) -> str:
    """0.02 less."""
    return fraction(max(0.0, float(threshold) - LOWER_THRESHOLD))


def more_disagreement(share: str) -> str:
    """A quarter more."""
    return fraction(min(1.0, float(share) * MORE_DISAGREEMENT))


def fraction(value: float) -> str:
    """A Fraction of at most four digits behind the point."""
    text = f"{min(max(value, 0.0), 1.0):.4f}".rstrip("0").rstrip(".")
    return text or "0"
