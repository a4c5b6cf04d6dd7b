"""Which answers are computed again at level 0, and which of them are given up when there is no time for all. Pure."""

from __future__ import annotations

from collections import deque
from hashlib import blake2b
from typing import Generic, TypeVar

Job = TypeVar("Job")
_HASH_BYTES = 8


def is_sampled(request_id: str, rate: float) -> bool:
    """Whether a request belongs to the sampled share: the same answer each time, and for all rates above."""
    digest = blake2b(request_id.encode(), digest_size=_HASH_BYTES).digest()
    return int.from_bytes(digest, "big") < rate * (1 << 8 * _HASH_BYTES)


class Backlog(Generic[Job]):
    """Jobs that wait, first come, first served, and bounded.

    A full one gives up the oldest: what is measured tells whether the configuration of now is good, so of two answers
    the later says more.
    """

    def __init__(self, max_jobs: int) -> None:
        self._max_jobs = max_jobs
        self._jobs: deque[Job] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: Job) -> Job | None:
        """Returns the one that is given up, if one is."""
        self._jobs.append(job)
        return self._jobs.popleft() if len(self._jobs) > self._max_jobs else None

    def take(self) -> Job | None:
        """The oldest; None if there is none."""
        return self._jobs.popleft() if self._jobs else None
