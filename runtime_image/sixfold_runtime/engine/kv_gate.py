"""Lets operations of Redis through while they go well; while they don't, tries by itself until they do again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from sixfold_runtime.engine.kv_breaker import Breaker
from sixfold_runtime.engine.kv_fault import RedisFault

log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Gate:
    """Used from one event loop; `problem` may be read from any thread.

    Requests never pay for finding out whether Redis is back: trials go beside them.

    Attributes:
        problem: for people, why nothing is let through; "" while it is.
    """

    def __init__(
        self,
        what: str,
        trial: Callable[[], Awaitable[None]],
        told: Callable[[str], None],
        changed: Callable[[bool], None],
        clock: Callable[[], float],
    ) -> None:
        """Closed at first: the first trial opens the way.

        Args:
            what: begins a sentence, for logs and `problem`.
            trial: raises RedisFault.
            told: gets the reason of each fault.
            changed: gets whether operations are let through, whenever that changes.
        """
        self._what, self._trial, self._told, self._changed, self._clock = what, trial, told, changed, clock
        self._breaker = Breaker()
        self._is_shut, self._is_wanted = True, False
        self._watch: asyncio.Task[None] | None = None
        self.problem = ""

    @property
    def lets_through(self) -> bool:
        return not self._is_shut

    async def run(self, operation: Callable[[], Awaitable[_T]]) -> _T | None:
        """What the operation returns; None if it fails, or isn't tried."""
        if self._is_shut:
            return None
        try:
            result = await operation()
        except RedisFault as fault:
            self._told(fault.reason)
            if not self._is_shut:  # else others have found out meanwhile
                self._breaker.failed(self._clock())
                if self._breaker.is_open:
                    self._shut(fault)
            return None
        self._breaker.succeeded()
        return result

    def watch(self) -> None:
        """Begin to try, if that isn't going on."""
        self._is_wanted = True
        if self._is_shut and self._watch is None:
            self._watch = asyncio.create_task(self._try_until_it_works())

    def stop(self) -> None:
        """Shut until `watch` is called again."""
        if self._watch is not None:
            self._watch.cancel()
        self._watch, self._is_wanted, self._is_shut, self.problem = None, False, True, ""
        self._changed(False)

    async def _try_until_it_works(self) -> None:
        while True:
            await asyncio.sleep(self._breaker.wait_seconds(self._clock()))
            try:
                await self._trial()
            except RedisFault as fault:
                self._told(fault.reason)
                self._breaker.trial_failed(self._clock())
                self._shut(fault)
            else:
                break
        self._watch = None
        self._breaker.tried()
        if self.problem:
            log.info("%s: that is over", self._what)
        self._is_shut, self.problem = False, ""
        self._changed(True)

    def _shut(self, fault: RedisFault) -> None:
        if not self._is_wanted:
            return
        problem = f"{self._what}: {fault}"
        if problem != self.problem:
            log.warning("%s", problem)
        self.problem = problem
        if not self._is_shut:
            self._is_shut = True
            self._changed(False)
            self.watch()
