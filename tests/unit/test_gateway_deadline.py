"""Requests end in time, alone or all together, and are never cut off by a deadline that isn't theirs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable
from typing import Any

import pytest

from sixfold_runtime.gateway.deadline import Deadlines, until
from sixfold_runtime.gateway.errors import ApiError


class Numbers:
    """A source of numbers that are given from outside."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[int | None] = asyncio.Queue()
        self.closed = False

    async def events(self) -> AsyncGenerator[int, None]:
        try:
            while (number := await self.queue.get()) is not None:
                yield number
        finally:
            self.closed = True


def run(work: Awaitable[Any]) -> Any:
    async def main() -> Any:
        return await work

    return asyncio.run(main())


def test_events_in_time_are_all_there() -> None:
    async def main() -> None:
        numbers, deadline = Numbers(), Deadlines().begin(time.monotonic() + 60)
        for number in (1, 2, None):
            numbers.queue.put_nowait(number)
        assert [number async for number in until(deadline, numbers.events())] == [1, 2]
        assert numbers.closed
        deadline.close()

    run(main())


def test_what_comes_late_is_an_error_and_its_source_is_closed() -> None:
    async def main() -> None:
        numbers, deadline = Numbers(), Deadlines().begin(time.monotonic() + 0.01)
        numbers.queue.put_nowait(1)
        seen = []
        with pytest.raises(ApiError) as late:
            async for number in until(deadline, numbers.events()):
                seen.append(number)
        assert (late.value.status, seen, numbers.closed) == (504, [1], True)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0, "whoever waited isn't left cancelled"

    run(main())


def test_a_deadline_that_is_over_lets_nothing_begin() -> None:
    async def main() -> None:
        numbers, deadline = Numbers(), Deadlines().begin(time.monotonic() - 1)
        numbers.queue.put_nowait(1)
        with pytest.raises(ApiError):
            await anext(until(deadline, numbers.events()))

    run(main())


def test_a_reader_that_is_slow_learns_of_it_at_its_next_event() -> None:
    async def main() -> None:
        numbers, deadlines = Numbers(), Deadlines()
        numbers.queue.put_nowait(1)
        numbers.queue.put_nowait(2)
        events = until(deadlines.begin(time.monotonic() + 60), numbers.events())
        assert await anext(events) == 1
        deadlines.end_all()
        with pytest.raises(ApiError) as ended:
            await anext(events)
        assert (ended.value.status, ended.value.code) == (503, "shutting_down")
        assert numbers.closed

    run(main())


def test_all_that_run_or_still_come_end_together() -> None:
    async def main() -> None:
        deadlines = Deadlines()
        waiting = [
            asyncio.create_task(anext(until(deadlines.begin(time.monotonic() + 60), Numbers().events())))
            for _ in range(3)
        ]
        closed = deadlines.begin(time.monotonic() + 60)
        closed.close()
        await asyncio.sleep(0)
        deadlines.end_all()
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(result, ApiError)
            assert "Retry-After" in result.headers
        with closed:
            pass
        with pytest.raises(ApiError), deadlines.begin(time.monotonic() + 60):
            pass

    run(main())


def test_a_deadline_moves() -> None:
    async def main() -> None:
        numbers, deadline = Numbers(), Deadlines().begin(time.monotonic() + 60)
        deadline.move(time.monotonic() + 0.01)
        with pytest.raises(ApiError):
            await anext(until(deadline, numbers.events()))

    run(main())


def test_who_cancels_from_outside_is_obeyed() -> None:
    """Also when the deadline ends at the same moment."""

    async def main(both: bool) -> None:
        deadlines = Deadlines()
        numbers, deadline = Numbers(), deadlines.begin(time.monotonic() + 60)
        task = asyncio.create_task(anext(until(deadline, numbers.events())))
        await asyncio.sleep(0)
        if both:
            deadlines.end_all()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert numbers.closed

    run(main(False))
    run(main(True))
