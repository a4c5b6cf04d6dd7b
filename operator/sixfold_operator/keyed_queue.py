"""A queue of keys: each at most once, one run at a time, with back-off. Pure; the clock is an argument.

`Workers` is the asyncio shell around it.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Backoff:
    """Delay after the n-th failure in a row: `first_seconds * 2 ** (n - 1)`, at most `longest_seconds`."""

    first_seconds: float = 0.5
    longest_seconds: float = 60.0

    def seconds(self, failures: int) -> float:
        return min(self.longest_seconds, self.first_seconds * 2.0 ** min(failures - 1, 30))


class KeyedQueue(Generic[K]):
    """Keys with the moment at which each is due.

    A key that is added again keeps the earlier moment. A key that is added while it runs is handed out again
    after that run, never beside it. Times are seconds of any monotonic clock.
    """

    def __init__(self, backoff: Backoff | None = None) -> None:
        self._backoff = backoff or Backoff()
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._order = itertools.count()
        self._running: dict[K, float] = {}
        self._failures: dict[K, int] = {}

    def __len__(self) -> int:
        return len(self._due)

    def add(self, key: K, now: float, delay_seconds: float = 0.0) -> None:
        """Ask for a run of `key` after the delay at the latest."""
        due = now + max(0.0, delay_seconds)
        if key in self._due and self._due[key] <= due:
            return
        self._due[key] = due
        if key not in self._running:
            heapq.heappush(self._heap, (due, next(self._order), key))

    def take(self, now: float) -> K | None:
        """The key that is due longest, marked as running; None if none is due."""
        self._drop_stale()
        if not self._heap or self._heap[0][0] > now:
            return None
        _, _, key = heapq.heappop(self._heap)
        del self._due[key]
        self._running[key] = now
        return key

    def done(self, key: K, now: float, *, failed: bool = False, again_seconds: float | None = None) -> None:
        """End the run of `key`. A failure comes back after the back-off, a success after `again_seconds` if given."""
        del self._running[key]
        if failed:
            self._failures[key] = self._failures.get(key, 0) + 1
            again_seconds = self._backoff.seconds(self._failures[key])
        else:
            self._failures.pop(key, None)
        waiting = self._due.pop(key, None)
        times = [due for due in (waiting, None if again_seconds is None else now + again_seconds) if due is not None]
        if times:
            self.add(key, now, min(times) - now)

    def next_due(self) -> float | None:
        """When `take` will next give something; None if only an `add` or a `done` can change that."""
        self._drop_stale()
        return self._heap[0][0] if self._heap else None

    def longest_run_seconds(self, now: float) -> float:
        """For how long the oldest unfinished run has been going on."""
        return max((now - since for since in self._running.values()), default=0.0)

    def overdue_seconds(self, now: float) -> float:
        """For how long the first key in line has been waiting beyond its moment."""
        due = self.next_due()
        return 0.0 if due is None else max(0.0, now - due)

    def _drop_stale(self) -> None:
        """An entry of the heap counts only while it is the key's own moment and the key doesn't run."""
        while self._heap:
            due, _, key = self._heap[0]
            if key not in self._running and self._due.get(key) == due:
                return
            heapq.heappop(self._heap)


class Workers(Generic[K]):
    """Runs `handle(key)` for each key that is due, at most `limit` at once.

    `handle` returns after how many seconds it wants to run again, or None; an exception counts as a failure and
    is expected to have been reported by `handle` itself.
    """

    def __init__(
        self,
        queue: KeyedQueue[K],
        handle: Callable[[K], Awaitable[float | None]],
        limit: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.queue = queue
        self._handle = handle
        self._limit = limit
        self._clock = clock
        self._wake = asyncio.Event()

    def enqueue(self, key: K, delay_seconds: float = 0.0) -> None:
        self.queue.add(key, self._clock(), delay_seconds)
        self._wake.set()

    async def run(self) -> None:
        """Never returns; cancelling it cancels the runs."""
        async with asyncio.TaskGroup() as group:
            running: set[asyncio.Task[None]] = set()
            while True:
                self._wake.clear()
                while len(running) < self._limit and (key := self.queue.take(self._clock())) is not None:
                    task = group.create_task(self._one(key))
                    running.add(task)
                    task.add_done_callback(lambda ended: self._free(running, ended))
                due = self.queue.next_due() if len(running) < self._limit else None
                timeout = None if due is None else max(0.0, due - self._clock())
                try:
                    async with asyncio.timeout(timeout):
                        await self._wake.wait()
                except TimeoutError:
                    pass

    async def _one(self, key: K) -> None:
        again_seconds, failed = None, False
        try:
            again_seconds = await self._handle(key)
        except Exception:
            failed = True
        finally:
            self.queue.done(key, self._clock(), failed=failed, again_seconds=again_seconds)

    def _free(self, running: set[asyncio.Task[None]], ended: asyncio.Task[None]) -> None:
        running.discard(ended)
        self._wake.set()
