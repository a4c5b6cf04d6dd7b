"""Draws tokens from logits: penalties, temperature, top-k and top-p, in NumPy. Each request has its own.

In the order that transformers and vLLM use: the repetition penalty (CTRL, arXiv 1909.05858) over prompt and answer,
frequency and presence penalty over the answer (OpenAI's), temperature, top-k, top-p (Holtzman et al., arXiv
1904.09751). The vocabulary is never sorted for it: what can be drawn is found by its weight first.

A seeded request's randomness is no stream but a hash of (seed, position, token): the token at a position depends on
the logits there and on nothing else, neither on how many tokens were drafted nor on batch-mates or time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from sixfold_runtime.engine.protocol import Sampling
from sixfold_runtime.modes.acceptance import Distribution

Logits = npt.NDArray[np.float32]
Weights = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIXERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_MAX_FACTOR = 1e38
"""Of 1 / temperature, in float32."""
_NUCLEUS_TOKENS = 1024
"""A nucleus is expected not to hold tokens less likely than the cut mass spread over so many."""
_BLOCK = 256

_local = threading.local()


def is_finite(logits: Logits) -> bool:
    """Whether a row of logits can be drawn from: neither NaN nor infinite anywhere."""
    return bool(np.isfinite(logits.max()) and np.isfinite(logits.min()))


def largest(values: Logits, count: int) -> Ids:
    """The ids of the `count` largest values, ascending; of equal ones the lower ids.

    Some `count` blocks have a maximum not below the `count`-th largest of all block maxima, so nothing smaller than
    that can be among the largest: one pass leaves little to sort.
    """
    if count >= len(values):
        return np.arange(len(values))
    blocks = len(values) // _BLOCK
    if count > blocks:
        return _cut(values, np.arange(len(values)), np.sort(values)[-count], count)
    maxima = values[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(axis=1)
    ids = np.flatnonzero(values >= np.partition(maxima, blocks - count)[blocks - count])
    kept = values[ids]
    return _cut(kept, ids, np.sort(kept)[-count], count)


def _cut(values: Logits, ids: Ids, edge: np.float32, count: int) -> Ids:
    """The `count` ids with the largest values, `edge` being the smallest of these."""
    kept = values > edge
    kept[np.flatnonzero(values == edge)[: count - int(np.count_nonzero(kept))]] = True
    return ids[kept]


def nucleus(weights: Weights, top_p: float) -> Ids:
    """The smallest set of largest weights that has at least `top_p` of their sum; of equal weights the lower ids.

    Args:
        weights: [n], above or equal 0, not all 0.

    Returns:
        Ids, ascending, at least one.
    """
    total = float(weights.sum())
    target = top_p * total
    certain: Ids = np.empty(0, dtype=np.int64)
    floor = (total - target) / _NUCLEUS_TOKENS
    pool = np.flatnonzero(weights > floor)
    kept = weights[pool]
    mass = float(kept.sum(dtype=np.float64))
    if mass < target and len(pool) < len(weights):
        # A flat distribution: all these belong to the nucleus, and so do some of the rest.
        certain, pool = pool, np.flatnonzero(weights <= floor)
        kept, target = weights[pool], target - mass
    descending = np.sort(kept)[::-1]
    count = 1 + int(np.cumsum(descending, dtype=np.float64)[:-1].searchsorted(target))
    ids = _cut(kept, pool, descending[count - 1], count)
    return np.sort(np.concatenate((certain, ids))) if len(certain) else ids


def noise(seed: int, position: int, ids: Ids) -> npt.NDArray[np.float64]:
    """Exponentially distributed numbers, each a hash of (seed, position, token id): SplitMix64, 53 bits.

    The token with the least noise / probability is distributed by the probabilities (the Gumbel-max trick).
    """
    key = _mixed(_mixed((seed + _GOLDEN) & _MASK) ^ (position * _GOLDEN & _MASK))
    bits = ids.astype(np.uint64)
    bits *= np.uint64(_GOLDEN)
    bits += np.uint64(key)
    for shift, factor in _MIXERS:
        bits ^= bits >> np.uint64(shift)
        bits *= np.uint64(factor)
    bits ^= bits >> np.uint64(31)
    bits >>= np.uint64(11)
    uniform = bits.astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-53
    negative: npt.NDArray[np.float64] = np.log(uniform, out=uniform)
    return np.negative(negative, out=negative)


def _mixed(bits: int) -> int:
    for shift, factor in _MIXERS:
        bits = (bits ^ bits >> shift) * factor & _MASK
    return bits ^ bits >> 31


class Penalties:
    """What a request's prompt and answer take from its logits: a table of the tokens that occur."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        self._repetition = np.float32(sampling.repetition_penalty)
        self._frequency = np.float32(sampling.frequency_penalty)
        self._presence = np.float32(sampling.presence_penalty)
        self.active = bool(self._repetition != 1 or self._frequency or self._presence)
        self._index: dict[int, int] = {}
        """Token id to its row of the table."""
        self._ids = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)
        """How often a token occurs in the answer."""
        if self._repetition != 1:
            for token in prompt:
                self._row(token)

    def _row(self, token: int) -> int:
        row = self._index.setdefault(token, len(self._index))
        if row == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[row] = token
        return row

    def count(self, token: int, occurrences: int = 1) -> None:
        """Note that the answer got a token; -1 takes it back."""
        if self.active:
            row = self._row(token)
            self._counts[row] += occurrences

    @contextmanager
    def counting(self, tokens: Sequence[int]) -> Iterator[None]:
        """As if the answer had these tokens too."""
        known = len(self._index)
        for token in tokens:
            self.count(token)
        try:
            yield
        finally:
            for token in tokens:
                self.count(token, -1)
            while len(self._index) > known:
                self._index.popitem()

    def apply(self, logits: Logits) -> None:
        """Penalise these logits, in place."""
        ids, counts = self._ids[: len(self._index)], self._counts[: len(self._index)]
        if len(ids) and int(ids.max()) >= len(logits):  # a draft's vocabulary may be shorter
            ids, counts = ids[ids < len(logits)], counts[ids < len(logits)]
        values = logits[ids]
        if self._repetition != 1:
            values = np.where(values < 0, values * self._repetition, values / self._repetition)
        if self._frequency:
            values -= self._frequency * counts
        if self._presence:
            values -= self._presence * (counts > 0)
        logits[ids] = values


