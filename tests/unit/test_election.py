"""Who leads, for any interleaving of any processes: clocks that differ, messages that are late, processes that hang."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sixfold_operator.election import DEADLINE, LOOK, RENEW, Decision, Record, View, decide, pause_seconds

DURATION = 10.0


def held(by: str, version: str = "1", duration_seconds: float = DURATION) -> Record:
    return Record(by, duration_seconds, 0, "2030-01-01T00:00:00.000000Z", version)


@dataclass
class Server:
    """A Lease behind optimistic concurrency, as kube-apiserver keeps it."""

    record: Record | None = None
    version: int = 0

    def put(self, holder: str, expected: Record | None) -> Record | None:
        """The record as written, or None for a conflict."""
        if (self.record and self.record.version) != (expected and expected.version):
            return None
        self.version += 1
        self.record = held(holder, str(self.version))
        return self.record


@dataclass
class Process:
    """One place where an operator runs. Its clock began anywhere and runs at its own rate."""

    offset: float
    rate: float
    name: str = ""
    view: View = field(default_factory=lambda: View(since=0.0))
    attempt: int = 0
    """Changes when it ends or no longer waits for an answer."""

    def clock(self, now: float) -> float:
        return self.offset + self.rate * now

    def acts(self, now: float) -> bool:
        return self.view.may_act(self.clock(now))


class World:
    """Runs the loop of each process as `lease.Election` does, with trouble drawn from `random`."""

    def __init__(self, clocks: list[tuple[float, float]], random: Random, trouble: float) -> None:
        self.now, self.server, self.random, self.trouble = 0.0, Server(), random, trouble
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = itertools.count()
        self.terms: list[str] = []
        self.processes = [Process(*clock) for clock in clocks]
        for process in self.processes:
            self.start(process)

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        end = self.now + seconds
        while self.events and self.events[0][0] <= end and not until():
            self.now, _, event = heapq.heappop(self.events)
            event()
            acting = [process.name for process in self.processes if process.acts(self.now)]
            assert len(acting) <= 1, f"{acting} act at {self.now}"
            if acting and self.terms[-1:] != acting:
                self.terms += acting

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.count), event))

    def happens(self) -> bool:
        return self.random.random() < self.trouble

    def start(self, process: Process) -> None:
        process.name, process.view = f"p{next(self.count)}", View(since=process.clock(self.now))
        self.wake(process)

    def wake(self, process: Process, seconds: float = 0.0) -> None:
        """Go on later, unless something else happens first; a process that hangs goes on later still."""
        process.attempt += 1
        attempt, hangs = process.attempt, self.random.uniform(0, 30) if self.happens() else 0.0
        self.after(seconds + hangs, lambda: self.turn(process) if process.attempt == attempt else None)

    def turn(self, process: Process) -> None:
        decision = decide(process.view, process.name, DURATION, process.clock(self.now))
        if decision is Decision.STEP_DOWN or self.happens():
            return self.start(process)
        if process.acts(self.now) and self.happens():
            self.server.put("", process.view.record)
            return self.start(process)
        if decision is Decision.WAIT:
            pause = pause_seconds(process.view, DURATION, process.clock(self.now)) / process.rate
            if process.view.held_until is not None:
                return self.wake(process, pause)
            return self.after(pause, lambda: self.request(process, is_write=False))
        return self.request(process, is_write=True)

    def request(self, process: Process, *, is_write: bool) -> None:
        """The server gets it and the process its answer, both late perhaps; it gives up after a look's time."""
        self.wake(process, LOOK * DURATION / process.rate)
        attempt, name, expected, sent = process.attempt, process.name, process.view.record, process.clock(self.now)

        def served() -> None:
            record = self.server.put(name, expected) if is_write else self.server.record
            self.after(self.latency(), lambda: answered(record))

        def answered(record: Record | None) -> None:
            if process.attempt != attempt:
                return
            if is_write and record is not None:
                process.view = process.view.wrote(record, sent, DURATION)
            elif not is_write:
                process.view = process.view.seen(record, process.clock(self.now))
            if is_write and record is None:
                self.request(process, is_write=False)
            else:
                self.wake(process)

        self.after(self.latency(), served)

    def latency(self) -> float:
        return self.random.uniform(0, 20) if self.happens() else 0.001


