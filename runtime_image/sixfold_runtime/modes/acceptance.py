"""Which drafted tokens a target model keeps, and the token that follows them. Pure: distributions in, a decision out.

`accept` is speculative sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318): what comes out
is distributed exactly as the target's own draws, whatever the draft. `accept_matching` is the same promise token by
token, for targets whose draw is decided beforehand: greedy ones, and seeded ones whose noise is fixed. Both are
lossless. `accept_threshold` is not: it keeps a drafted token that the target finds likely enough, so likely tokens come
out more often than the target would draw them. Its guards are `Coherence` here, or drafts of a single token (after
which the target is always asked again), which is a matter of the draft's length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Uniform = Callable[[], float]
"""A random number in [0, 1)."""

Embeddings = Callable[[Sequence[int]], npt.NDArray[np.float32]]
"""Rows of a model's embedding matrix: token ids to float32 [tokens, width]."""

_COHERENT_TOKENS = 3
_BLOCK = 256
_BLOCKS_WORTH_IT = 8
_NO_MASS = 1e-12
"""A residual below it is rounding: p and q are the same."""


def reach(weights: npt.NDArray[np.floating], mass: float, side: Literal["left", "right"] = "right") -> int:
    """The first index where the running sum of the weights exceeds `mass`, or reaches it with side "left".

    Sums of blocks come first, so that only one block is summed one by one: a running sum is slow. Where only rounding
    keeps the sum below, it is the last index that has any weight.

    Args:
        weights: [n], above or equal 0, not all 0.
    """
    blocks, start, end = len(weights) // _BLOCK, 0, len(weights)
    if blocks >= _BLOCKS_WORTH_IT:
        sums = weights[: blocks * _BLOCK].reshape(blocks, _BLOCK).sum(axis=1).astype(np.float64).cumsum()
        block = int(sums.searchsorted(mass, side))
        start, mass = block * _BLOCK, mass - float(sums[block - 1] if block else 0.0)
        end = start + _BLOCK if block < blocks else end
    index = start + int(weights[start:end].astype(np.float64).cumsum().searchsorted(mass, side))
    return index if index < end else int(np.flatnonzero(weights[:end])[-1])


@dataclass(frozen=True)
class Distribution:
    """Probabilities of the tokens that can be drawn; all others have none. Vocabularies of any two sizes compare."""

    ids: npt.NDArray[np.int64]
    """[n], ascending, at least one."""
    probabilities: npt.NDArray[np.float64]
    """[n], above or equal 0, with sum 1."""

    @property
    def is_dense(self) -> bool:
        """Every token below some id can be drawn: index and id are the same."""
        return int(self.ids[-1]) == len(self.ids) - 1

    def of(self, token: int) -> float:
        """The probability of a token."""
        index = token if self.is_dense else int(self.ids.searchsorted(token))
        return float(self.probabilities[index]) if index < len(self.ids) and self.ids[index] == token else 0.0

    def draw(self, uniform: float) -> int:
        """A token by inverse transform sampling from one random number in [0, 1)."""
        return int(self.ids[reach(self.probabilities, uniform)])


@dataclass(frozen=True)
class Lossless:
    """Drafting changes how fast tokens come, and nothing about which."""


@dataclass(frozen=True)
class Coherence:
    """Keeps a drafted token only if it is about what the last three tokens are about.

    The source's re-ranker compares sentence embeddings; within an engine, the model's own token embeddings are there.
    Their cosines are much lower than those of sentences: choose the bound by the acceptance rate that it leaves.
    """

    embeddings: Embeddings
    min_cosine: float = 0.6

    def admits(self, token: int, before: Sequence[int]) -> bool:
        """Whether the cosine between the token and the mean of the last three of `before` reaches the bound."""
        context = list(before[-_COHERENT_TOKENS:])
        if not context:
            return True
        rows = self.embeddings([token, *context]).astype(np.float64)
        candidate, mean = rows[0], rows[1:].mean(axis=0)
        length = float(np.linalg.norm(candidate) * np.linalg.norm(mean))
        return length > 0 and float(candidate @ mean) / length >= self.min_cosine


@dataclass(frozen=True)
class Threshold:
    """Lossy: a drafted token is kept if the target gives it more than `minimum` probability and the guard admits it."""

    minimum: float = 0.1
    coherence: Coherence | None = None


Acceptance = Lossless | Threshold


def accept(
    target: Callable[[int], Distribution], draft: Sequence[Distribution], drafted: Sequence[int], random: Uniform
) -> tuple[int, int]:
    """Rejection sampling: keep drafted token x with probability min(1, p(x) / q(x)).

    Args:
        target: p at position i, given drafted[:i]; asked in order and not beyond the first rejection, so that it may
            depend on the tokens before (penalties do).
        draft: q at each drafted position; drafted[i] must have been drawn from draft[i].
        random: asked once a drafted token and once at the end.

    Returns:
        How many of the drafted are kept, and the token after them: drawn from norm((p - q)+) where one was rejected,
        from p where none was, or where p and q are equal but for rounding.
    """
    for position, (token, q) in enumerate(zip(drafted, draft, strict=True)):
        p = target(position)
        if random() * q.of(token) >= p.of(token):
            return position, _residual(p, q).draw(random())
    return len(drafted), target(len(drafted)).draw(random())


def accept_matching(own: Callable[[int], int], drafted: Sequence[int]) -> tuple[int, int]:
    """Keep drafted tokens as long as they are the target's own.

    Args:
        own: the target's token at position i, given drafted[:i]; asked in order, not beyond the first difference.

    Returns:
        How many of the drafted are kept, and the target's token after them.
    """
    for position, token in enumerate(drafted):
        mine = own(position)
        if mine != token:
            return position, mine
    return len(drafted), own(len(drafted))


def accept_threshold(
    target: Callable[[int], Distribution],
    drafted: Sequence[int],
    draw: Callable[[int], int],
    rule: Threshold,
    before: Sequence[int] = (),
) -> tuple[int, int]:
    """The source's lossy rule: keep drafted token x if p(x) > minimum and it is coherent with the tokens before.

    Args:
        target: p at position i, given drafted[:i]; asked in order, not beyond the first rejection.
        draw: the target's own token at position i, after a rejection or at the end.
        before: the last tokens before the drafted ones; three are enough.

    Returns:
        How many of the drafted are kept, and the token after them.
    """
    context = list(before)
    for position, token in enumerate(drafted):
        likely = target(position).of(token) > rule.minimum
        if not likely or not (rule.coherence is None or rule.coherence.admits(token, context)):
            return position, draw(position)
        context.append(token)
    return len(drafted), draw(len(drafted))


def _residual(p: Distribution, q: Distribution) -> Distribution:
    """norm((p - q)+), or p where nothing is left."""
    rest = p.probabilities.copy()
    if p.is_dense:
        shared = q.ids.searchsorted(len(p.ids))
        rest[q.ids[:shared]] -= q.probabilities[:shared]
    else:
        index = np.minimum(q.ids.searchsorted(p.ids), len(q.ids) - 1)
        rest -= np.where(q.ids[index] == p.ids, q.probabilities[index], 0.0)
    np.maximum(rest, 0.0, out=rest)
    mass = float(rest.sum())
    return p if mass < _NO_MASS else Distribution(p.ids, rest / mass)
