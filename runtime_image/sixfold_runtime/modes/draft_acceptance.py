"""How likely drafted tokens are accepted, by position, context length and sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

BUCKET_TOKENS = 512
EVEN_BUCKETS = 8
PRIOR_ACCEPTANCE = 0.8
PRIOR_TRIES = 3.0
MEMORY_TRIES = 256.0
SEQUENCE_PRIOR_TOKENS = 8.0
SEQUENCE_MEMORY_TRIES = 64.0
CARRIED_OVER = 0.1
"""Of a sequence's record, when its context grows into the next bucket: there the draft may be out of its reach."""
FADE = 1 - 1 / 64
"""Of a sequence's record, for each step without a draft."""
SUREST = 0.99
STALE = -1


def bucket_of(context_tokens: int) -> int:
    """Eight buckets of 512 tokens, then one for each doubling: however long contexts get, they are few."""
    even = context_tokens // BUCKET_TOKENS
    return even if even < EVEN_BUCKETS else EVEN_BUCKETS + (even // EVEN_BUCKETS).bit_length() - 1


class Bucket:
    """Acceptance of contexts of about one length, shared by all sequences.

    A position's acceptance is conditional: how often it was accepted where all before it were. A position with few
    tries is taken to be like the one before it, and the first one like that of the next shorter contexts.
    """

    def __init__(self, max_tokens: int, shorter: Bucket | None) -> None:
        self._shorter = shorter
        self._tried = [0.0] * max_tokens
        self._accepted = [0.0] * max_tokens
        self._estimates: list[float] = []
        self.version = 0
        """Changes with the estimates."""

    def observe(self, drafted: int, accepted: int) -> None:
        keep = 1 - 1 / MEMORY_TRIES
        for position in range(min(drafted, accepted + 1, len(self._tried))):
            self._tried[position] = self._tried[position] * keep + 1
            self._accepted[position] = self._accepted[position] * keep + (position < accepted)
        self.version += 1
        self._estimates = []

    def acceptance(self) -> list[float]:
        """Conditional acceptance at each position."""
        if not self._estimates:
            estimate = self._prior()
            for tried, accepted in zip(self._tried, self._accepted, strict=True):
                estimate = (accepted + PRIOR_TRIES * estimate) / (tried + PRIOR_TRIES)
                self._estimates.append(estimate)
        return self._estimates

    def _prior(self) -> float:
        """What is expected of the first position before it was tried here."""
        if self._shorter is None:
            return PRIOR_ACCEPTANCE
        tried, accepted = self._shorter._tried[0], self._shorter._accepted[0]
        return (accepted + PRIOR_TRIES * PRIOR_ACCEPTANCE) / (tried + PRIOR_TRIES)


@dataclass(slots=True)
class SequenceAcceptance:
    """One sequence's own record, shrunk towards its bucket's: sampling settings and subjects differ.

    It is kept as a ratio, accepted tokens over those that the bucket led to expect, and scales the bucket's estimates:
    how acceptance depends on the position is the bucket's to know.
    """

    accepted: float = 0.0
    foreseen: float = 0.0
    left_out: bool = False
    """Others of its batch are drafted for, this one isn't."""
    _bucket: Bucket | None = None
    _version: int = STALE
    _expected: list[float] = field(default_factory=list)

    def observe(self, drafted: int, accepted: int, bucket: Bucket) -> None:
        """To be told before the bucket is."""
        tries = min(drafted, accepted + 1)
        keep = (1 - 1 / SEQUENCE_MEMORY_TRIES) ** tries
        self.accepted = self.accepted * keep + accepted
        self.foreseen = self.foreseen * keep + sum(bucket.acceptance()[:tries])
        self._version = STALE

    def fade(self) -> None:
        """For a step that it was left out of: nothing is learned of it meanwhile, so what was seen counts ever less,
        and one that was only unlucky is drafted for again."""
        self.accepted, self.foreseen = self.accepted * FADE, self.foreseen * FADE
        self._version = STALE

    def expected(self, bucket: Bucket) -> list[float]:
        """Expected accepted tokens by drafted tokens, 0 to the most."""
        if self._bucket is not bucket:
            if self._bucket is not None:
                self.accepted, self.foreseen = self.accepted * CARRIED_OVER, self.foreseen * CARRIED_OVER
            self._bucket, self._version = bucket, STALE
        if self._version != bucket.version:
            self._version = bucket.version
            ratio = (self.accepted + SEQUENCE_PRIOR_TOKENS) / (self.foreseen + SEQUENCE_PRIOR_TOKENS)
            survival, total = 1.0, 0.0
            self._expected = [0.0]
            for acceptance in bucket.acceptance():
                survival *= min(SUREST, ratio * acceptance)
                total += survival
                self._expected.append(total)
        return self._expected
