"""Generation requests that wait until keys and values of earlier ones are found; those behind them go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sixfold_runtime.engine.kv_reuse import KVReuse
from sixfold_runtime.engine.kv_store import Lookup
from sixfold_runtime.engine.sequence import Sequence
from sixfold_runtime.modes.kv_reuse import Scope

_AHEAD_BYTES = 256 * 2**20
"""Keys and values that are found before they are needed take at most so much memory, beyond one prompt's."""


@dataclass
class _Wait:
    scope: Scope
    has_begun: bool = False
    """Its turn has come."""
    lookup: Lookup | None = None
    began_seconds: float = 0.0

    @property
    def is_done(self) -> bool:
        return self.has_begun and (self.lookup is None or self.lookup.is_done)


class KVQueue:
    """Used from the engine's thread; its length may be read from any."""

    def __init__(self, reuse: KVReuse | None, clock: Callable[[], float]) -> None:
        self._reuse = reuse
        self._clock = clock
        self._waiting: dict[Sequence, _Wait] = {}
        """Oldest first."""
        self._ahead: dict[Sequence, int] = {}
        """Tokens whose keys and values are being looked up, or were found and aren't in a cache yet."""
        self._is_woken = False

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def has_news(self) -> bool:
        """Whether one that waits may go on."""
        return bool(self._waiting) and (self._is_woken or any(self._is_off(sequence) for sequence in self._waiting))

    def take(self, sequence: Sequence) -> bool:
        """Look for a sequence's keys and values; False: it waits here for them."""
        scope = None if self._reuse is None else self._reuse.wanted(sequence)
        if scope is None:
            return True
        self._waiting[sequence] = _Wait(scope)
        self._start()
        return self._settle(sequence)

    def retry(self) -> list[Sequence]:
        """Those that can begin now, oldest first; they wait no more."""
        self._is_woken = False
        ready = [sequence for sequence in list(self._waiting) if self._settle(sequence)]
        self._start()
        return ready

    def begun(self, sequence: Sequence) -> None:
        """What was found for it is being put where it is needed."""
        if self._ahead.pop(sequence, None) is not None:
            self._start()

    def disappoint(self) -> list[Sequence]:
        """Where the mode is off now: those that are queued elsewhere give up what was found for them."""
        found = [sequence for sequence in self._ahead if sequence not in self._waiting and self._is_off(sequence)]
        for sequence in found:
            sequence.take_prefix(None)
            del self._ahead[sequence]
        return found

    def withdraw(self) -> list[Sequence]:
        """Take back all that wait."""
        sequences = list(self._waiting)
        for sequence in sequences:
            self.release(sequence)
        return sequences

    def release(self, sequence: Sequence) -> None:
        """A sequence has ended or was taken back, wherever it was."""
        wait = self._waiting.pop(sequence, None)
        if wait is not None and wait.lookup is not None:
            wait.lookup.cancel()
        sequence.prefix = None
        self.begun(sequence)

    def _is_off(self, sequence: Sequence) -> bool:
        return self._reuse is None or not self._reuse.is_on(sequence.request.arm)

    def _start(self) -> None:
        """Begin the lookups whose turn it is: not more than are soon needed, so that what they find takes no memory."""
        reuse = self._reuse
        if reuse is None or reuse.shape is None:
            return
        most_tokens = _AHEAD_BYTES // reuse.shape.bytes_per_token
        for sequence, wait in self._waiting.items():
            if wait.has_begun:
                continue
            tokens = len(sequence.context)
            if self._ahead and sum(self._ahead.values()) + tokens > most_tokens:
                return
            self._ahead[sequence] = tokens
            wait.has_begun, wait.began_seconds = True, self._clock()
            wait.lookup = reuse.find(sequence, wait.scope, self._news)

    def _settle(self, sequence: Sequence) -> bool:
        """Whether it is done with waiting; then it has what was found and is none of those that wait."""
        assert self._reuse is not None
        wait = self._waiting[sequence]
        if self._is_off(sequence):
            self.release(sequence)
            return True
        if not wait.is_done:
            return False
        prefix = None if wait.lookup is None else wait.lookup.prefix
        sequence.take_prefix(prefix)
        self._reuse.looked_up(sequence.cached_tokens, self._clock() - wait.began_seconds)
        del self._waiting[sequence]
        if prefix is None:
            del self._ahead[sequence]
        else:
            self._ahead[sequence] = prefix.tokens
        return True

    def _news(self) -> None:
        """In the store's thread."""
        self._is_woken = True
        if self._reuse is not None:
            self._reuse.wake()
