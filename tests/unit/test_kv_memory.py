"""The tier in memory, and the circuit breaker in front of the other one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sixfold_runtime.engine.kv_breaker import FAULTS_TO_OPEN, LONGEST_WAIT_SECONDS, Breaker
from sixfold_runtime.engine.kv_memory import MemoryTier


def tier(max_bytes: int = 100, ttl_seconds: float = 10.0) -> MemoryTier:
    memory = MemoryTier()
    memory.configure(max_bytes, ttl_seconds)
    return memory


def test_what_was_not_used_for_longest_goes_first_and_of_a_chain_its_end() -> None:
    memory = tier(max_bytes=40)
    for name in (b"a", b"b", b"c", b"d"):
        memory.put(name, bytes(10), "salt", 0)
    memory.use([b"a", b"b"], 1)
    for gone, name in ((b"c", b"e"), (b"d", b"f"), (b"b", b"g")):
        memory.put(name, bytes(10), "salt", 2)
        assert not memory.holds(gone, 2)
    assert memory.get(b"a", 2) == bytes(10)


def test_a_block_stays_for_one_ttl_after_its_last_use() -> None:
    memory = tier(ttl_seconds=10)
    memory.put(b"used", b"1", "salt", 0)
    memory.put(b"idle", b"2", "salt", 0)
    memory.use([b"used"], 9)
    assert memory.get(b"used", 18) == b"1" and memory.get(b"idle", 18) is None
    memory.put(b"new", b"3", "salt", 18)
    assert memory.size_bytes == 2


def test_one_tenant_is_erased_and_no_other() -> None:
    memory = tier()
    memory.put(b"a", b"1", "alice", 0)
    memory.put(b"b", b"2", "bob", 0)
    assert memory.erase("alice") == {b"a"}
    assert memory.get(b"a", 0) is None and memory.get(b"b", 0) == b"2"


def test_smaller_bounds_and_none_at_all_free_the_memory_at_once() -> None:
    memory = tier()
    for index in range(10):
        memory.put(bytes([index]), bytes(10), "salt", 0)
    memory.configure(25, 10)
    assert memory.size_bytes == 20
    memory.configure(0, 0)
    assert memory.size_bytes == 0
    memory.put(b"a", b"1", "salt", 0)
    assert memory.size_bytes == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60), st.integers(0, 20)), max_size=60))
def test_bytes_are_never_more_than_allowed_and_always_what_is_there(steps: list[tuple[int, int, int]]) -> None:
    memory, now = tier(), 0
    for name, size, later in steps:
        now += later
        memory.put(bytes([name]), bytes(size), "salt", now)
        assert memory.size_bytes <= 100
        memory.use([bytes([name])], now)
    there = [memory.get(bytes([name]), 0) for name in range(6)]
    assert memory.size_bytes == sum(len(value) for value in there if value is not None)


def test_a_few_faults_open_the_breaker_and_waits_grow_to_a_second() -> None:
    breaker = Breaker()
    for _ in range(FAULTS_TO_OPEN - 1):
        breaker.failed(0)
    assert not breaker.is_open
    breaker.succeeded()
    for _ in range(FAULTS_TO_OPEN):
        assert not breaker.is_open
        breaker.failed(0)
    waits, now = [], 0.0
    for _ in range(8):
        waits.append(breaker.wait_seconds(now))
        now += waits[-1]
        breaker.trial_failed(now)
    assert waits[0] < 0.2 and waits == sorted(waits) and waits[-1] == LONGEST_WAIT_SECONDS
    assert breaker.wait_seconds(now + 5) == 0


def test_after_a_trial_one_fault_opens_it_again_and_one_success_makes_it_patient() -> None:
    breaker = Breaker()
    breaker.trial_failed(0)
    breaker.tried()
    assert not breaker.is_open
    breaker.failed(0)
    assert breaker.is_open
    breaker.succeeded()  # of something that had begun before
    assert breaker.is_open
    breaker.tried()
    breaker.succeeded()
    breaker.failed(0)
    assert not breaker.is_open
