"""Log-probabilities as the API reports them, with each token's own bytes."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from sixfold_runtime.engine.candidates import Logits, largest
from sixfold_runtime.engine.protocol import TokenLogprob

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"
"""What SentencePiece writes for a space."""


class TokenBytes:
    """The bytes that a token stands for, which need not be whole characters.

    Decoding one token alone loses them (U+FFFD for part of a character, and many decoders drop a leading space), so
    they are read from the vocabulary, in the spelling that the tokenizer's decoder undoes: GPT-2's printable
    stand-ins for bytes, or SentencePiece's `<0xE4>` and U+2581.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {token_id: str(token) for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        self._byte_level = "ByteLevel" in _decoders(tokenizer)
        self._bytes = _byte_level_alphabet()

    def __call__(self, token: int) -> bytes:
        """Empty for an id that the tokenizer doesn't have: a padded row of the model's embedding."""
        spelled = self._tokenizer.id_to_token(token)
        if spelled is None:
            return b""
        if token in self._added:
            return spelled.encode()
        if self._byte_level and all(character in self._bytes for character in spelled):
            return bytes(self._bytes[character] for character in spelled)
        if match := _BYTE.fullmatch(spelled):
            return bytes.fromhex(match[1])
        return spelled.replace(_SPACE, " ").encode()


def token_logprob(logits: Logits, token: int, top: int, token_bytes: TokenBytes) -> TokenLogprob:
    """A token's log-probability and those of the `top` most likely ones: log-softmax of the logits as they are.

    Args:
        logits: float32 [vocabulary], finite.
    """
    highest = logits.max()
    normaliser = float(highest) + float(np.log(np.exp(logits - highest).sum(dtype=np.float64)))
    ids = largest(logits, top) if top else np.empty(0, dtype=np.int64)
    best = ids[np.argsort(-logits[ids], kind="stable")].tolist()

    def of(identifier: int, alternatives: list[TokenLogprob]) -> TokenLogprob:
        logprob = float(logits[identifier]) - normaliser
        return TokenLogprob(identifier, logprob, token_bytes(identifier), alternatives)

    return of(token, [of(other, []) for other in best])


def _decoders(tokenizer: Tokenizer) -> set[str]:
    """The kinds of the decoders that the tokenizer's decoder is made of."""
    if tokenizer.decoder is None:
        return set()
    state: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    return {state["type"], *(part["type"] for part in state.get("decoders", ()))}


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's characters for the 256 bytes: printable Latin-1 stands for itself, the rest starts at U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
