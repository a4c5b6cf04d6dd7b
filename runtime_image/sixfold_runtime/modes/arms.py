"""Which requests are the canary's: a share of them by hash, the same ones in every gateway and at every step. Pure.

A key's place between 0 and 100 % never changes: what is in at 5 % is still in at 25 %, and a conversation isn't torn
from what it has begun with when the share grows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from sixfold_api.analysis import HashBy
from sixfold_api.runtime_config import CANARY, STABLE, CanaryConfig

_SALT = b"sixfold/canary"
"""Not a step's or a canary's own: the place of a key has to stay. Another hash than the one that chooses engines, so
that the canary's requests don't come to a part of the engines only."""
_BEGINNING_CHARACTERS = 256
_BEGINNING_TOKENS = 64


def arm_of(canary: CanaryConfig | None, key: bytes) -> str:
    """The arm of all requests with this key."""
    if canary is None:
        return STABLE
    drawn = int.from_bytes(hashlib.blake2b(key, digest_size=8, salt=_SALT).digest(), "big")
    return CANARY if drawn * 100 < canary.percent << 64 else STABLE


def arm_key(
    hash_by: HashBy, request_id: str, tenant: str, conversation: str, beginning: Iterable[str | Sequence[int]]
) -> bytes:
    """What a request is told by.

    Args:
        conversation: as the client calls it; "" where it doesn't.
        beginning: what all turns of the conversation begin with, as text or token ids: told by where it has no name.
    """
    if hash_by == HashBy.REQUEST:
        return _joined("request", request_id)
    if conversation:
        return _joined("conversation", tenant, conversation)
    return _joined("beginning", tenant, *(part if isinstance(part, str) else repr(list(part)) for part in beginning))


def chat_beginning(messages: Iterable[Mapping[str, str]]) -> list[str]:
    """Of messages with role and content: all up to the first of the user's, which every later turn repeats."""
    beginning: list[str] = []
    for message in messages:
        beginning += (message["role"], message["content"])
        if message["role"] == "user":
            break
    return beginning


def prompt_beginning(prompt: str | Sequence[int]) -> str | Sequence[int]:
    """About a block of it: a prompt that grows by each turn keeps that."""
    return prompt[: _BEGINNING_CHARACTERS if isinstance(prompt, str) else _BEGINNING_TOKENS]


def _joined(*parts: str) -> bytes:
    """Different for different parts: each is behind its length."""
    encoded = [part.encode("utf-8", "surrogatepass") for part in parts]
    return b"".join(len(part).to_bytes(8, "big") + part for part in encoded)
