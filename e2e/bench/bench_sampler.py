"""Sampling a batch of 8: the engine's sampler over transformers' logits processors. One thread, alternating pairs.

Each step draws a token for every row by temperature, top-p 0.9, repetition and frequency penalty. The peer is what
`generate()` does with the same settings: its processors, softmax and multinomial; transformers has no frequency
penalty, so one in the style of its processors stands in.

Logits as a language model's are: probabilities fall with a power of the rank, the power differing by row from open
positions to decided ones. `flat` is the hard case for a sampler that avoids sorting: most of the vocabulary is in the
nucleus. The ratio that counts is the worse vocabulary's on realistic logits.

Printed besides: `sampler_beside.py`, on which the sampler pipeline's design rests.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from sampler_beside import PROMPT_TOKENS, ROWS, SAMPLING, Array, measure, milliseconds, seconds_of
from transformers import (
    LogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from sixfold_runtime.engine.sampler import Sampler, is_finite

GOAL = 4.2
VOCABULARIES = (32_000, 151_936)
POWERS = (1.1, 1.3, 1.5, 1.8, 2.0, 2.5, 3.0, 4.0)
"""Of the realistic rows."""


def realistic(random: np.random.Generator, vocabulary: int) -> Array:
    ranks = np.log(np.arange(1, vocabulary + 1))
    rows = [random.permutation(12 - power * ranks + random.standard_normal(vocabulary) * 0.3) for power in POWERS]
    return np.array(rows, dtype=np.float32)


def flat(random: np.random.Generator, vocabulary: int) -> Array:
    return (random.standard_normal((ROWS, vocabulary)) * 0.5).astype(np.float32)


class FrequencyPenaltyLogitsProcessor(LogitsProcessor):
    """OpenAI's frequency penalty as transformers would write it."""

    def __init__(self, penalty: float, prompt_tokens: int) -> None:
        self._penalty = penalty
        self._prompt_tokens = prompt_tokens

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        answer = input_ids[:, self._prompt_tokens :]
        counts = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - self._penalty * counts


class Peer:
    """The sampling of transformers' generate()."""

    def __init__(self, prompts: list[list[int]]) -> None:
        self._input_ids = torch.tensor(prompts)
        self._processors = [
            RepetitionPenaltyLogitsProcessor(SAMPLING.repetition_penalty),
            FrequencyPenaltyLogitsProcessor(SAMPLING.frequency_penalty, PROMPT_TOKENS),
            TemperatureLogitsWarper(SAMPLING.temperature),
            TopPLogitsWarper(SAMPLING.top_p),
        ]

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        scores = logits
        for processor in self._processors:
            scores = processor(self._input_ids, scores)
        return torch.softmax(scores, dim=-1)

    def step(self, logits: torch.Tensor) -> None:
        tokens = torch.multinomial(self.probabilities(logits), num_samples=1)
        self._input_ids = torch.cat((self._input_ids, tokens), dim=-1)


class Ours:
    def __init__(self, prompts: list[list[int]]) -> None:
        self.samplers = [Sampler(SAMPLING, prompt) for prompt in prompts]

    def step(self, logits: Array) -> None:
        for sampler, row in zip(self.samplers, logits, strict=True):
            assert is_finite(row)
            sampler.observe(sampler.draw(row))


def compare(make: Callable[[np.random.Generator, int], Array], vocabulary: int, pairs: int) -> dict[str, Any]:
    """Both samplers over the same logits and prompts, step by step in turns."""
    random = np.random.Generator(np.random.PCG64(vocabulary))
    prompts = random.integers(0, vocabulary, (ROWS, PROMPT_TOKENS)).tolist()
    logits = make(random, vocabulary)
    tensor, ours, peer = torch.from_numpy(logits), Ours(prompts), Peer(prompts)
    nuclei = _same_distributions(ours, peer, logits)
    ours.step(logits), peer.step(tensor)
    times = [(seconds_of(lambda: ours.step(logits)), seconds_of(lambda: peer.step(tensor))) for _ in range(pairs)]
    return {
        "ratio": round(statistics.median(theirs / mine for mine, theirs in times), 2),
        "ms": milliseconds(statistics.median(mine for mine, _ in times)),
        "transformers_ms": milliseconds(statistics.median(theirs for _, theirs in times)),
        "nucleus_tokens": nuclei,
    }


def _same_distributions(ours: Ours, peer: Peer, logits: Array) -> list[int]:
    """The tokens in each row's nucleus; both sides must agree on the probabilities."""
    expected = peer.probabilities(torch.from_numpy(logits)).numpy()
    sizes = []
    for sampler, row, theirs in zip(ours.samplers, logits, expected, strict=True):
        distribution = sampler.distribution(row)
        dense = np.zeros(len(row))
        dense[distribution.ids] = distribution.probabilities
        # Running sums of float32 let the peer's nucleus end a few tokens off in a flat distribution.
        assert np.abs(dense - theirs).sum() < 0.01, "not the same distribution"
        sizes.append(len(distribution.ids))
    return sizes


def run(quick: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    pairs = 20 if quick else 100
    compared: dict[str, Any] = {}
    for vocabulary in VOCABULARIES:
        for make in (realistic, flat):
            result = compared[f"{make.__name__}_{vocabulary}"] = compare(make, vocabulary, pairs)
            print(f"batch {ROWS}, vocabulary {vocabulary}, {make.__name__}: {result}", flush=True)
    beside: dict[str, Any] = {}
    for vocabulary in VOCABULARIES:
        random = np.random.Generator(np.random.PCG64(1))
        prompts = random.integers(0, vocabulary, (ROWS, PROMPT_TOKENS)).tolist()
        figures = beside[str(vocabulary)] = measure(realistic(random, vocabulary), prompts, pairs)
        print(f"picking beside the producer, vocabulary {vocabulary}: {figures}", flush=True)
    return {
        "ratio": min(compared[f"realistic_{vocabulary}"]["ratio"] for vocabulary in VOCABULARIES),
        "goal": GOAL,
        "compared": compared,
        "beside_the_producer": beside,
    }