clocks = st.tuples(st.floats(-1e6, 1e6), st.floats(0.86, 1.14))


@given(st.lists(clocks, min_size=2, max_size=3), st.integers(0), st.sampled_from([0.01, 0.05, 0.2]))
@settings(max_examples=60, deadline=None)
def test_never_two_act(clocks: list[tuple[float, float]], seed: int, trouble: float) -> None:
    """Processes hang, die and release, messages are late; and still there is a leader now and then."""
    world = World(clocks, Random(seed), trouble)
    world.run(600.0)
    assert len(world.terms) > 1


@given(st.lists(clocks, min_size=2, max_size=3), st.integers(0), st.floats(20.0, 30.0))
@settings(max_examples=30, deadline=None)
def test_when_the_leader_dies_another_one_leads_in_time(
    clocks: list[tuple[float, float]], seed: int, dies_at: float
) -> None:
    """Within the duration and one look, by the other's clock."""
    world = World(clocks, Random(seed), trouble=0.0)
    world.run(dies_at)
    (leader,) = [process for process in world.processes if process.acts(world.now)]
    world.processes.remove(leader)
    leader.attempt = -1
    died = world.now
    world.run(60.0, until=lambda: any(process.acts(world.now) for process in world.processes))
    assert world.now - died <= (1 + LOOK) * DURATION / 0.86 + 0.1


@pytest.mark.parametrize(
    "view, decision, pause",
    [
        (View(since=0.0), Decision.WAIT, LOOK * DURATION),
        (View(since=-9.5), Decision.WAIT, 0.5),
        (View(since=-DURATION), Decision.ACQUIRE, 0.0),
        (View(since=0.0, record=held("")), Decision.ACQUIRE, None),
        (View(since=0.0, record=replace(held(""), acquired="")), Decision.WAIT, LOOK * DURATION),
        (View(since=0.0, record=held("me")), Decision.ACQUIRE, None),
        (View(since=0.0, record=held("other")), Decision.WAIT, LOOK * DURATION),
        (View(since=-20.0, record=held("other", duration_seconds=30.0)), Decision.WAIT, LOOK * DURATION),
        (View(since=-30.0, record=held("other", duration_seconds=30.0)), Decision.ACQUIRE, 0.0),
        (View(since=0.0).wrote(held("me"), 0.0, DURATION), Decision.WAIT, RENEW * DURATION),
        (View(since=0.0).wrote(held("me"), -3.5, DURATION), Decision.RENEW, 0.0),
        (View(since=0.0).wrote(held("me"), -7.0, DURATION), Decision.STEP_DOWN, None),
        (replace(View(since=0.0).wrote(held("me"), 0.0, DURATION), record=held("other")), Decision.STEP_DOWN, None),
        (replace(View(since=0.0).wrote(held("me"), -4.0, DURATION), record=None), Decision.RENEW, 0.0),
    ],
)
def test_decisions(view: View, decision: Decision, pause: float | None) -> None:
    assert decide(view, "me", DURATION, 0.0) is decision
    if pause is not None:
        assert pause_seconds(view, DURATION, 0.0) == pytest.approx(pause)


def test_what_is_seen_again_is_no_news() -> None:
    view = View(since=0.0).seen(held("other"), 5.0)
    assert view.seen(held("other"), 9.0).since == 5.0
    assert view.seen(held("other", version="2"), 9.0).since == 9.0
    assert view.seen(None, 9.0).since == 9.0
    assert DEADLINE < 1
