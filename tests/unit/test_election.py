"""Who leads, for any interleaving of any processes: clocks that differ, messages that are late, processes that hang."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sixfold_operator.election import DEADLINE, LOOK, RENEW, Decision, Record, View, decide, pause_seconds

DURATION = 10.0


def held(by: str, version: str = "1", duration_seconds: float = DURATION) -> Record:
    return Record(by, duration_seconds, 0, "", version)


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
    """One life of an operator. Its clock began anywhere and runs at its own rate."""

    name: str
    offset: float
    rate: float
    view: View | None = None
    flights: list[tuple[str, float, Record | None]] = field(default_factory=list)
    """Requests and answers on their way: what, when it was sent by the own clock, what it carries."""

    def clock(self, now: float) -> float:
        return self.offset + self.rate * now

    def acts(self, now: float) -> bool:
        return self.view is not None and self.view.may_act(self.clock(now))


class World:
    def __init__(self, clocks: list[tuple[float, float]]) -> None:
        self.now, self.server, self.lives = 0.0, Server(), len(clocks)
        self.processes = [Process(f"p{number}", *clock) for number, clock in enumerate(clocks)]
        for process in self.processes:
            process.view = View(since=process.clock(0.0))
        self.terms: list[str] = []

    def check(self) -> None:
        acting = [process.name for process in self.processes if process.acts(self.now)]
        assert len(acting) <= 1, f"{acting} act at {self.now}"
        if acting and self.terms[-1:] != acting:
            self.terms += acting

    def turn(self, process: Process) -> None:
        """What its loop does when it gets the processor."""
        clock = process.clock(self.now)
        decision = decide(process.view, process.name, DURATION, clock)
        if decision is Decision.STEP_DOWN:
            self.restart(process)
        elif decision is Decision.WAIT:
            process.flights.append(("read", clock, None))
        else:
            process.flights.append(("write", clock, process.view.record))

    def deliver(self, process: Process, index: int) -> None:
        """One message arrives: a request at the server, or its answer at the process. Others may be overtaken."""
        kind, sent, record = process.flights.pop(index % len(process.flights))
        if kind == "read":
            process.flights.append(("was read", sent, self.server.record))
        elif kind == "write":
            written = self.server.put(process.name, record)
            process.flights.append(("read", sent, None) if written is None else ("was written", sent, written))
        elif kind == "was read":
            process.view = process.view.seen(record, process.clock(self.now))
        else:
            process.view = process.view.wrote(record, sent, DURATION)

    def restart(self, process: Process) -> None:
        """It ends, with a request still on its way to the server; another pod comes."""
        self.lives += 1
        process.flights = [flight for flight in process.flights if flight[0] == "write"]
        process.name, process.view = f"p{self.lives}", View(since=process.clock(self.now))

    def release(self, process: Process) -> None:
        if process.acts(self.now) and process.view.record == self.server.record:
            self.server.put("", self.server.record)
            self.restart(process)


clocks = st.tuples(st.floats(-1e6, 1e6), st.floats(0.86, 1.14))
steps = st.lists(
    st.tuples(
        st.sampled_from(
            ["turn", "turn", "deliver", "deliver", "deliver", "time", "time", "restart", "release", "lose"]
        ),
        st.integers(0, 2),
        st.floats(0.0, 6.0),
    ),
    min_size=20,
    max_size=200,
)


@given(st.lists(clocks, min_size=2, max_size=3), steps)
@settings(max_examples=300, deadline=None)
def test_never_two_act(clocks: list[tuple[float, float]], steps: list[tuple[str, int, float]]) -> None:
    """A process hangs for as long as it gets no turn, and what it had sent may arrive then."""
    world = World(clocks)
    for what, number, amount in steps:
        process = world.processes[number % len(world.processes)]
        if what == "time":
            world.now += amount
        elif what == "turn":
            world.turn(process)
        elif what == "deliver" and process.flights:
            world.deliver(process, int(amount))
        elif what == "lose" and process.flights:
            process.flights.pop()
        elif what in ("restart", "release"):
            getattr(world, what)(process)
        world.check()


@given(st.lists(clocks, min_size=2, max_size=3), st.floats(0.0, 1.0))
@settings(max_examples=50, deadline=None)
def test_when_the_leader_dies_another_one_leads_in_time(clocks: list[tuple[float, float]], after: float) -> None:
    """With messages that take no time: within the duration and one look of the other's clock."""
    world = World(clocks)

    def live(seconds: float, until_taken: bool = False) -> None:
        end = world.now + seconds
        while world.now < end and not (until_taken and any(p.acts(world.now) for p in world.processes)):
            for process in world.processes:
                world.turn(process)
                while process.flights:
                    world.deliver(process, 0)
                world.check()
            world.now += 0.25

    live(30.0)
    (leader,) = [process for process in world.processes if process.acts(world.now)]
    live(after)
    world.processes.remove(leader)
    died = world.now
    live(60.0, until_taken=True)
    assert world.now - died <= (DURATION + 0.5) / 0.86


@pytest.mark.parametrize(
    "view, decision, pause",
    [
        (View(since=0.0), Decision.WAIT, LOOK * DURATION),
        (View(since=-9.5), Decision.WAIT, 0.5),
        (View(since=-DURATION), Decision.ACQUIRE, 0.0),
        (View(since=0.0, record=held("")), Decision.ACQUIRE, None),
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
