"""Which task slices are in memory. Pure: no torch, no I/O; whoever keeps the books hands in the time.

Pinned slices are loaded at once and stay. The others come when they are asked for, and the idle one that was used
longest ago goes where a newer one needs its bytes. What is in use is never unloaded: a slice that finds no room waits
for it, first come, first served, and after `PATIENCE_SECONDS` those in its way are given to no new request, so that
steady traffic on one task can't keep another one out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

RETRY_SECONDS = 5.0
"""A slice that failed to load is tried again after this, if it is asked for: its file may be mended."""
PATIENCE_SECONDS = 0.25
"""How long one that finds no room lets others go on being used, and one that just came is kept for those who asked."""


class State(Enum):
    ABSENT = auto()
    LOADING = auto()
    RESIDENT = auto()


@dataclass(frozen=True)
class Offer:
    """A task that may be asked for."""

    size_bytes: int
    """0 where its file can't be read."""
    pinned: bool = False


@dataclass(frozen=True)
class Plan:
    """What to do now; the books have it as done."""

    unload: tuple[str, ...] = ()
    load: tuple[str, ...] = ()


_NOTHING = Plan()


@dataclass
class _Entry:
    size_bytes: int
    state: State = State.ABSENT
    references: int = 0
    used_seconds: float = 0.0
    is_awaited: bool = False
    """Somebody asked for it and hasn't got it."""
    kept_until_seconds: float = 0.0
    """It was awaited when it came, and whoever asked has until then to take it."""
    failure: str = ""
    failed_seconds: float = 0.0


