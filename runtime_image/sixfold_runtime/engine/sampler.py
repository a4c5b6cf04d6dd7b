"""Draws tokens from logits. Each request has its own generator, so its batch-mates never change its draws."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from sixfold_runtime.engine.protocol import Sampling

_SEED_MASK = (1 << 64) - 1

Logits = npt.NDArray[np.float32]


def probabilities(logits: Logits, temperature: float, top_p: float) -> npt.NDArray[np.float64]:
    """The distribution to draw from: softmax(logits / temperature), cut to the nucleus and renormalised.

    The nucleus (Holtzman et al., arXiv 1904.09751) is the smallest set of most likely tokens whose mass reaches
    top_p; of equally likely tokens the lower id comes first. It is never empty.

    Args:
        logits: [vocabulary], finite.
        temperature: above 0.
    """
    scaled = (logits.astype(np.float64) - float(logits.max())) / temperature
    weights = np.exp(scaled)
    weights /= weights.sum()
    if top_p < 1.0:
        order = np.argsort(-weights, kind="stable")
        mass_before = np.cumsum(weights[order]) - weights[order]
        weights[order[1:][mass_before[1:] >= top_p]] = 0.0
        weights /= weights.sum()
    return weights


class Sampler:
    """The draws of one request."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        seed = None if sampling.seed is None else sampling.seed & _SEED_MASK
        self._generator = np.random.Generator(np.random.PCG64(seed))

    @property
    def is_greedy(self) -> bool:
        return self._sampling.temperature <= 0

    def draw(self, logits: Logits) -> int:
        """One token by inverse transform sampling; one random number a token.

        Args:
            logits: [vocabulary], finite.
        """
        weights = probabilities(logits, self._sampling.temperature, self._sampling.top_p)
        cumulative = np.cumsum(weights)
        token = int(np.searchsorted(cumulative, self._generator.random() * cumulative[-1], side="right"))
        return min(token, int(np.flatnonzero(weights)[-1]))


def sample(logits: torch.Tensor, samplers: Sequence[Sampler]) -> list[int | None]:
    """A token for each row, or None where the row's logits are NaN or infinite.

    Args:
        logits: float32 [rows, vocabulary].
    """
    finite = torch.isfinite(logits).all(dim=-1).tolist()
    greedy = logits.argmax(dim=-1).tolist()
    tokens: list[int | None] = []
    for row, sampler in enumerate(samplers):
        if not finite[row]:
            tokens.append(None)
        elif sampler.is_greedy:
            tokens.append(greedy[row])
        else:
            tokens.append(sampler.draw(logits[row].cpu().numpy()))
    return tokens
