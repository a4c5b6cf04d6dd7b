"""What batches cost an engine, learned from those that it computed. Pure."""

from __future__ import annotations

_KEPT = 0.97
"""Weight of what was measured before, with each new measurement: about the last 30 batches count."""
_FIRST_OVERHEAD_TOKENS = 64.0
_MIN_OVERHEAD_TOKENS, _MAX_OVERHEAD_TOKENS = 8.0, 256.0
_WORTH_A_LINE = 0.1
"""Relative spread of the batch sizes below which no slope can be told from them."""


class Costs:
    """Seconds of a batch as a line over its padded tokens: least squares in which older batches count less and less."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, padded_tokens: int, seconds: float) -> None:
        """A batch was computed in this time, from when the engine had nothing before it."""
        x, y = float(padded_tokens), seconds
        for name, value in (("_weight", 1.0), ("_x", x), ("_y", y), ("_xx", x * x), ("_xy", x * y)):
            setattr(self, name, _KEPT * getattr(self, name) + value)

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
    def overhead_tokens(self) -> float:
        """What a batch costs beside its tokens, in tokens."""
        line = self._line()
        if line is None:
            return _FIRST_OVERHEAD_TOKENS
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
