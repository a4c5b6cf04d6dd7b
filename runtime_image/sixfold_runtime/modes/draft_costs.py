"""What a decoding step costs by the number of drafted tokens, learnt from the steps themselves."""

from __future__ import annotations

from bisect import bisect
from collections import deque

WINDOW_STEPS = 9
LEVEL_WEIGHT = 0.1
LEVEL_BOUND = 2.0
UNMEASURED_DISCOUNT = 0.95
SAMPLES_TO_TRUST = 2
CHEAPEST = 1e-9


class StepCosts:
    """Steps of about the same number of rows.

    Machines get slower and faster, and contexts longer, while only one length at a time is being measured. So what is
    kept of each length is its cost relative to a common level, which follows every step: then a slow minute changes no
    comparison. A relative cost is the median of nine. While one length is kept for long, deviations are the level's:
    only a change of length tells how two compare. Between measured lengths costs are linear, and a little less than
    that until measured, so that lengths that may be the best are tried.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._level_seconds = 0.0
        self._windows: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._measured_at: dict[int, int] = {}
        self._steps = 0
        self._relative: list[float] = []

    def observe(self, drafted: int, seconds: float) -> None:
        """A step with drafts of up to `drafted` tokens took so long. What took no time tells nothing."""
        if seconds <= 0:
            return
        if not self._windows:
            self._level_seconds = seconds
        window = self._windows.setdefault(drafted, deque(maxlen=WINDOW_STEPS))
        if len(window) < WINDOW_STEPS or self.age_steps(drafted) > 0:
            window.append(seconds / self._level_seconds)
        median = sorted(window)[(len(window) - 1) // 2]
        if median != self._medians.get(drafted):
            self._medians[drafted] = median
            self._relative = []
        deviation = seconds / (self._level_seconds * median)
        self._level_seconds *= min(LEVEL_BOUND, max(1 / LEVEL_BOUND, deviation)) ** LEVEL_WEIGHT
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
        """Whether the window of this length is full, or there is nothing of it to improve an estimate with."""
        window = self._windows.get(drafted)
        return window is None or len(window) == WINDOW_STEPS

    def age_steps(self, drafted: int) -> int:
        """Steps since this length was last measured."""
        return self._steps - self._measured_at.get(drafted, 0)

    @property
    def level_seconds(self) -> float:
        """Seconds of a step whose relative cost is 1, at present. 0 before the first step."""
        return self._level_seconds

    def relative(self) -> list[float]:
        """Estimated cost of a step by drafted tokens, 0 to the most, in levels. Empty before the first step."""
        if not self._relative and self._medians:
            known = sorted(self._medians)
            self._relative = [self._estimate(drafted, known) for drafted in range(self._max_tokens + 1)]
        return self._relative

    def _estimate(self, drafted: int, known: list[int]) -> float:
        if drafted in self._medians:
            return self._medians[drafted]
        if len(known) == 1:
            return self._medians[known[0]]
        after = min(len(known) - 1, max(1, bisect(known, drafted)))
        first, second = known[after - 1], known[after]
        slope = max(0.0, (self._medians[second] - self._medians[first]) / (second - first))
        return UNMEASURED_DISCOUNT * max(CHEAPEST, self._medians[first] + slope * (drafted - first))
