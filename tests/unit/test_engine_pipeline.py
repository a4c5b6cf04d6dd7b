"""Picks in line and in worker threads: the same results, bounded buffers, and faults that stay with their request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models

from sixfold_runtime.engine.logprobs import TokenBytes
from sixfold_runtime.engine.picker import Draft, Picked, Picker
from sixfold_runtime.engine.pipeline import (
    SLOTS,
    InlineSampler,
    LogitsSampler,
    SamplerPipeline,
    Task,
    slot_bytes,
)
from sixfold_runtime.engine.protocol import FinishReason, Generate, Sampling
from sixfold_runtime.engine.stream import OutputStream
from sixfold_runtime.modes.acceptance import Lossless

CPU = torch.device("cpu")
ROWS, DRAFT_TOKENS, VOCABULARY = 4, 2, 64
EOS = 0
TOKENIZER = Tokenizer(models.WordLevel({f"w{i} ": i for i in range(VOCABULARY)}, unk_token="w1 "))
TOKEN_BYTES = TokenBytes(TOKENIZER)


def picker(seed: int = 0, stream: OutputStream | None = None, **sampling: Any) -> Picker:
    settings = Sampling(**{"max_tokens": 40, "seed": seed, "repetition_penalty": 1.1, **sampling})
    stream = stream or OutputStream(TOKENIZER, settings.stop, {EOS}, settings.max_tokens)
    return Picker(Generate("r", "m", [1, 2], settings), stream, VOCABULARY, Lossless(), TOKEN_BYTES)


def logits(seed: int, rows: int = ROWS, positions: int = DRAFT_TOKENS + 1) -> torch.Tensor:
    return torch.randn(rows, positions, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


def pipeline(device: torch.device = CPU, workers: int = 2, **changes: Any) -> SamplerPipeline:
    settings = {
        "needed_bytes": slot_bytes(ROWS, DRAFT_TOKENS, VOCABULARY),
        "buffer_bytes": None,
        "waited": lambda _: None,
    }
    return SamplerPipeline(device, workers=workers, **{**settings, **changes})


@pytest.fixture
def running() -> Iterator[SamplerPipeline]:
    made = pipeline()
    yield made
    made.close()


class Gate(OutputStream):
    """An output stream that holds its worker up until it is opened."""

    def __init__(self) -> None:
        super().__init__(TOKENIZER, (), {EOS}, 40)
        self.reached, self.opened = threading.Event(), threading.Event()

    def push(self, token: int) -> tuple[str, FinishReason | None]:
        self.reached.set()
        self.opened.wait()
        return super().push(token)


class Broken(OutputStream):
    def __init__(self) -> None:
        super().__init__(TOKENIZER, (), {EOS}, 40)

    def push(self, token: int) -> tuple[str, FinishReason | None]:
        raise RuntimeError("a broken stream")


def answers(sampler: LogitsSampler, device: torch.device = CPU) -> list[list[Picked]]:
    """Two lanes of two requests whose steps overlap, with drafts of different lengths, until all have ended."""
    lanes = [[picker(seed, stop=("w9 w",)) for seed in seeds] for seeds in ((1, 2), (3, 4))]
    live = [list(range(len(lane))) for lane in lanes]
    results: list[list[Picked]] = [[] for _ in range(4)]
    flights: list[Any] = [None, None]
    for step in range(200):
        lane = step % 2
        if flights[lane] is not None:
            for row, picked in zip(list(live[lane]), flights[lane].result(), strict=True):
                results[lane * 2 + row].append(picked)
                if picked.reason is not None:
                    live[lane].remove(row)
            flights[lane] = None
        if live[lane]:
            tasks = [
                Task(lanes[lane][row], Draft(tuple(range(3, 3 + (step + row) % 3))), 1 + (step + row) % 3)
                for row in live[lane]
            ]
            flights[lane] = sampler.submit(logits(step, rows=len(tasks)).to(device), tasks)
    assert not any(live)
    return results


def test_the_pipeline_picks_what_the_in_line_sampler_picks(running: SamplerPipeline) -> None:
    assert answers(running) == answers(InlineSampler())


def test_only_a_rows_own_positions_are_used() -> None:
    rows = logits(1)
    rows[0, 1:] = float("nan")
    picked = InlineSampler().submit(rows, [Task(picker(row), Draft(), 1) for row in range(ROWS)]).result()
    assert all(result.finite and len(result.tokens) == 1 for result in picked)


@pytest.mark.parametrize("in_line", [True, False])
def test_faults_and_non_finite_logits_stay_with_their_request(running: SamplerPipeline, in_line: bool) -> None:
    rows = logits(2)
    rows[1, 0, 5] = float("nan")
    tasks = [Task(picker(row, Broken() if row == 2 else None), Draft(), 1) for row in range(ROWS)]
    picked = (InlineSampler() if in_line else running).submit(rows, tasks).result()
    assert [(result.finite, result.faulty) for result in picked] == [
        (True, False), (False, False), (True, True), (True, False)
    ]  # fmt: skip
    assert len(picked[0].tokens) == len(picked[3].tokens) == 1
    again = running.submit(logits(3), [Task(picker(row), Draft(), 1) for row in range(ROWS)])
    assert not any(result.faulty for result in again.result())


def test_the_producer_waits_while_both_slots_are_taken() -> None:
    waits: list[float] = []
    now, asked = 0.0, threading.Semaphore(0)

    def clock() -> float:
        asked.release()
        return now

    sampler, gate = pipeline(workers=1, waited=waits.append, clock=clock), Gate()
    held = sampler.submit(logits(1, rows=1), [Task(picker(stream=gate), Draft(), 1)])
    gate.reached.wait()
    sampler.submit(logits(2, rows=1), [Task(picker(), Draft(), 1)])
    assert waits == [0.0] * SLOTS

    third: list[Any] = []
    producer = threading.Thread(
        target=lambda: third.append(sampler.submit(logits(3, rows=1), [Task(picker(), Draft(), 1)]))
    )
    producer.start()
    for _ in range(2 * SLOTS + 1):  # twice a submitted step, and when the third begins to wait
        asked.acquire()
    now = 2.5
    assert not third
    gate.opened.set()
    producer.join()
    assert len(held.result()[0].tokens) == len(third[0].result()[0].tokens) == 1
    assert waits == [0.0, 0.0, 2.5]
    sampler.close()


def test_the_buffer_owns_its_copy(running: SamplerPipeline) -> None:
    """Two workers wait at the gate with the first rows, so the last one is picked after the producer's is gone."""
    rows, gate = logits(4), Gate()
    expected = picker(7).pick(rows[-1, :1].numpy().copy(), Draft())
    picks = running.submit(rows, [Task(picker(7, stream=gate), Draft(), 1) for _ in range(ROWS)])
    rows.zero_()
    gate.opened.set()
    assert picks.result()[-1].tokens == expected.tokens


