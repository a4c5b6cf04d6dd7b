"""Stop strings in a stream of text: found wherever they start, never shown, not even in part."""

from __future__ import annotations

from collections.abc import Iterable


class StopMatcher:
    """Passes text through until a stop string is complete.

    The stop string that is complete first ends the text, so that the result doesn't depend on how the text arrives
    in pieces.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Take more text; returns what may be shown now, and whether a stop string was found (then all is over)."""
        text = self._held + text
        found = [(text.find(stop) + len(stop), len(stop)) for stop in self._stops if stop in text]
        if found:
            end, length = min(found, key=lambda match: (match[0], -match[1]))
            self._held = ""
            return text[: end - length], True
        kept = max((self._overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept], False

    def flush(self) -> str:
        """The text held back, when nothing more comes."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that begins `stop`."""
        longest = min(len(text), len(stop) - 1)
        return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
