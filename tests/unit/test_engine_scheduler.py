"""The engine's scheduler, driven by any sequence of arrivals, steps and cancellations."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sixfold_runtime.engine.scheduler import Entry, Limits, Scheduler

LIMITS = Limits(max_running=4, max_waiting=6, prefill_tokens=16, kv_tokens=256)


class Scheduling(RuleBasedStateMachine):
    """A model of what must hold, kept beside the scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler: Scheduler[int] = Scheduler(LIMITS)
        self.next_key = 0
        self.entries: dict[int, Entry[int]] = {}
        self.queued: list[int] = []
        self.prefilled: dict[int, int] = {}
        self.decoding: list[int] = []

    @rule(prompt=st.integers(1, 60), generated=st.integers(1, 60))
    def arrive(self, prompt: int, generated: int) -> None:
        assert self.scheduler.can_admit() == (len(self.queued) < LIMITS.max_waiting)
        if not self.scheduler.can_admit():
            return
        entry = Entry(self.next_key, prompt, prompt + generated)
        self.next_key += 1
        self.scheduler.admit(entry)
        self.entries[entry.key] = entry
        self.queued.append(entry.key)

    @rule()
    def step(self) -> None:
        had_work = bool(self.entries)
        plan = self.scheduler.step()
        assert list(plan.decode) == self.decoding, "every running sequence gets exactly one token, oldest first"
        assert list(plan.admitted) == self.queued[: len(plan.admitted)], "first come, first served"
        del self.queued[: len(plan.admitted)]
        self.prefilled.update(dict.fromkeys(plan.admitted, 0))
        assert bool(plan.decode or plan.prefill) == had_work, "no step is idle while there is work"
        if plan.prefill is not None:
            assert len(plan.prefill.keys) == 1 or plan.prefill.padded_tokens <= LIMITS.prefill_tokens
            assert max(plan.prefill.counts) <= LIMITS.prefill_tokens
            for key, count in zip(plan.prefill.keys, plan.prefill.counts, strict=True):
                assert self.prefilled[key] == plan.prefill.start, "nothing is prefilled twice or skipped"
                assert count > 0
                self.prefilled[key] += count
            if plan.prefill.finishes:
                for key in plan.prefill.keys:
                    assert self.prefilled.pop(key) == self.entries[key].prompt_tokens
                    self.decoding.append(key)

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.entries)))
        self.scheduler.cancel(key)
        del self.entries[key]
        self.prefilled.pop(key, None)
        for keys in (self.queued, self.decoding):
            if key in keys:
                keys.remove(key)

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def find_the_beginning(self, data: st.DataObject) -> None:
        """Of a prompt that waits: less of it has to be computed, and it keeps its place."""
        key = data.draw(st.sampled_from(self.queued))
        entry = self.entries[key]
        left = data.draw(st.integers(1, entry.prompt_tokens))
        self.entries[key] = Entry(key, left, entry.total_tokens)
        self.scheduler.amend(self.entries[key])

    @rule()
    def cancel_unknown(self) -> None:
        self.scheduler.cancel(-1)

    @invariant()
    def counts_agree(self) -> None:
        assert self.scheduler.waiting == len(self.queued)
        assert self.scheduler.running == len(self.prefilled) + len(self.decoding)
        assert self.scheduler.is_prefilling == bool(self.prefilled)

    @invariant()
    def stays_within_limits(self) -> None:
        running = [*self.prefilled, *self.decoding]
        assert len(running) <= LIMITS.max_running
        if len(running) > 1:
            rows = 1 << (len(running) - 1).bit_length()
            assert rows * max(self.entries[key].total_tokens for key in running) <= LIMITS.kv_tokens


TestScheduling = Scheduling.TestCase
TestScheduling.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


@given(prompts=st.lists(st.integers(1, 200), min_size=1, max_size=30), generated=st.integers(1, 8))
@settings(deadline=None)
def test_every_request_ends_and_in_bounded_time(prompts: list[int], generated: int) -> None:
    limits = Limits(max_running=3, max_waiting=100, prefill_tokens=32, kv_tokens=500)
    scheduler: Scheduler[int] = Scheduler(limits)
    for key, prompt in enumerate(prompts):
        scheduler.admit(Entry(key, prompt, prompt + generated))
    left, order = dict.fromkeys(range(len(prompts)), generated), []
    bound = sum(-(-prompt // limits.prefill_tokens) + generated for prompt in prompts) + 1
    for _ in range(bound):
        plan = scheduler.step()
        order += plan.admitted
        first = plan.prefill.keys if plan.prefill and plan.prefill.finishes else ()
        for key in (*plan.decode, *first):
            left[key] -= 1
            if left[key] == 0:
                scheduler.cancel(key)
    assert not any(left.values())
    assert order == sorted(order)
    assert scheduler.running == scheduler.waiting == 0


def test_a_long_prompt_is_chunked_and_alone() -> None:
    scheduler: Scheduler[str] = Scheduler(Limits(prefill_tokens=10))
    for key, prompt in (("long", 25), ("short", 3)):
        scheduler.admit(Entry(key, prompt, prompt + 5))
    pieces = [scheduler.step().prefill for _ in range(4)]
    assert [(piece.keys, piece.start, piece.counts, piece.finishes) for piece in pieces if piece] == [
        (("long",), 0, (10,), False),
        (("long",), 10, (10,), False),
        (("long",), 20, (5,), True),
        (("short",), 0, (3,), True),
    ]


def test_short_prompts_share_a_forward_while_padding_fits() -> None:
    scheduler: Scheduler[str] = Scheduler(Limits(prefill_tokens=12))
    for key, prompt in (("a", 3), ("b", 4), ("c", 4), ("d", 1)):
        scheduler.admit(Entry(key, prompt, prompt + 5))
    first, second = scheduler.step(), scheduler.step()
    assert first.prefill is not None and first.prefill.keys == ("a", "b", "c")
    assert first.prefill.padded_tokens == 12
    assert second.prefill is not None and second.prefill.keys == ("d",)
    assert second.decode == ("a", "b", "c")


@pytest.mark.parametrize("total", [257, 10_000])
def test_a_request_larger_than_the_cache_still_runs_alone(total: int) -> None:
    scheduler: Scheduler[str] = Scheduler(LIMITS)
    scheduler.admit(Entry("big", 4, total))
    scheduler.admit(Entry("small", 4, 8))
    assert scheduler.step().admitted == ("big",)
    assert scheduler.step().admitted == ()
    scheduler.cancel("big")
    assert scheduler.step().admitted == ("small",)
