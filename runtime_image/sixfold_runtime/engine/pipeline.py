"""Where picks run: at once in the engine's thread, or in sampler threads beside it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from sixfold_runtime.engine.picker import Draft, Picked, Picker

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """A row of a step's logits, and who picks from it."""

    picker: Picker
    draft: Draft
    positions: int
    """Logits used of the row: drafted tokens + 1."""


class Picks(Protocol):
    """The results of a submitted step."""

    def result(self) -> list[Picked]:
        """One for each task, in order; waits for the last of them."""


class LogitsSampler(Protocol):
    """Takes a step's logits and picks from them."""

    def submit(self, logits: torch.Tensor, tasks: Sequence[Task]) -> Picks:
        """Start picking.

        Args:
            logits: float32 [rows, positions, vocabulary]; row i belongs to tasks[i]. The caller may overwrite it
                after this returns.
        """

    def close(self) -> None:
        """Finish what was submitted, and take nothing more."""


def pick(task: Task, logits: npt.NDArray[np.float32]) -> Picked:
    """One task's pick; whatever it raises fails its request and no other.

    Args:
        logits: [positions or more, vocabulary].
    """
    try:
        return task.picker.pick(logits[: task.positions], task.draft)
    except Exception:
        log.exception("the sampler failed on a request")
        return Picked(faulty=True)


@dataclass(frozen=True)
class _Done:
    picked: list[Picked]

    def result(self) -> list[Picked]:
        return self.picked


class InlineSampler:
    """Picks in the calling thread."""

    def submit(self, logits: torch.Tensor, tasks: Sequence[Task]) -> Picks:
        """See LogitsSampler."""
        rows = logits.detach().cpu().numpy()
        return _Done([pick(task, row) for task, row in zip(tasks, rows, strict=True)])

    def close(self) -> None:
        """Nothing is held."""
