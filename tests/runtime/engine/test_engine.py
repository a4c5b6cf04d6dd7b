"""The engine's thread: several models, submitting and cancelling from outside, faults that must not end the loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sixfold_api.runtime_config import ServedModel
from sixfold_api.scalars import Task
from sixfold_runtime.engine.engine import Engine
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.engine.protocol import Chunk, Classify, Done, Generate, Sampling
from sixfold_runtime.engine.scheduler import Limits
from sixfold_runtime.settings import RuntimeSettings

SECONDS = 60.0
"""Most that a test waits for the engine's thread; only a hang comes near it."""


class Waiting:
    """A sink that lets a test wait for what it needs."""

    def __init__(self) -> None:
        self.dones: dict[str, Done] = {}
        self.tokens: dict[str, int] = {}
        self._changed = threading.Condition()

    def deliver(self, chunks: Sequence[Chunk], dones: Sequence[Done]) -> None:
        with self._changed:
            for chunk in chunks:
                self.tokens[chunk.id] = self.tokens.get(chunk.id, 0) + chunk.tokens
            self.dones.update((done.id, done) for done in dones)
            self._changed.notify_all()

    def wait(self, until: Callable[[], bool]) -> None:
        ends = time.monotonic() + SECONDS
        with self._changed:
            while not until():
                self._changed.wait(0.05)  # what isn't of the sink, such as an idle engine, tells nobody
                assert time.monotonic() < ends, (self.tokens, self.dones)

    def wait_done(self, *ids: str) -> None:
        self.wait(lambda: self.dones.keys() >= set(ids))

    def code(self, request_id: str) -> str:
        failure = self.dones[request_id].failure
        return failure.code if failure else ""


@pytest.fixture
def sink() -> Waiting:
    return Waiting()


NewEngine = Callable[..., Engine]


@pytest.fixture
def new_engine(config: Any) -> Iterator[NewEngine]:
    """Starts an engine and waits until every model is loaded or has failed to."""
    engines: list[Engine] = []

    def start(*models: ServedModel, **changes: Any) -> Engine:
        left, loaded = [len(models)], threading.Event()

        def on_models() -> None:
            left[0] -= 1
            if left[0] == 0:
                loaded.set()

        options: dict[str, Any] = {"device": "cpu", "limits": Limits(), "on_models": on_models, **changes}
        engine = Engine(models, config, EngineMetrics(RuntimeSettings()), **options)
        engines.append(engine)
        engine.start()
        assert loaded.wait(SECONDS)
        return engine

    yield start
    for engine in engines:
        engine.stop()


def generate(request_id: str, token_ids: list[int], model: str = "chat", **sampling: Any) -> Generate:
    return Generate(request_id, model, token_ids, Sampling(**{"max_tokens": 8, "temperature": 0.0, **sampling}))


def test_generation_and_classification_side_by_side(
    new_engine: NewEngine, chat: ServedModel, intent: ServedModel, sink: Waiting
) -> None:
    """While a stream runs, texts are classified; neither waits for the other's end."""
    engine = new_engine(chat, intent)
    assert engine.is_ready and engine.why_not_ready() == ""
    engine.submit(sink, [generate("long", [5], max_tokens=250)])
    sink.wait(lambda: sink.tokens.get("long", 0) > 2)
    engine.submit(sink, [Classify(f"c{i}", "intent", [5, 6, 7]) for i in range(40)])
    sink.wait_done("c39")
    assert "long" not in sink.dones
    sink.wait_done("long", *(f"c{i}" for i in range(40)))
    assert sink.dones["long"].completion_tokens == 250
    sink.wait(lambda: engine.is_idle)


def test_two_models_generate_side_by_side(new_engine: NewEngine, chat: ServedModel, sink: Waiting) -> None:
    engine = new_engine(chat, chat.model_copy(update={"name": "other"}))
    engine.submit(sink, [generate("a", [5, 6]), generate("b", [5, 6], "other")])
    sink.wait_done("a", "b")
    assert sink.tokens == {"a": 8, "b": 8}


def test_what_the_engine_refuses_at_once(
    new_engine: NewEngine, chat: ServedModel, intent: ServedModel, sink: Waiting
) -> None:
    engine = new_engine(chat, intent)
    engine.submit(
        sink,
        [
            generate("model", [5], "nope"),
            generate("task", [5], "intent"),
            Classify("task2", "chat", [5]),
            generate("empty", []),
            generate("context", [5] * 300),
            generate("none", [5], max_tokens=0),
            generate("good", [5]),
            generate("good", [5]),
        ],
    )
    sink.wait_done("model", "task", "task2", "empty", "context", "none", "good")
    codes = {name: sink.code(name) for name in sink.dones if name != "good"}
    assert codes == {
        "model": "model_not_found",
        "task": "wrong_task",
        "task2": "wrong_task",
        "empty": "empty_prompt",
        "context": "context_length_exceeded",
        "none": "invalid_max_tokens",
    }
    assert sink.dones["task"].failure is not None and sink.dones["task"].failure.status == 400


