"""Answers are computed again in spare time only, in the engine's thread: no request waits for more than a piece."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import logging
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from sixfold_api.runtime_config import RuntimeConfig, ServedModel, ShadowConfig
from sixfold_runtime.config import default_config
from sixfold_runtime.engine.engine import Engine
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.engine.protocol import Chunk, Classify, Done, Generate, Request, Sampling
from sixfold_runtime.engine.scheduler import Limits
from sixfold_runtime.engine.shadow import MAX_JOBS, GivenUpError, Pieces, ShadowJob, Shadows
from sixfold_runtime.settings import RuntimeSettings

SECONDS = 60.0


def configured(level: int = 3, rate: float = 1.0) -> RuntimeConfig:
    config = default_config(level)
    shadow = ShadowConfig(sample_rate=rate)
    return config.model_copy(update={"stable": config.stable.model_copy(update={"shadow": shadow})})


class Counts:
    """Jobs whose ends are counted by a name of their own."""

    def __init__(self) -> None:
        self.metrics = EngineMetrics(RuntimeSettings())

    def job(self, name: str, start: Callable[[], Pieces]) -> ShadowJob:
        return ShadowJob(self.metrics.of(name).shadow, "Generation", 3, "stable", start)

    def result(self, name: str) -> dict[str, float]:
        labels = {**self.metrics.labels, "variant": name, "task": "Generation", "level": "3", "arm": "stable"}
        read = self.metrics.registry.get_sample_value
        found = {result: read("sixfold_shadow_total", {**labels, "result": result}) for result in RESULTS}
        return {result: value for result, value in found.items() if value}


RESULTS = ("agree", "differ", "skipped")


def pieces(count: int, agrees: bool = True, error: Exception | None = None) -> Callable[[], Pieces]:
    def start() -> Pieces:
        for _ in range(count - 1):
            yield
        if error is not None:
            raise error
        return agrees

    return start


def test_jobs_run_one_after_the_other_piece_by_piece() -> None:
    counts, shadows = Counts(), Shadows()
    shadows.offer(counts.job("first", pieces(3)))
    shadows.offer(counts.job("second", pieces(1, agrees=False)))
    for left in (2, 2, 1, 0):
        shadows.advance()
        assert len(shadows) == left
    assert counts.result("first") == {"agree": 1}
    assert counts.result("second") == {"differ": 1}


def test_the_oldest_of_too_many_are_skipped() -> None:
    counts, shadows = Counts(), Shadows()
    for number in range(MAX_JOBS + 3):
        shadows.offer(counts.job(f"v{number}", pieces(1)))
    assert len(shadows) == MAX_JOBS
    while len(shadows):
        shadows.advance()
    assert [counts.result(f"v{number}") for number in range(5)] == [{"skipped": 1}] * 3 + [{"agree": 1}] * 2


def test_a_job_that_fails_is_skipped_and_memory_is_mentioned_once(caplog: pytest.LogCaptureFixture) -> None:
    counts, shadows = Counts(), Shadows()
    errors = [torch.OutOfMemoryError("no"), torch.OutOfMemoryError("no"), GivenUpError("why"), ValueError("a fault")]
    for number, error in enumerate(errors):
        shadows.offer(counts.job(f"v{number}", pieces(2, error=error)))
    shadows.offer(counts.job("good", pieces(1)))
    with caplog.at_level(logging.WARNING):
        while len(shadows):
            shadows.advance()
    assert [counts.result(f"v{number}") for number in range(4)] == [{"skipped": 1}] * 4
    assert counts.result("good") == {"agree": 1}
    assert sum("no memory" in record.message for record in caplog.records) == 1


# -- in the engine


class Sink:
    """Runs an action in the engine's thread at each end of a request."""

    def __init__(self, ended: Callable[[Done], None] = lambda _: None) -> None:
        self.dones: dict[str, Done] = {}
        self._ended = ended
        self._changed = threading.Condition()

    def deliver(self, chunks: Sequence[Chunk], dones: Sequence[Done]) -> None:
        with self._changed:
            for done in dones:
                self.dones[done.id] = done
                self._ended(done)
            self._changed.notify_all()

    def wait(self, *names: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.dones.keys() >= set(names), SECONDS), self.dones
        assert all(self.dones[name].failure is None for name in names)


NewEngine = Callable[..., Engine]


