"""What computes a batch of prompts: forwards of the example chat model in fp32 on one thread, up to the next token's
logits of each prompt. And what each would take for any batch, from shapes that were measured.

Seconds are of CPU time: what else the machine does would decide otherwise.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from batch_trace import LEAST_TOKENS, MOST_TOKENS, lengths
from stack import REPOSITORY
from transformers import AutoModelForCausalLM

from sixfold_api.runtime_config import ServedModel
from sixfold_api.scalars import Task
from sixfold_runtime.engine.forward import make_forward
from sixfold_runtime.engine.loader import load

MODEL = REPOSITORY / "examples" / "models" / "chat"
MOST_MEASURED_TOKENS = 16_384
_WIDTHS = (8, 16, 64, 128, 256, 512, 1024, MOST_TOKENS)
_ROWS = (1, 2, 4, 8, 16, 32, 128)
_VOCABULARY = 1000
_MOST_REPEATS = 7

Seconds = Callable[[Sequence[int]], float]
"""Prompt lengths of a batch -> how long it takes."""


class Executor(Protocol):
    """Computes batches."""

    def __call__(self, prompts: Sequence[int]) -> float:
        """Compute a batch of prompts of these lengths; returns the CPU seconds that it took."""

    def model(self, quick: bool) -> Seconds:
        """Measure some shapes, and return what any batch takes by them."""


class PaddedForward(Executor):
    """transformers' modules over a right-padded batch. Attention is causal, so padding needs no mask, and the fused
    kernel skips half of the work: the fastest way for such a batch here."""

    def __init__(self) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)

    @torch.inference_mode()
    def __call__(self, prompts: Sequence[int]) -> float:
        ids = torch.zeros(len(prompts), max(prompts), dtype=torch.long)
        for row, count in enumerate(prompts):
            ids[row, :count] = torch.randint(5, _VOCABULARY, (count,))
        started = time.thread_time()
        hidden = self._model.model(input_ids=ids, use_cache=False).last_hidden_state
        self._model.lm_head(hidden[torch.arange(len(prompts)), torch.tensor(prompts) - 1])
        return time.thread_time() - started

    def model(self, quick: bool) -> Seconds:
        """Interpolated between shapes (rows, width), in logarithms of rows, width and seconds."""
        all_rows, all_widths = (_ROWS[::3], _WIDTHS[1::2]) if quick else (_ROWS, _WIDTHS)
        shapes = [(rows, width) for rows in all_rows for width in all_widths if rows * width <= MOST_MEASURED_TOKENS]
        seconds = _measured([[width] * rows for rows, width in shapes], self, quick)
        table = np.full((len(all_rows), len(all_widths)), np.nan)
        for (rows, width), taken in zip(shapes, seconds, strict=True):
            table[all_rows.index(rows), all_widths.index(width)] = np.log(taken)
        for column in range(table.shape[1]):  # beyond what was measured: as much a row as there
            known = int(np.isfinite(table[:, column]).sum())
            table[known:, column] = table[known - 1, column] + np.log(np.array(all_rows[known:]) / all_rows[known - 1])
        grid = np.log(all_rows), np.log(all_widths)

        def interpolated(prompts: Sequence[int]) -> float:
            place = [np.clip(np.log(value), axis[0], axis[-1]) for value, axis in _pairs(prompts, grid)]
            by_rows = [np.interp(place[1], grid[1], row) for row in table]
            return float(np.exp(np.interp(place[0], grid[0], by_rows)))

        return by_shape(interpolated)


def _pairs(prompts: Sequence[int], grid: tuple[np.ndarray, np.ndarray]) -> list[tuple[int, np.ndarray]]:
    return [(len(prompts), grid[0]), (max(prompts), grid[1])]


class PackedForward(Executor):
    """The engine's own: the tokens of all prompts packed, so that no padding is computed."""

    def __init__(self) -> None:
        served = ServedModel(name="chat", task=Task.GENERATION, path=str(MODEL))
        self._forward = make_forward(load(served, torch.device("cpu")))
        assert self._forward.kernel == "sixfold", "the engine computes the example model with a forward of its own"

    def __call__(self, prompts: Sequence[int]) -> float:
        tokens = [random.choices(range(5, _VOCABULARY), k=count) for count in prompts]
        started = time.thread_time()
        self._forward(tokens, self._forward.new_cache(len(tokens)))
        return time.thread_time() - started

    def model(self, quick: bool) -> Seconds:
        """A line over prompts, tokens and squared lengths, with the least relative error."""
        source = random.Random(0)
        batches = [[width] for width in _WIDTHS]
        while len(batches) < 40:
            drawn = lengths("lognormal", source.randint(2, 24), source.randint(0, 1 << 30))
            if sum(drawn) <= MOST_MEASURED_TOKENS:
                batches.append(drawn)
        seconds = np.array(_measured(batches, self, quick))
        features = np.array([_features(batch) for batch in batches])
        weights, *_ = np.linalg.lstsq(features / seconds[:, None], np.ones(len(batches)), rcond=None)
        floor = seconds.min()
        return lambda prompts: max(float(floor), float(np.dot(_features(prompts), weights)))


def by_shape(seconds: Seconds) -> Seconds:
    """Computes each shape (prompts, longest) once."""
    known: dict[tuple[int, int], float] = {}

    def shared(prompts: Sequence[int]) -> float:
        shape = len(prompts), max(prompts)
        if shape not in known:
            known[shape] = seconds(prompts)
        return known[shape]

    return shared


def _features(prompts: Sequence[int]) -> list[float]:
    return [1.0, float(len(prompts)), float(sum(prompts)), float(sum(tokens * tokens for tokens in prompts))]


def _measured(batches: Iterable[Sequence[int]], executor: Executor, quick: bool) -> list[float]:
    """Medians; short ones, of which many make an error, are computed more often."""
    executor([LEAST_TOKENS])
    budget_seconds = 0.1 if quick else 1.0
    found = []
    for batch in batches:
        taken = [executor(batch)]
        while sum(taken) < budget_seconds and len(taken) < _MOST_REPEATS:
            taken.append(executor(batch))
        found.append(statistics.median(taken))
    return found
