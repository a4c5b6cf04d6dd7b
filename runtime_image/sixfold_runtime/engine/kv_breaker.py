"""A circuit breaker: after a few faults in a row nobody waits for what doesn't answer. Pure; the time is handed in."""

from __future__ import annotations

FAULTS_TO_OPEN = 3
FIRST_WAIT_SECONDS = 0.1
LONGEST_WAIT_SECONDS = 1.0
"""So that two waits after a recovery at the latest everything is as before."""


class Breaker:
    """Closed: everything is tried. Open: nothing, until the wait is over; then one trial at a time decides, and each
    that fails doubles the wait."""

    def __init__(self) -> None:
        self._faults = 0
        self._wait_seconds = FIRST_WAIT_SECONDS
        self._until_seconds: float | None = None

    @property
    def is_open(self) -> bool:
        return self._until_seconds is not None

    def wait_seconds(self, now_seconds: float) -> float:
        """Until the next trial; 0 when it is due, or while closed."""
        return 0.0 if self._until_seconds is None else max(0.0, self._until_seconds - now_seconds)

    def failed(self, now_seconds: float) -> None:
        self._faults += 1
        if self._faults >= FAULTS_TO_OPEN:
            self.trial_failed(now_seconds)

    def trial_failed(self, now_seconds: float) -> None:
        """One is enough to know."""
        self._until_seconds = now_seconds + self._wait_seconds
        self._wait_seconds = min(LONGEST_WAIT_SECONDS, 2 * self._wait_seconds)

    def tried(self) -> None:
        """A trial went well: closed, but one fault of the real thing opens it again, with the longer wait."""
        self._until_seconds, self._faults = None, FAULTS_TO_OPEN - 1

    def succeeded(self) -> None:
        """The real thing went well. While open that is one that began before, and proves nothing."""
        if not self.is_open:
            self._faults, self._wait_seconds = 0, FIRST_WAIT_SECONDS
