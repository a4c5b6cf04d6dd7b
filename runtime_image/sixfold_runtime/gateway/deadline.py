"""Events that end in time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

from sixfold_runtime.gateway.errors import deadline_exceeded

T = TypeVar("T")


async def until(deadline_seconds: float, events: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """The same events, as long as they come before `deadline_seconds` (of time.monotonic()).

    Raises:
        ApiError: 504, then; `events` are closed, which cancels at the engine.
    """
    async with aclosing(events):
        while True:
            left_seconds = deadline_seconds - time.monotonic()
            if left_seconds <= 0:
                raise deadline_exceeded()
            try:
                async with asyncio.timeout(left_seconds) as limit:
                    event = await anext(events)
            except StopAsyncIteration:
                return
            except TimeoutError:
                if limit.expired():
                    raise deadline_exceeded() from None
                raise
            yield event
