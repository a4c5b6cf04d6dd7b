"""Answers that are computed again at level 0 while the engine has nothing else to do, piece by piece.

A piece is about as long as a step, so that is the most that a new request waits for it. No job is a request: none is
counted as one, nor its time as the engine's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch

from sixfold_runtime.engine.shadow_metrics import AGREE, DIFFER, SKIPPED, ShadowMetrics
from sixfold_runtime.modes.shadow import Backlog

log = logging.getLogger(__name__)
MAX_JOBS = 64

Pieces = Generator[None, None, bool]
"""Computes a piece each time that it is resumed; returns whether the answers agree. Holds whatever memory it needs."""


class GivenUpError(Exception):
    """The comparison of an answer can't be made, for a reason that isn't a fault."""


@dataclass(frozen=True)
class ShadowJob:
    """An answer to be compared, and where that is counted."""

    metrics: ShadowMetrics
    task: str
    level: int
    """At which it was given, as `arm`."""
    arm: str
    start: Callable[[], Pieces]
    """Computes nothing yet."""

    def count(self, result: str) -> None:
        self.metrics.answer(self.task, self.level, self.arm, result)


class Shadows:
    """The jobs of all models of an engine. Used from its thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._backlog: Backlog[ShadowJob] = Backlog(MAX_JOBS)
        self._running: tuple[ShadowJob, Pieces] | None = None
        self._has_logged_memory = False

    def __len__(self) -> int:
        """Jobs that aren't done."""
        return len(self._backlog) + (self._running is not None)

    def offer(self, job: ShadowJob) -> None:
        """Compare this answer some time, or count it as skipped where there is never time for all."""
        dropped = self._backlog.add(job)
        if dropped is not None:
            dropped.count(SKIPPED)

    def advance(self) -> None:
        """Compute one piece; only where there are jobs. Never raises for a job's sake."""
        if self._running is None:
            job = self._backlog.take()
            assert job is not None, "asked only while there are jobs"
            self._running = job, job.start()
        job, pieces = self._running
        began = self._clock()
        try:
            next(pieces)
        except StopIteration as end:
            self._end(job, AGREE if end.value else DIFFER)
        except GivenUpError as reason:
            log.debug("an answer isn't compared with level 0's: %s", reason)
            self._end(job, SKIPPED)
        except torch.OutOfMemoryError:
            self._log_memory()
            self._end(job, SKIPPED)
        except Exception:  # a fault of ours: it ends this job, not the loop
            log.exception("an answer can't be compared with level 0's")
            self._end(job, SKIPPED)
        job.metrics.computed(self._clock() - began)

    def clear(self) -> None:
        """Forget all, uncounted: the engine stops."""
        self._backlog, self._running = Backlog(MAX_JOBS), None

    def _end(self, job: ShadowJob, result: str) -> None:
        self._running = None
        job.count(result)

    def _log_memory(self) -> None:
        if not self._has_logged_memory:
            self._has_logged_memory = True
            log.warning("no memory to compare an answer with level 0's: such ones are skipped (said only once)")
