"""How long prompts are, in the few steps that metrics and reports tell apart. Pure."""

from __future__ import annotations

from bisect import bisect_right

_BOUNDS = (100, 500, 2000)
LENGTH_BUCKETS = ("0-100", "100-500", "500-2000", "2000+")
"""In tokens; the upper bound is the next bucket's."""


def length_bucket(tokens: int) -> str:
    """The bucket of a prompt; "" for none, or where its length is unknown.

    >>> [length_bucket(tokens) for tokens in (0, 1, 99, 100, 1999, 2000)]
    ['', '0-100', '0-100', '100-500', '500-2000', '2000+']
    """
    return LENGTH_BUCKETS[bisect_right(_BOUNDS, tokens)] if tokens > 0 else ""