class Sampler:
    """The draws of one request, and the tokens that it drew. Used by one thread at a time.

    Args:
        prompt: the request's prompt, which the repetition penalty counts too.
        random: where unseeded draws come from; the operating system's entropy without it.
    """

    def __init__(
        self, sampling: Sampling, prompt: Sequence[int] = (), random: np.random.Generator | None = None
    ) -> None:
        self._sampling = sampling
        self._penalties = Penalties(sampling, prompt)
        self._seed = None if sampling.seed is None else sampling.seed & _MASK
        self._factor = min(_MAX_FACTOR, 1 / sampling.temperature) if sampling.temperature > 0 else 1.0
        self._random = random or np.random.Generator(np.random.PCG64())
        self._position = 0

    @property
    def is_greedy(self) -> bool:
        return self._sampling.temperature <= 0

    @property
    def is_seeded(self) -> bool:
        """Its draws are decided by the logits alone: see the module."""
        return self._seed is not None

    @property
    def is_penalised(self) -> bool:
        return self._penalties.active

    def uniform(self) -> float:
        """A random number in [0, 1)."""
        return self._random.random()

    def observe(self, token: int) -> None:
        """The answer got this token."""
        self._penalties.count(token)
        self._position += 1

    @contextmanager
    def supposing(self, tokens: Sequence[int]) -> Iterator[None]:
        """As if the answer had these tokens too."""
        self._position += len(tokens)
        try:
            with self._penalties.counting(tokens):
                yield
        finally:
            self._position -= len(tokens)

    def distribution(self, logits: Logits) -> Distribution:
        """What the next token is drawn from. For a greedy request: the softmax after penalties, at temperature 1.

        Args:
            logits: float32 [vocabulary], finite.
        """
        ids, weights = self._candidates(logits)
        probabilities = weights.astype(np.float64)
        probabilities /= probabilities.sum()
        return Distribution(ids, probabilities)

    def draw(self, logits: Logits) -> int:
        """The next token.

        Args:
            logits: float32 [vocabulary], finite.
        """
        if self.is_greedy:
            return int((self._penalised(logits) if self.is_penalised else logits).argmax())
        if self._seed is None:
            return self.distribution(logits).draw(self.uniform())
        ids, weights = self._candidates(logits)
        with np.errstate(divide="ignore"):
            return int(ids[np.argmin(noise(self._seed, self._position, ids) / weights)])

    def _penalised(self, logits: Logits) -> Logits:
        """A copy of the logits after penalties, in this thread's scratch space."""
        scratch = _scratch(len(logits))
        np.copyto(scratch, logits)
        self._penalties.apply(scratch)
        return scratch

    def _candidates(self, logits: Logits) -> tuple[Ids, Weights]:
        """The tokens that can be drawn, ascending, and weights in proportion to their probabilities."""
        source = self._penalised(logits) if self.is_penalised else logits
        ids: Ids | None = None
        with np.errstate(over="ignore", under="ignore"):
            weights = np.subtract(source, source.max(), out=_scratch(len(logits)))
            if self._factor != 1:
                weights *= np.float32(self._factor)
            if 0 < self._sampling.top_k < len(weights):
                ids = largest(weights, self._sampling.top_k)
                weights = weights[ids]
            np.exp(weights, out=weights)
        if self._sampling.top_p < 1:
            kept = nucleus(weights, self._sampling.top_p)
            ids, weights = kept if ids is None else ids[kept], weights[kept]
        return np.arange(len(weights)) if ids is None else ids, weights


def _scratch(size: int) -> Logits:
    """Space for one row, the same for all requests of a thread."""
    held: Logits | None = getattr(_local, "row", None)
    if held is None or len(held) < size:
        held = _local.row = np.empty(size, dtype=np.float32)
    return held[:size]


def sample(logits: torch.Tensor, samplers: Sequence[Sampler]) -> list[int | None]:
    """A token for each row, or None where the row's logits are NaN or infinite.

    Args:
        logits: float32 [rows, vocabulary].
    """
    tokens: list[int | None] = []
    for row, sampler in zip(logits.cpu().numpy(), samplers, strict=True):
        token = sampler.draw(row) if is_finite(row) else None
        if token is not None:
            sampler.observe(token)
        tokens.append(token)
    return tokens
