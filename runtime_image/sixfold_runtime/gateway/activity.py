"""Whether anybody asks: what a policy whose engines may sleep is judged by."""

from __future__ import annotations

import time
from collections.abc import Callable


class Activity:
    """Of the requests that were let in. Whoever may not ask keeps nobody awake."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running = 0
        self._idle_since_seconds = clock()

    @property
    def idle_seconds(self) -> float:
        """Since the last request ended, or since the start; 0 while one runs or waits."""
        return 0.0 if self._running else self._clock() - self._idle_since_seconds

    def begin(self) -> None:
        self._running += 1

    def end(self) -> None:
        self._running -= 1
        self._idle_since_seconds = self._clock()
