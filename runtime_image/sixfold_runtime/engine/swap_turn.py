"""Engines of one policy exchange weights one at a time, so that the others answer meanwhile.

An engine that has to stop taking requests for an exchange says that it waits for its turn. Gateways see all engines,
so they give it: to the first of those that wait, by pod name, while none is in the middle of an exchange. All
gateways come to the same answer, since all are told the same. The old weights answer until then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

MAX_WAIT_SECONDS = 300.0
"""After this an exchange begins without a turn: a gateway of an older release gives none."""


class SwapTurn:
    """The turn of one model in one engine.

    Attributes:
        is_shared: gateways are connected; without any there is nobody to wait for.
        is_waiting: an exchange would begin if it were its turn.
    """

    def __init__(self, wake: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`wake` is called, in any thread, when `ask` may have another answer."""
        self.is_shared = False
        self.is_waiting = False
        self._wake = wake
        self._clock = clock
        self._is_given = False
        self._asked_seconds = 0.0
        self._timer: threading.Timer | None = None

    def ask(self) -> bool:
        """Whether an exchange may begin now; from the engine's thread."""
        if not self.is_shared or self._is_given:
            return True
        if not self.is_waiting:
            self.is_waiting, self._asked_seconds = True, self._clock()
            self._timer = threading.Timer(MAX_WAIT_SECONDS, self._wake)
            self._timer.daemon = True
            self._timer.start()
        return self._clock() - self._asked_seconds >= MAX_WAIT_SECONDS

    def give(self) -> None:
        """From any thread. A turn that nobody asked for is not kept."""
        if self.is_waiting:
            self._is_given = True
            self._wake()

    def end(self) -> None:
        """The exchange has begun or isn't wanted any more; the next one asks again."""
        self.is_waiting = self._is_given = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