def test_an_id_in_use_is_refused_and_the_first_goes_on(new_engine: NewEngine, chat: ServedModel, sink: Waiting) -> None:
    engine, other = new_engine(chat), Waiting()
    engine.submit(sink, [generate("a", [5], max_tokens=100), generate("a", [5])])
    engine.submit(other, [generate("a", [5])])
    sink.wait(lambda: sink.code("a") == "duplicate_request_id" if "a" in sink.dones else False)
    other.wait_done("a")
    assert other.code("a") == "", "ids are a sink's own"
    sink.wait(lambda: sink.tokens.get("a") == 100 and sink.dones["a"].failure is None)


def test_cancelling_ends_the_work_and_says_nothing(new_engine: NewEngine, chat: ServedModel, sink: Waiting) -> None:
    engine = new_engine(chat, limits=Limits(max_running=2))
    engine.submit(sink, [generate(name, [5], max_tokens=250) for name in ("running", "kept", "waiting")])
    sink.wait(lambda: sink.tokens.get("running", 0) > 2)
    engine.cancel(sink, ["running", "waiting", "unknown"])
    sink.wait_done("kept")
    sink.wait(lambda: engine.is_idle)
    assert list(sink.dones) == ["kept"]
    assert sink.tokens["running"] < 250 and "waiting" not in sink.tokens


def test_dropping_a_sink_cancels_its_requests_only(new_engine: NewEngine, chat: ServedModel, sink: Waiting) -> None:
    engine, gone = new_engine(chat), Waiting()
    engine.submit(gone, [generate("a", [5], max_tokens=250)])
    engine.submit(sink, [generate("a", [5], max_tokens=50)])
    gone.wait(lambda: gone.tokens.get("a", 0) > 2)
    engine.drop(gone)
    sink.wait_done("a")
    sink.wait(lambda: engine.is_idle)
    assert not gone.dones


def test_a_sink_that_fails_ends_its_own_requests_only(new_engine: NewEngine, chat: ServedModel, sink: Waiting) -> None:
    class Broken(Waiting):
        def deliver(self, chunks: Sequence[Chunk], dones: Sequence[Done]) -> None:
            raise RuntimeError("broken sink")

    engine = new_engine(chat)
    engine.submit(Broken(), [generate("a", [5], max_tokens=250)])
    engine.submit(sink, [generate("a", [5])])
    sink.wait_done("a")
    sink.wait(lambda: engine.is_idle)
    assert engine.is_alive


def test_draining_finishes_what_runs_and_refuses_what_comes(
    new_engine: NewEngine, chat: ServedModel, sink: Waiting
) -> None:
    engine = new_engine(chat)
    engine.submit(sink, [generate("running", [5], max_tokens=60)])
    engine.drain()
    engine.submit(sink, [generate("late", [5])])
    sink.wait_done("running", "late")
    assert (sink.code("late"), sink.code("running")) == ("engine_draining", "")
    assert not engine.is_ready and "draining" in engine.why_not_ready()
    sink.wait(lambda: engine.is_idle)


def test_stopping_fails_what_still_runs(new_engine: NewEngine, chat: ServedModel, sink: Waiting) -> None:
    engine = new_engine(chat)
    engine.submit(sink, [generate("a", [5], max_tokens=250)])
    sink.wait(lambda: sink.tokens.get("a", 0) > 2)
    engine.stop()
    assert sink.code("a") == "engine_stopped" and not engine.is_alive


def test_a_model_that_fails_to_load_says_why_and_the_others_serve(
    new_engine: NewEngine, chat: ServedModel, tmp_path: Path, sink: Waiting
) -> None:
    broken = ServedModel(name="broken", task=Task.GENERATION, path=str(tmp_path / "absent"))
    engine = new_engine(broken, chat)
    assert not engine.is_ready
    assert "model broken: " in engine.why_not_ready() and "is no folder" in engine.why_not_ready()
    state = engine.models["broken"].state
    assert (state.ready, "is no folder" in state.error) == (False, True)
    engine.submit(sink, [generate("a", [5]), generate("b", [5], "broken")])
    sink.wait_done("a", "b")
    assert (sink.code("a"), sink.code("b")) == ("", "model_not_ready")


def test_weights_that_compute_nan_are_never_ready(
    new_engine: NewEngine, chat: ServedModel, decoder_folder: Path, copy_of: Callable[[Path], Path]
) -> None:
    from safetensors.torch import load_file, save_file

    folder = copy_of(decoder_folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    engine = new_engine(chat.model_copy(update={"path": str(folder)}))
    assert not engine.is_ready and "NaN" in engine.why_not_ready()


def test_an_unknown_device_is_the_models_error(new_engine: NewEngine, chat: ServedModel) -> None:
    engine = new_engine(chat, device="tpu")
    assert "use auto, cpu or cuda" in engine.why_not_ready()


def test_an_engine_without_models_is_not_ready(config: Any) -> None:
    engine = Engine([], config, EngineMetrics(RuntimeSettings()))
    assert not engine.is_ready and "SIXFOLD_MODELS" in engine.why_not_ready()