@dataclass
class Residency:
    """The books of one pool.

    Attributes:
        budget_bytes: of all slices in memory and on their way, pinned ones included; None is no limit.
    """

    budget_bytes: int | None = None
    _offers: dict[str, Offer] = field(default_factory=dict)
    _entries: dict[str, _Entry] = field(default_factory=dict)
    """Of all that are offered, and of those that are not any more and still in memory."""
    _asked: dict[str, float] = field(default_factory=dict)
    """When those were asked for that are not in memory, oldest first."""
    _too_large: dict[str, str] = field(default_factory=dict)
    _is_settled: bool = True
    """Nothing has happened since a plan that left nothing to do."""

    # -- what there is

    def __contains__(self, name: str) -> bool:
        return name in self._offers

    @property
    def used_bytes(self) -> int:
        """In memory and on their way."""
        return sum(entry.size_bytes for entry in self._entries.values() if entry.state is not State.ABSENT)

    @property
    def resident(self) -> tuple[str, ...]:
        return tuple(name for name, entry in self._entries.items() if entry.state is State.RESIDENT)

    def is_pinned(self, name: str) -> bool:
        return name in self._offers and self._offers[name].pinned

    def size_bytes(self, name: str) -> int:
        return self._entries[name].size_bytes

    def problem(self, name: str, now_seconds: float) -> str:
        """Why an offered slice can't be had now; "" if it can, or if it is time to try again."""
        if name in self._too_large:
            return self._too_large[name]
        entry = self._entries[name]
        return entry.failure if now_seconds - entry.failed_seconds < RETRY_SECONDS else ""

    @property
    def failures(self) -> dict[str, str]:
        """Offered slices that can't be had as things are, and why."""
        failed = {name: entry.failure for name, entry in self._entries.items() if name in self._offers}
        return {name: reason for name, reason in {**failed, **self._too_large}.items() if reason}

    def reminder_seconds(self, now_seconds: float) -> float | None:
        """After how long a plan may look different though nothing happens; None: never."""
        if self._is_settled:
            return None
        kept = [entry.kept_until_seconds - now_seconds for entry in self._entries.values() if self._is_idle(entry)]
        return min((seconds for seconds in kept if seconds > 0), default=None)

    # -- what happens

    def offer(self, offers: Mapping[str, Offer], budget_bytes: int | None) -> None:
        """From now on these tasks may be asked for, and no others. References to others stay valid."""
        self._offers, self.budget_bytes, self._is_settled = dict(offers), budget_bytes, False
        for name, offer in offers.items():
            entry = self._entries.setdefault(name, _Entry(offer.size_bytes))
            if entry.state is State.ABSENT:
                entry.size_bytes, entry.failure = offer.size_bytes, ""
        self._asked = {name: since for name, since in self._asked.items() if name in offers}
        self._weigh()
        self._forget_unoffered()

    def acquire(self, name: str, now_seconds: float) -> bool:
        """Take a reference. False: it isn't there yet and was asked for. Of offered ones without a problem only."""
        entry = self._entries[name]
        if entry.state is State.RESIDENT and name not in self._leaving(now_seconds):
            entry.references += 1
            entry.used_seconds, entry.kept_until_seconds, entry.is_awaited = now_seconds, 0.0, False
            self._asked.pop(name, None)
            return True
        entry.is_awaited = True
        if entry.state is not State.LOADING:
            self._asked.setdefault(name, now_seconds)
            self._is_settled = False
        return False

    def release(self, name: str, now_seconds: float) -> None:
        """Give a reference back."""
        entry = self._entries[name]
        assert entry.references > 0, f"slice {name} was released more often than acquired"
        entry.references -= 1
        entry.used_seconds = now_seconds

    def loaded(self, name: str, size_bytes: int, now_seconds: float) -> bool:
        """A load has ended well. False: nobody wants it any more, or it is larger than was said and doesn't fit."""
        entry = self._entries[name]
        entry.size_bytes, entry.failure, self._is_settled = size_bytes, "", False
        self._weigh()
        if name not in self._offers or name in self._too_large:
            entry.state = State.ABSENT
            self._forget_unoffered()
            return False
        entry.state, entry.used_seconds = State.RESIDENT, now_seconds
        entry.kept_until_seconds = now_seconds + PATIENCE_SECONDS if entry.is_awaited else 0.0
        return True

    def failed(self, name: str, reason: str, now_seconds: float) -> None:
        """A load has failed, or there is nothing to load."""
        entry = self._entries[name]
        entry.state, entry.is_awaited = State.ABSENT, False
        entry.failure, entry.failed_seconds = reason, now_seconds
        self._asked.pop(name, None)
        self._is_settled = False
        self._forget_unoffered()

    def plan(self, now_seconds: float) -> Plan:
        """What to unload and what to load now."""
        if self._is_settled:
            return _NOTHING
        unload = [name for name in self.resident if self._is_unwanted(name) and self._is_idle(self._entries[name])]
        self._unload(unload)
        load: list[str] = []
        for name in self._queue():
            freed, is_enough = self._room_for(self._entries[name].size_bytes, now_seconds)
            if not is_enough:
                break  # first come, first served: what is smaller doesn't overtake
            self._unload(freed)
            unload += freed
            self._entries[name].state = State.LOADING
            self._asked.pop(name, None)
            load.append(name)
        surplus, _ = self._room_for(0, now_seconds)
        self._unload(surplus)
        self._forget_unoffered()
        self._is_settled = not (
            self._queue()
            or any(self._is_unwanted(name) for name in self.resident)
            or (self.budget_bytes is not None and self.used_bytes > self.budget_bytes)
        )
        return Plan((*unload, *surplus), tuple(load))

    # -- how

    def _queue(self) -> list[str]:
        """What is to be loaded: pinned ones first, then as they were asked for."""
        pinned = [name for name, offer in self._offers.items() if offer.pinned]
        return [
            name
            for name in dict.fromkeys((*pinned, *self._asked))
            if self._entries[name].state is State.ABSENT
            and name not in self._too_large
            and (name in self._asked or not self._entries[name].failure)
        ]

    def _room_for(self, size_bytes: int, now_seconds: float) -> tuple[list[str], bool]:
        """Idle slices, longest unused first, without which so many bytes fit, and whether they do."""
        if self.budget_bytes is None:
            return [], True
        freed: list[str] = []
        missing = self.used_bytes + size_bytes - self.budget_bytes
        for name in self._evictable():
            if missing <= 0:
                break
            entry = self._entries[name]
            if self._is_idle(entry) and entry.kept_until_seconds <= now_seconds:
                missing -= entry.size_bytes
                freed.append(name)
        return freed, missing <= 0

    def _leaving(self, now_seconds: float) -> set[str]:
        """Slices that no new request gets, since another one has waited long enough for their bytes."""
        absent = (name for name in self._asked if self._entries[name].state is State.ABSENT)
        waiting = next(absent, None)
        if self.budget_bytes is None or waiting is None or now_seconds - self._asked[waiting] < PATIENCE_SECONDS:
            return set()
        leaving: set[str] = set()
        missing = self.used_bytes + self._entries[waiting].size_bytes - self.budget_bytes
        for name in self._evictable():
            if missing <= 0:
                break
            missing -= self._entries[name].size_bytes
            leaving.add(name)
        return leaving

    def _evictable(self) -> Iterator[str]:
        """Those in memory that aren't pinned, longest unused first."""
        found = [name for name in self.resident if not self.is_pinned(name)]
        return iter(sorted(found, key=lambda name: self._entries[name].used_seconds))

    def _is_unwanted(self, name: str) -> bool:
        return name not in self._offers or name in self._too_large

    @staticmethod
    def _is_idle(entry: _Entry) -> bool:
        return entry.state is State.RESIDENT and entry.references == 0

    def _unload(self, names: list[str]) -> None:
        for name in names:
            self._entries[name].state = State.ABSENT

    def _forget_unoffered(self) -> None:
        self._entries = {
            name: entry
            for name, entry in self._entries.items()
            if name in self._offers or entry.state is not State.ABSENT
        }

    def _weigh(self) -> None:
        """Find those that can't ever fit: pinned ones in their order, others beside all pinned ones."""
        self._too_large = {}
        if self.budget_bytes is None:
            return
        pinned_bytes = 0
        for name, offer in sorted(self._offers.items(), key=lambda item: not item[1].pinned):
            size_bytes = self._entries[name].size_bytes
            if pinned_bytes + size_bytes > self.budget_bytes:
                self._too_large[name] = (
                    f"the slice has {size_bytes} bytes; cacheSize is {self.budget_bytes}, of which pinned slices take "
                    f"{pinned_bytes}: raise it or pin fewer tasks"
                )
                self._asked.pop(name, None)
            elif offer.pinned:
                pinned_bytes += size_bytes