@pytest.fixture
def new_engine(chat: ServedModel, intent: ServedModel) -> Iterator[NewEngine]:
    """Level 3: greedy answers and labels are compared, all of them unless a test says otherwise."""
    engines: list[Engine] = []

    def start(config: RuntimeConfig | None = None) -> Engine:
        left, loaded, used = [2], threading.Event(), config or configured()

        def on_models() -> None:
            left[0] -= 1
            if left[0] == 0:
                loaded.set()

        metrics = EngineMetrics(RuntimeSettings())
        engine = Engine(
            [chat, intent], lambda: used, metrics, device="cpu", limits=Limits(prefill_tokens=8), on_models=on_models
        )
        engines.append(engine)
        engine.start()
        assert loaded.wait(SECONDS)
        return engine

    yield start
    for engine in engines:
        engine.stop()


def generate(name: str, tokens: int = 4) -> Generate:
    return Generate(name, "chat", [5, 6, 7], Sampling(max_tokens=tokens, temperature=0.0))


def settle(engine: Engine) -> None:
    """Until nothing is left to be compared."""
    is_done = threading.Event()

    def look() -> None:
        if not len(engine.shadows):
            is_done.set()

    while not is_done.is_set():
        engine.call(look)
        is_done.wait(0.01)


def total(engine: Engine, name: str, **labels: str) -> float:
    return sum(
        sample.value
        for family in engine._metrics.registry.collect()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def test_answers_are_compared_when_nothing_else_is_to_do(new_engine: NewEngine) -> None:
    engine, sink = new_engine(), Sink()
    requests: list[Request] = [generate(f"g{i}") for i in range(3)]
    requests += [Classify(f"c{i}", "intent", [5, 6, 7 + i]) for i in range(5)]
    engine.submit(sink, requests)
    sink.wait(*(request.id for request in requests))
    settle(engine)
    assert total(engine, "sixfold_shadow_total", variant="chat", result="agree") == 3
    assert total(engine, "sixfold_shadow_tokens_total", variant="chat", result="agree") == 12
    assert total(engine, "sixfold_shadow_total", task="Classification", result="agree") == 5
    assert total(engine, "sixfold_shadow_total") == 8
    assert total(engine, "sixfold_engine_requests_total") == 8, "no comparison is a request"
    assert engine.is_idle and engine.running == 0


def test_requests_that_follow_each_other_never_wait_for_a_comparison(new_engine: NewEngine) -> None:
    """Each is submitted as soon as the one before it ends: no piece is computed before the last has ended."""
    names = [f"g{number}" for number in range(12)]
    waiting: list[int] = []

    def next_one(done: Done) -> None:
        waiting.append(len(engine.shadows))
        if (following := names.index(done.id) + 1) < len(names):
            engine.submit(sink, [generate(names[following])])

    engine, sink = new_engine(), Sink(next_one)
    engine.submit(sink, [generate(names[0])])
    sink.wait(*names)
    assert waiting == list(range(1, len(names) + 1))
    settle(engine)
    assert total(engine, "sixfold_shadow_total", result="agree") == len(names)


def test_a_request_is_admitted_before_the_next_piece(new_engine: NewEngine) -> None:
    """It comes while a piece is being computed, and has ended when the next one begins."""
    engine, sink = new_engine(configured(rate=0.0)), Sink()
    ended_before: list[set[str]] = []
    is_done = threading.Event()

    def start() -> Pieces:
        for number in range(5):
            ended_before.append(set(sink.dones))
            engine.submit(sink, [generate(f"g{number}", tokens=20)])
            yield
        is_done.set()
        return True

    engine.call(lambda: engine.shadows.offer(Counts().job("any", start)))
    assert is_done.wait(SECONDS)
    assert ended_before == [{f"g{n}" for n in range(number)} for number in range(5)]


def test_no_comparison_is_counted_as_the_engines_time(new_engine: NewEngine) -> None:
    engine, sink = new_engine(), Sink()
    engine.submit(sink, [generate("g", tokens=30)])
    sink.wait("g")
    before = total(engine, "sixfold_engine_busy_seconds_total"), total(engine, "sixfold_flops_total")
    settle(engine)
    assert (total(engine, "sixfold_engine_busy_seconds_total"), total(engine, "sixfold_flops_total")) == before
    assert total(engine, "sixfold_shadow_seconds_total", variant="chat") > 0


def test_an_engine_that_drains_or_is_at_level_0_compares_nothing(new_engine: NewEngine) -> None:
    engine, sink = new_engine(configured(level=0)), Sink()
    engine.submit(sink, [generate("g"), Classify("c", "intent", [5, 6])])
    sink.wait("g", "c")
    assert len(engine.shadows) == 0
    draining = new_engine()
    second = Sink(lambda _: draining.drain())
    draining.submit(second, [generate("g")])
    second.wait("g")
    draining.stop()
    assert total(draining, "sixfold_shadow_total") == 0
