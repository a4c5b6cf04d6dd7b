"""The keyed queue: each key at most once in line, one run at a time, nothing lost."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sixfold_operator.keyed_queue import Backoff, KeyedQueue, Workers


def test_a_key_waits_for_its_delay_and_keeps_the_earlier_moment() -> None:
    queue: KeyedQueue[str] = KeyedQueue()
    queue.add("a", 0.0, 10.0)
    queue.add("a", 0.0, 5.0)
    queue.add("a", 0.0, 20.0)
    assert queue.take(4.9) is None
    assert queue.next_due() == 5.0
    assert queue.take(5.0) == "a"
    assert queue.take(100.0) is None


def test_a_key_that_is_added_while_it_runs_runs_again_afterwards() -> None:
    queue: KeyedQueue[str] = KeyedQueue()
    queue.add("a", 0.0)
    assert queue.take(0.0) == "a"
    queue.add("a", 1.0)
    assert queue.take(1.0) is None
    queue.done("a", 2.0)
    assert queue.take(2.0) == "a"


def test_failures_back_off_and_a_success_forgets_them() -> None:
    queue: KeyedQueue[str] = KeyedQueue(Backoff(first_seconds=1.0, longest_seconds=3.0))
    now = 0.0
    queue.add("a", now)
    for delay in (1.0, 2.0, 3.0, 3.0):
        assert queue.take(now) == "a"
        queue.done("a", now, failed=True)
        assert queue.next_due() == now + delay
        now += delay
    assert queue.take(now) == "a"
    queue.done("a", now, again_seconds=7.0)
    now += 7.0
    assert queue.take(now) == "a"
    queue.done("a", now, failed=True)
    assert queue.next_due() == now + 1.0


def test_stalls_are_visible() -> None:
    queue: KeyedQueue[str] = KeyedQueue()
    queue.add("a", 0.0)
    queue.add("b", 0.0, 2.0)
    assert queue.overdue_seconds(5.0) == 5.0
    assert queue.take(5.0) == "a"
    assert queue.longest_run_seconds(9.0) == 4.0
    assert queue.overdue_seconds(9.0) == 7.0


class QueueMachine(RuleBasedStateMachine):
    """Against a model: the wanted moment of each key, and the keys that run."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: KeyedQueue[int] = KeyedQueue(Backoff(1.0, 8.0))
        self.now = 0.0
        self.due: dict[int, float] = {}
        self.running: set[int] = set()
        self.failures: Counter[int] = Counter()

    @rule(key=st.integers(0, 4), delay=st.sampled_from([0.0, 0.5, 3.0]))
    def add(self, key: int, delay: float) -> None:
        self.queue.add(key, self.now, delay)
        self.due[key] = min(self.due.get(key, float("inf")), self.now + delay)

    @rule(seconds=st.sampled_from([0.0, 0.25, 1.0, 10.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def take(self) -> None:
        ready = {key: due for key, due in self.due.items() if due <= self.now and key not in self.running}
        key = self.queue.take(self.now)
        assert (key is None) == (not ready)
        if key is not None:
            assert ready[key] == min(ready.values())
            del self.due[key]
            self.running.add(key)

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0, 4), failed=st.booleans(), again=st.sampled_from([None, 0.5, 4.0]))
    def done(self, pick: int, failed: bool, again: float | None) -> None:
        key = sorted(self.running)[pick % len(self.running)]
        self.running.remove(key)
        self.queue.done(key, self.now, failed=failed, again_seconds=again)
        self.failures[key] = self.failures[key] + 1 if failed else 0
        if failed:
            again = min(8.0, 2.0 ** (self.failures[key] - 1))
        if again is not None:
            self.due[key] = min(self.due.get(key, float("inf")), self.now + again)
        if key in self.due:
            self.due[key] = max(self.due[key], self.now)

    @invariant()
    def the_next_moment_is_the_models(self) -> None:
        waiting = [due for key, due in self.due.items() if key not in self.running]
        assert self.queue.next_due() == min(waiting, default=None)
        assert len(self.queue) == len(self.due)


TestQueueMachine = QueueMachine.TestCase


async def test_workers_run_keys_beside_each_other_but_never_one_twice() -> None:
    """Forty requests for four keys: no key beside itself, at most `limit` at once, each at least once."""
    running: Counter[int] = Counter()
    most, seen = 0, Counter[int]()
    finished = asyncio.Event()

    async def handle(key: int) -> float | None:
        nonlocal most
        running[key] += 1
        assert running[key] == 1
        most = max(most, running.total())
        for _ in range(3):
            await asyncio.sleep(0)
        running[key] -= 1
        seen[key] += 1
        if len(seen) == 4:
            finished.set()
        return None

    workers = Workers(KeyedQueue[int](), handle, limit=2)
    task = asyncio.create_task(workers.run())
    for round_ in range(10):
        for key in range(4):
            workers.enqueue(key)
        if round_ % 3 == 0:
            await asyncio.sleep(0)
    await asyncio.wait_for(finished.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert most == 2


async def test_a_failing_handler_is_tried_again() -> None:
    tries = 0
    finished = asyncio.Event()

    async def handle(_: str) -> float | None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise RuntimeError("no")
        finished.set()
        return None

    workers = Workers(KeyedQueue[str](Backoff(0.001, 0.002)), handle, limit=1)
    task = asyncio.create_task(workers.run())
    workers.enqueue("a")
    await asyncio.wait_for(finished.wait(), 10)
    task.cancel()
    assert tries == 3