def test_workers_come_and_go_at_runtime() -> None:
    sampler = pipeline(workers=1)

    def sampler_threads() -> int:
        return sum(thread.name.startswith("sampler-") for thread in threading.enumerate())

    def pick_at_once(rows: int) -> int:
        """How many rows are picked at the same time."""
        gates = [Gate() for _ in range(rows)]
        picks = sampler.submit(logits(1, rows=rows), [Task(picker(stream=gate), Draft(), 1) for gate in gates])
        reached = sum(gate.reached.wait(timeout=5 if row < expected else 0.02) for row, gate in enumerate(gates))
        for gate in gates:
            gate.opened.set()
        picks.result()
        return reached

    for workers in (1, 3, 2):
        sampler.resize(workers)
        expected = workers
        assert pick_at_once(ROWS) == workers
    with pytest.raises(ValueError, match="at least 1"):
        sampler.resize(0)
    sampler.close()
    assert sampler_threads() == 0


def test_closing_finishes_what_was_submitted() -> None:
    sampler = pipeline(workers=1)
    picks = sampler.submit(logits(1), [Task(picker(row), Draft(), 1) for row in range(ROWS)])
    sampler.close()
    assert all(len(picked.tokens) == 1 for picked in picks.result())
    with pytest.raises(RuntimeError, match="closed"):
        sampler.submit(logits(1), [])
    sampler.close()


def test_a_step_without_rows(running: SamplerPipeline) -> None:
    assert running.submit(torch.empty(0, 1, VOCABULARY), []).result() == []


def test_a_buffer_too_small_is_refused_with_the_formula() -> None:
    needed = slot_bytes(ROWS, DRAFT_TOKENS, VOCABULARY)
    assert needed == 4 * 3 * 64 * 4
    with pytest.raises(ValueError, match=rf"{needed - 1} bytes.*take {needed} .*batch x \(draft tokens \+ 1\)"):
        pipeline(buffer_bytes=needed - 1)
    pipeline(buffer_bytes=needed).close()


def test_a_step_larger_than_a_slot_is_refused_and_the_slot_stays_free(running: SamplerPipeline) -> None:
    too_many = ROWS + 1
    for _ in range(SLOTS + 1):
        with pytest.raises(ValueError, match="a slot has"):
            running.submit(logits(1, rows=too_many), [Task(picker(), Draft(), 1)] * too_many)
    with pytest.raises(ValueError, match="4 rows of logits for 1 tasks"):
        running.submit(logits(1), [Task(picker(), Draft(), 1)])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: pinned slots and a copying stream")
def test_on_a_gpu_it_picks_the_same() -> None:
    cuda = torch.device("cuda")
    sampler = pipeline(cuda)
    try:
        assert answers(sampler, cuda) == answers(InlineSampler(), cuda) == answers(InlineSampler())
    finally:
        sampler.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: pinned slots and a copying stream")
def test_on_a_gpu_the_copy_waits_for_the_logits_and_not_for_what_follows() -> None:
    """Logits that a long kernel is still computing arrive whole; memory freed at once isn't reused too early."""
    cuda = torch.device("cuda")
    sampler = pipeline(cuda)
    try:
        for seed in range(20):
            expected = logits(seed)
            work = torch.randn(2048, 2048, device=cuda)
            for _ in range(10):
                work = work @ work / 2048
            computed = expected.to(cuda) + 0 * work.sum().nan_to_num(0, 0, 0)
            picks = sampler.submit(computed, [Task(picker(row), Draft((3, 4)), 3) for row in range(ROWS)])
            del computed
            torch.full_like(expected, float("nan"), device=cuda)
            inline = InlineSampler().submit(expected, [Task(picker(row), Draft((3, 4)), 3) for row in range(ROWS)])
            assert picks.result() == inline.result()
    finally:
        sampler.close()
