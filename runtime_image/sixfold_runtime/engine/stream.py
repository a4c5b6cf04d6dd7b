"""One request's output: tokens in, text and an end out. All that ends a generation is decided here."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from tokenizers import Tokenizer

from sixfold_runtime.engine.detokenize import Detokenizer
from sixfold_runtime.engine.protocol import FinishReason
from sixfold_runtime.engine.stops import StopMatcher


class OutputStream:
    """Detokenises, looks for stop tokens and stop strings, and counts.

    Attributes:
        tokens: generated so far, an end-of-sequence token included.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: tuple[str, ...], eos_ids: AbstractSet[int], max_tokens: int
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopMatcher(stops)
        self._eos_ids = eos_ids
        self._max_tokens = max_tokens
        self.tokens = 0

    def push(self, token: int) -> tuple[str, FinishReason | None]:
        """Take a token; returns the text that may be shown now, and why the output ends here, if it does."""
        self.tokens += 1
        if token in self._eos_ids:
            return self._end("", FinishReason.STOP)
        text, stopped = self._stops.push(self._detokenizer.push(token))
        if stopped:
            return text, FinishReason.STOP
        if self.tokens >= self._max_tokens:
            return self._end(text, FinishReason.LENGTH)
        return text, None

    def _end(self, text: str, reason: FinishReason) -> tuple[str, FinishReason]:
        rest, stopped = self._stops.push(self._detokenizer.flush())
        if stopped:
            return text + rest, FinishReason.STOP
        return text + rest + self._stops.flush(), reason
