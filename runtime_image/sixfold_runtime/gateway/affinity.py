"""Which engine a request's keys and values are likely to be on: the same for every gateway that is asked. Pure."""

from __future__ import annotations

import array
import hashlib
from collections.abc import Iterable, Sequence


def conversation_key(tenant: str, conversation: str) -> bytes:
    """The same for all turns of a conversation."""
    return _digest(tenant, b"conversation", conversation.encode())


def prompt_key(tenant: str, token_ids: Sequence[int], block_tokens: int) -> bytes | None:
    """The same for prompts that share their first block of keys and values; None for those that fill none."""
    if block_tokens < 1 or len(token_ids) < block_tokens:
        return None
    return _digest(tenant, b"prompt", array.array("q", token_ids[:block_tokens]).tobytes())


def nearest(key: bytes, pods: Iterable[str]) -> str | None:
    """The pod that a key belongs to, by rendezvous hashing (Thaler and Ravishankar, 1998): when a pod comes or goes,
    only its own keys move. None where there are no pods."""
    return max(pods, key=lambda pod: hashlib.sha256(key + pod.encode()).digest(), default=None)


def _digest(tenant: str, kind: bytes, content: bytes) -> bytes:
    name = tenant.encode()
    return hashlib.sha256(len(name).to_bytes(4, "big") + name + kind + b"\0" + content).digest()
