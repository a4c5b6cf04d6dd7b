"""How long requests may take: each by itself, and all of them when the gateway stops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType
from typing import TypeVar

from sixfold_runtime.gateway.errors import ApiError, deadline_exceeded, unavailable

T = TypeVar("T")


class Deadlines:
    """Of all requests that run."""

    def __init__(self) -> None:
        self._open: set[Deadline] = set()
        self._error: ApiError | None = None

    def begin(self, deadline_seconds: float) -> Deadline:
        """For a request that has to end by this time of time.monotonic(); close it when the request ended."""
        deadline = Deadline(deadline_seconds, self._open)
        if self._error is not None:
            deadline.end(self._error)
        return deadline

    def end_all(self) -> None:
        """End what runs and what still comes with an error: the gateway is about to stop."""
        self._error = unavailable("this gateway is shutting down; send the request again", "shutting_down")
        for deadline in list(self._open):
            deadline.end(self._error)


class Deadline:
    """As a context, what a request waits for; one task at a time may be in it.

    Not asyncio.timeout: a request waits for each of its tokens, and a timer for each costs more than all else that is
    done for one.

    Attributes:
        seconds: of time.monotonic().
    """

    def __init__(self, seconds: float, all_open: set[Deadline]) -> None:
        self.seconds = seconds
        self._all_open = all_open
        self._error: ApiError | None = None
        self._task: asyncio.Task[object] | None = None
        self._cancellations = 0
        all_open.add(self)
        self._timer = self._start()

    def move(self, seconds: float) -> None:
        self._timer.cancel()
        self.seconds = seconds
        self._timer = self._start()

    def _start(self) -> asyncio.TimerHandle:
        left_seconds = max(0.0, self.seconds - time.monotonic())
        return asyncio.get_running_loop().call_later(left_seconds, self._is_over)

    def _is_over(self) -> None:
        self.end(deadline_exceeded())

    def end(self, error: ApiError) -> None:
        """From now on the context raises `error`, and at once if a task is in it."""
        if self._error is None:
            self._error = error
            if self._task is not None:
                self._task.cancel()

    def close(self) -> None:
        self._timer.cancel()
        self._all_open.discard(self)

    def __enter__(self) -> None:
        if self._error is None and time.monotonic() >= self.seconds:
            self._is_over()
        if self._error is not None:
            raise self._error
        self._task = asyncio.current_task()
        self._cancellations = 0 if self._task is None else self._task.cancelling()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if self._error is None or task is None:
            return
        is_only_cause = task.uncancel() <= self._cancellations
        if is_only_cause and isinstance(error, asyncio.CancelledError):
            raise self._error from None


async def until(deadline: Deadline, events: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """The same events, as long as they come in time.

    Raises:
        ApiError: once the deadline is over; `events` are closed, which cancels at the engine.
    """
    async with aclosing(events):
        while True:
            with deadline:
                try:
                    event = await anext(events)
                except StopAsyncIteration:
                    return
            yield event
