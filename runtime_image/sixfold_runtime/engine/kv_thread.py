"""A thread with an event loop, to which another thread hands work without waiting for it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)
JOIN_SECONDS = 5.0


class LoopThread:
    """Started by its first work. Used from one other thread."""

    def __init__(self, name: str, failed: Callable[[], None], ending: Callable[[], Awaitable[None]]) -> None:
        """
        Args:
            failed: called when work raised what it shouldn't; it is logged.
            ending: what to do in the loop before it ends.
        """
        self._name, self._failed, self._ending = name, failed, ending
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_running(self) -> bool:
        return self._loop is not None

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Have it done, beside whatever else is."""

        def begin() -> None:
            task = loop.create_task(self._guarded(work))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        loop = self._running()
        loop.call_soon_threadsafe(begin)

    def close(self) -> None:
        """Cancel what is left, and end the thread; nothing may be started after that."""
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(JOIN_SECONDS)
            self._loop, self._thread = None, None

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._run, args=(self._loop,), name=self._name, daemon=True)
            self._thread.start()
        return self._loop

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:
            log.exception("%s: something failed that shouldn't", self._name)
            self._failed()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        loop.run_forever()
        loop.run_until_complete(self._end(loop))
        loop.close()

    async def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        left = asyncio.all_tasks(loop) - {asyncio.current_task(loop)}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._guarded(_coroutine(self._ending))


async def _coroutine(ending: Callable[[], Awaitable[None]]) -> None:
    await ending()
