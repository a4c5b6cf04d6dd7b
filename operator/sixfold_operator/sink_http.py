"""JSON over HTTP to a sink: bounded, without redirects, and errors that say what was answered."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

from sixfold_operator.sinks import SinkError

TIMEOUT = aiohttp.ClientTimeout(total=15, connect=5)
MAX_ANSWER_BYTES = 4 * 2**20
LONGEST_WAIT_SECONDS = 86400.0


async def call(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    headers: Mapping[str, str],
    body: Any = None,
    missing: tuple[int, ...] = (),
    query: Mapping[str, str] | None = None,
) -> Any:
    """The decoded answer; None where there is none, or its status is one of `missing`. `body` is JSON, or bytes.

    Raises SinkError for anything else than success: also for redirects, which could lead to anywhere.
    """
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    sent = {
        "Content-Type": "application/json",
        "Accept": "application/json",
        "User-Agent": "sixfold-operator",
        **headers,
    }
    try:
        async with session.request(
            method, url, data=data, headers=sent, params=query, allow_redirects=False, timeout=TIMEOUT
        ) as answer:
            if answer.status in missing:
                return None
            if not 200 <= answer.status < 300:
                raise SinkError(_refusal(answer.status), _retry_after_seconds(answer.headers, datetime.now(UTC)))
            content = await answer.content.read(MAX_ANSWER_BYTES)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise SinkError(f"it can't be reached: {type(error).__name__}") from error
    try:
        return json.loads(content) if content.strip() else None
    except ValueError:
        return None


def _refusal(status: int) -> str:
    why = {401: ": check its secret", 403: ": check its secret's rights", 404: ": check its address"}.get(status, "")
    return f"it answered {status}" + (", and redirects aren't followed" if 300 <= status < 400 else why)


def _retry_after_seconds(headers: Mapping[str, str], now: datetime) -> float:
    """Of Retry-After in seconds or as a date, or of GitHub's rate limit; 0 without either."""
    text = headers.get("Retry-After", "")
    if not text and headers.get("X-RateLimit-Remaining") == "0":
        reset = headers.get("X-RateLimit-Reset", "")
        return _bounded(float(reset) - now.timestamp()) if reset.isdecimal() else 0.0
    try:
        return _bounded(float(text))
    except ValueError:
        pass
    try:
        return _bounded((parsedate_to_datetime(text) - now).total_seconds())
    except (ValueError, TypeError):
        return 0.0


def _bounded(seconds: float) -> float:
    return min(max(seconds, 0.0), LONGEST_WAIT_SECONDS) if math.isfinite(seconds) else 0.0
