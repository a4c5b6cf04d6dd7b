"""What batches cost an engine, learned from those that it computed. Pure."""

from __future__ import annotations

_KEPT = 0.97
"""Weight of what was measured before, with each new measurement: about the last 30 batches count."""
FIRST_OVERHEAD_TOKENS = 64.0
"""Until it was measured."""
_MIN_OVERHEAD_TOKENS, _MAX_OVERHEAD_TOKENS = 8.0, 256.0
_MOST_TIMES_EXPECTED = 4.0
"""An engine may have been held up for reasons of its own: what took longer counts as this."""
_WORTH_A_LINE = 0.1
"""Relative spread of the batch sizes below which no slope can be told from them."""


class Costs:
    """Seconds of a batch as a line over its padded tokens: least squares in which older batches count less and less."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, padded_tokens: int, seconds: float) -> None:
        """A batch was computed in this time, from when the engine had nothing before it."""
        expected = self.seconds(padded_tokens)
        x, y = float(padded_tokens), seconds if expected is None else min(seconds, _MOST_TIMES_EXPECTED * expected)
        self._weight = _KEPT * self._weight + 1
        self._x, self._y = _KEPT * self._x + x, _KEPT * self._y + y
        self._xx, self._xy = _KEPT * self._xx + x * x, _KEPT * self._xy + x * y

    def seconds(self, padded_tokens: int) -> float | None:
        """How long such a batch takes; None before anything was measured."""
        if not self._weight:
            return None
        line = self._line()
        if line is None:
            overhead = self.overhead_tokens
            return self._y / (self._x + overhead * self._weight) * (padded_tokens + overhead)
        fixed, slope = line
        return fixed + slope * padded_tokens

    @property
    def token_seconds(self) -> float:
        """What a token adds; 0 before anything was measured."""
        return (self.seconds(1) or 0.0) - (self.seconds(0) or 0.0)

    @property
    def overhead_tokens(self) -> float:
        """What a batch costs beside its tokens, in tokens."""
        line = self._line()
        if line is None:
            return FIRST_OVERHEAD_TOKENS
        return min(_MAX_OVERHEAD_TOKENS, max(_MIN_OVERHEAD_TOKENS, line[0] / line[1]))

    def _line(self) -> tuple[float, float] | None:
        """Seconds of an empty batch, and of a token; None where the measurements don't tell."""
        if self._weight < 2:
            return None
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x**2
        if spread < (_WORTH_A_LINE * mean_x) ** 2:
            return None
        slope = (self._xy / self._weight - mean_x * mean_y) / spread
        return (max(0.0, mean_y - slope * mean_x), slope) if slope > 0 else None
