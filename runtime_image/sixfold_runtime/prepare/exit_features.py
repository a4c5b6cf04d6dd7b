"""What exit heads read, computed once: one pass of all texts through the trunk that the engine serves with."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from sixfold_runtime.engine.trunk import Trunk
from sixfold_runtime.prepare.failures import PreparationError, Reason
from sixfold_runtime.prepare.texts import Sample

_BATCH_TOKENS = 2048
_LINES = 10
"""Lines of progress in a log."""


@dataclass(frozen=True)
class Features:
    """Of a list of samples.

    Attributes:
        by_depth: float32 [depths, texts, 2 * width], on disk: a depth at a time is in memory.
        logits: float32 [texts, labels], the full model's.
        labels: int64 [texts].
        lengths: int64 [texts], tokens.
    """

    by_depth: NDArray[np.float32]
    logits: torch.Tensor
    labels: torch.Tensor
    lengths: NDArray[np.int64]

    def at(self, index: int, device: torch.device) -> torch.Tensor:
        """float32 [texts, 2 * width] at the depth with this index."""
        return torch.from_numpy(np.array(self.by_depth[index])).to(device)

    @property
    def answers(self) -> torch.Tensor:
        """int64 [texts], the full model's labels."""
        return self.logits.argmax(dim=1)


@torch.inference_mode()
def compute(
    trunk: Trunk, depths: Sequence[int], samples: Sequence[Sample], scratch: Path, log: Callable[[str], None]
) -> Features:
    """Features behind `depths` layers (from 1, ascending), and the full model's logits.

    Args:
        scratch: a folder with room for 8 * width bytes for each text and depth; nothing stays there.

    Raises PreparationError: NonFiniteWeights, with the line of the text.
    """
    assert trunk.own_head is not None
    with tempfile.TemporaryFile(dir=scratch) as file:  # the mapping holds it; its name is gone already
        shape = (len(depths), len(samples), 2 * trunk.width)
        by_depth = np.memmap(file, np.float32, "w+", shape=shape)
    logits = torch.zeros(len(samples), len(trunk.own_head.labels))
    for batch in _shown(_batches(samples), len(samples), log):
        rows = trunk.embed([samples[index].ids for index in batch])
        for depth in range(1, trunk.layers + 1):
            rows = trunk.layer(depth - 1, rows)
            if depth in depths:
                features = trunk.features(rows).cpu()
                _require_finite(features, [samples[index] for index in batch], f"after {depth} layers")
                by_depth[depths.index(depth), batch] = features.numpy()
        answers = trunk.own_head(rows).cpu()
        _require_finite(answers, [samples[index] for index in batch], "after the last layer")
        logits[batch] = answers
    labels = torch.tensor([sample.label for sample in samples])
    return Features(by_depth, logits, labels, np.array([len(sample.ids) for sample in samples]))


def _batches(samples: Sequence[Sample]) -> list[list[int]]:
    """Indices of samples of like length, at most `_BATCH_TOKENS` tokens together."""
    batches: list[list[int]] = []
    tokens = 0
    for index in sorted(range(len(samples)), key=lambda index: len(samples[index].ids)):
        tokens += len(samples[index].ids)
        if not batches or tokens > _BATCH_TOKENS:
            batches.append([])
            tokens = len(samples[index].ids)
        batches[-1].append(index)
    return batches


def _shown(batches: Sequence[list[int]], texts: int, log: Callable[[str], None]) -> Iterator[list[int]]:
    done = 0
    for number, batch in enumerate(batches, start=1):
        yield batch
        done += len(batch)
        if number % max(1, len(batches) // _LINES) == 0:
            log(f"{done} of {texts} texts went through the trunk")


def _require_finite(values: torch.Tensor, samples: Sequence[Sample], where: str) -> None:
    finite = torch.isfinite(values).all(dim=1)
    if not bool(finite.all()):
        line = samples[int(finite.int().argmin())].line
        raise PreparationError(
            Reason.NON_FINITE_WEIGHTS, f"line {line}: {where} the model computes NaN or infinite values"
        )
