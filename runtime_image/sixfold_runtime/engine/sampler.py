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
from math import isfinite

import numpy as np

from sixfold_runtime.engine.candidates import SEED_MASK, Ids, Logits, Weights, all_ids, largest, noise, nucleus
from sixfold_runtime.engine.protocol import Sampling
from sixfold_runtime.modes.acceptance import Distribution

_MAX_FACTOR = 1e38
"""Of 1 / temperature, in float32."""

_local = threading.local()


def is_finite(logits: Logits) -> bool:
    """Whether a row of logits can be drawn from: neither NaN nor infinite anywhere."""
    return isfinite(np.maximum.reduce(logits)) and isfinite(np.minimum.reduce(logits))


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
        self._seed = None if sampling.seed is None else sampling.seed & SEED_MASK
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
        probabilities /= np.add.reduce(probabilities)
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
            weights = np.subtract(source, np.maximum.reduce(source), out=_scratch(len(logits)))
            if self._factor != 1:
                weights *= np.float32(self._factor)
            if 0 < self._sampling.top_k < len(weights):
                ids = largest(weights, self._sampling.top_k)
                weights = weights[ids]
            np.exp(weights, out=weights)
        if self._sampling.top_p < 1:
            kept = nucleus(weights, self._sampling.top_p)
            ids, weights = kept if ids is None else ids[kept], weights[kept]
        return all_ids(len(weights)) if ids is None else ids, weights


def _scratch(size: int) -> Logits:
    """Space for one row, the same for all requests of a thread."""
    held: Logits | None = getattr(_local, "row", None)
    if held is None or len(held) < size:
        held = _local.row = np.empty(size, dtype=np.float32)
    return held[:size]
