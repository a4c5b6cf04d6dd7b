"""What a decoding step costs by the number of drafted tokens, learnt from the steps themselves."""

from __future__ import annotations

from bisect import bisect
from collections import deque

WINDOW_STEPS = 32
WELL_KNOWN_STEPS = 8
UNMEASURED_DISCOUNT = 0.95
SAMPLES_TO_TRUST = 2


class StepCosts:
    """Steps of about the same number of rows.

    What disturbs a step makes it longer, never shorter: on a busy machine most of them are. So the cost of a length
    is the lower quartile of its last steps. Between measured lengths costs are linear, and a little less than that
    until measured, so that lengths that may be the best are tried.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._windows: dict[int, deque[float]] = {}
        self._quartiles: dict[int, float] = {}
        self._draft_window: deque[float] = deque(maxlen=WINDOW_STEPS)
        self.draft_token_seconds: float | None = None
        """Of the draft for one token of all rows; None before it drafted."""
        self._measured_at: dict[int, int] = {}
        self._steps = 0
        self._seconds: list[float] = []

    def observe(self, drafted: int, draft_seconds: float, rest_seconds: float) -> None:
        """A step with drafts of up to `drafted` tokens took so long. What took no time tells nothing."""
        seconds = draft_seconds + rest_seconds
        if seconds <= 0:
            return
        if drafted:
            self._draft_window.append(draft_seconds / drafted)
            self.draft_token_seconds = _lower_quartile(self._draft_window)
        window = self._windows.setdefault(drafted, deque(maxlen=WINDOW_STEPS))
        window.append(seconds)
        self._quartiles[drafted] = _lower_quartile(window)
        self._seconds = []
        self._steps += 1
        self._measured_at[drafted] = self._steps

    def missing(self) -> int | None:
        """A length to measure before the rest can be judged: the longest, to start with, and none at all."""
        plain = len(self._windows.get(0, ()))
        drafting = max((len(window) for drafted, window in self._windows.items() if drafted > 0), default=0)
        if drafting < SAMPLES_TO_TRUST and drafting <= plain:
            return self._max_tokens
        return 0 if plain < SAMPLES_TO_TRUST else None

    def is_known(self, drafted: int) -> bool:
        """Whether this length was measured often, or never, when its discount sees to it."""
        window = self._windows.get(drafted)
        return window is None or len(window) >= WELL_KNOWN_STEPS

    def age_steps(self, drafted: int) -> int:
        """Steps since this length was last measured."""
        return self._steps - self._measured_at.get(drafted, 0)

    def seconds(self) -> list[float]:
        """Estimated seconds of a step by drafted tokens, 0 to the most. Empty before the first step."""
        if not self._seconds and self._quartiles:
            known = sorted(self._quartiles)
            # Verifying a draft takes no less than a plain step: so a useless draft is seen as such at any noise.
            least, token = self._quartiles.get(0, 0.0), self.draft_token_seconds or 0.0
            self._seconds = [
                max(self._estimate(drafted, known), least + drafted * token) for drafted in range(self._max_tokens + 1)
            ]
        return self._seconds

    def _estimate(self, drafted: int, known: list[int]) -> float:
        if drafted in self._quartiles:
            return self._quartiles[drafted]
        if len(known) == 1:
            return self._quartiles[known[0]]
        after = min(len(known) - 1, max(1, bisect(known, drafted)))
        first, second = known[after - 1], known[after]
        slope = max(0.0, (self._quartiles[second] - self._quartiles[first]) / (second - first))
        return UNMEASURED_DISCOUNT * (self._quartiles[first] + slope * max(0, drafted - first))


def _lower_quartile(window: deque[float]) -> float:
    return sorted(window)[(len(window) - 1) // 4]
