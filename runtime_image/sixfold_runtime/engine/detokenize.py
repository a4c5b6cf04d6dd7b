"""Token ids to text, one at a time, without ever showing half a character."""

from __future__ import annotations

from tokenizers import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_UNFINISHED_BYTES = 3
_MAX_PENDING_TOKENS = 16


class Detokenizer:
    """Text of a growing list of tokens.

    A character whose bytes are spread over tokens decodes to U+FFFD until it is complete, so up to three of these at
    the end are held back. Tokens are decoded together with those of the piece before, since many tokenizers treat
    the first token of a text differently.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._pending: list[int] = []
        self._shown_characters = 0
        """Of the pending tokens' text."""

    def push(self, token: int) -> str:
        """Text that became certain with this token."""
        self._pending.append(token)
        text = self._text()
        # A model that writes nothing but invalid bytes doesn't make the window grow for ever.
        if not text.endswith(_REPLACEMENT) or len(self._pending) >= _MAX_PENDING_TOKENS:
            return self._close(text)
        held = min(_MAX_UNFINISHED_BYTES, len(text) - len(text.rstrip(_REPLACEMENT)))
        certain = text[: len(text) - held]
        shown = certain[self._shown_characters :]
        self._shown_characters = max(self._shown_characters, len(certain))
        return shown

    def flush(self) -> str:
        """Text held back, when no token follows; bytes of an unfinished character become U+FFFD."""
        return self._close(self._text())

    def _text(self) -> str:
        """What the pending tokens add to the context."""
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._pending)[len(before) :]

    def _close(self, text: str) -> str:
        """Show the rest of the pending text; its tokens become the context of the next."""
        rest = text[self._shown_characters :]
        if text:
            self._context, self._pending, self._shown_characters = self._pending, [], 0
        return rest
