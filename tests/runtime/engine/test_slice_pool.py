"""The pool of task slices over real files and its own thread: what comes, what goes, and what is said about it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sixfold_api.runtime_config import SubgraphsConfig, TaskConfig
from sixfold_api.scalars import Task
from sixfold_runtime.engine import slice_loader
from sixfold_runtime.engine.checkpoint import TensorStore
from sixfold_runtime.engine.errors import RequestError
from sixfold_runtime.engine.fingerprint import trunk_fingerprint
from sixfold_runtime.engine.loader import LoadedModel
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.engine.slice_file import slice_path, write_slice
from sixfold_runtime.engine.slice_loader import TrunkFolder
from sixfold_runtime.engine.slice_pool import SINGLE_TENANT_SECONDS, SlicePool
from sixfold_runtime.engine.task_slice import TaskSlice
from sixfold_runtime.modes.subgraphs import PATIENCE_SECONDS, RETRY_SECONDS
from sixfold_runtime.settings import RuntimeSettings

SECONDS = 60.0
ADAPTER = {"down.weight": (8, 32), "down.bias": (8,), "up.weight": (32, 8), "up.bias": (32,)}
SIZE_BYTES = 4 * (8 * 32 * 2 + 8 + 32)


def config(*names: str, pinned: Sequence[str] = (), on_demand: bool = True, slices: float | None = None) -> Any:
    """A budget for so many slices."""
    tasks = tuple(TaskConfig(name=name, pinned=name in pinned) for name in names)
    budget = None if slices is None else int(slices * SIZE_BYTES)
    return SubgraphsConfig(tasks=tasks, on_demand=on_demand, cache_bytes=budget)


class Scene:
    """A pool over the tiny decoder, with a clock that a test moves."""

    def __init__(self, model: LoadedModel, folder: Path, section: SubgraphsConfig | None) -> None:
        self.folder, self.section, self.now = folder, section, 1000.0
        self.metrics = EngineMetrics(RuntimeSettings())
        self.woken = threading.Event()
        assert model.decoder is not None
        self.pool = SlicePool(
            TrunkFolder(folder, Task.GENERATION),
            model.decoder,
            lambda: self.section,
            self.metrics.of("chat").slices,
            name="chat",
            wake=self.woken.set,
            clock=lambda: self.now,
        )

    def wait(self, until: Callable[[], bool]) -> None:
        """As the engine's thread does it: adapt whenever the pool wakes it."""
        end = time.monotonic() + SECONDS
        while not until():
            assert self.woken.wait(max(0.0, end - time.monotonic()))
            self.woken.clear()
            self.pool.adapt()

    def configure(self, section: SubgraphsConfig | None) -> None:
        self.section = section
        changes = self.pool.changes
        self.pool.adapt()
        self.wait(lambda: self.pool.changes > changes)

    def get(self, task: str, tenant: str = "acme") -> TaskSlice:
        """Ask as a runner does: again after each change."""
        found: list[TaskSlice] = []

        def ask() -> bool:
            if (got := self.pool.acquire(task, tenant)) is not None:
                found.append(got)
            return bool(found)

        self.wait(ask)
        return found[0]

    def use(self, task: str, tenant: str = "acme") -> None:
        self.get(task, tenant)
        self.pool.release(task)

    def code(self, task: str) -> tuple[int, str]:
        try:
            self.pool.check(task)
        except RequestError as error:
            return error.status, error.message
        return 200, ""

    def number(self, name: str, **labels: str) -> float:
        found = self.metrics.registry.get_sample_value(name, {**self.metrics.labels, "variant": "chat", **labels})
        return 0.0 if found is None else found

    @property
    def resident(self) -> set[str]:
        return {task.name for task in self.pool.tasks if self.pool.slice_bytes(task.name)}


@pytest.fixture
def folder(copy_of: Callable[[Path], Path], decoder_folder: Path) -> Path:
    """The tiny decoder with four slices of one size."""
    found = copy_of(decoder_folder)
    fingerprint = trunk_fingerprint(TensorStore(found))
    for index, task in enumerate(("ner", "topic", "triage", "mood")):
        tensors = {f"adapters.1.{part}": torch.full(shape, 0.1 * index) for part, shape in ADAPTER.items()}
        write_slice(slice_path(found, task), tensors, Task.GENERATION, (), fingerprint)
    return found


@pytest.fixture
def new_scene(decoder: LoadedModel, folder: Path) -> Iterator[Callable[..., Scene]]:
    scenes: list[Scene] = []

    def make(section: SubgraphsConfig | None) -> Scene:
        scenes.append(Scene(decoder, folder, section))
        return scenes[-1]

    yield make
    for scene in scenes:
        scene.pool.close()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Loads wait until it is set."""
    opened, load = threading.Event(), slice_loader.load_slice

    def when_open(*args: Any) -> TaskSlice:
        assert opened.wait(SECONDS)
        return load(*args)

    monkeypatch.setattr(slice_loader, "load_slice", when_open)
    return opened


NewScene = Callable[..., Scene]


def test_pinned_slices_are_there_before_the_first_request(new_scene: NewScene) -> None:
    scene = new_scene(config("ner", "topic", pinned=["ner"]))
    assert scene.resident == {"ner"}
    assert scene.pool.acquire("ner", "acme") is not None
    assert scene.pool.resident_bytes == SIZE_BYTES
    assert [(task.name, task.task, task.labels) for task in scene.pool.tasks] == [
        ("ner", "Generation", []),
        ("topic", "Generation", []),
    ]


def test_while_the_mode_is_off_all_of_them_stay_in_memory(new_scene: NewScene) -> None:
    scene = new_scene(config("ner", "topic", "triage", on_demand=False, slices=1))
    assert scene.resident == {"ner", "topic", "triage"}
    scene.configure(config("ner", "topic", "triage", slices=1))
    assert len(scene.resident) == 1
    scene.configure(config("ner", "topic", "triage", on_demand=False, slices=1))
    scene.wait(lambda: scene.resident == {"ner", "topic", "triage"})


def test_an_unknown_task_is_told_the_known_ones(new_scene: NewScene) -> None:
    scene = new_scene(config("ner", "topic"))
    assert scene.code("nope") == (404, "this model has no task 'nope': it has ner, topic")
    assert scene.code("triage")[0] == 404, "its file is there, and the policy doesn't offer it"
    assert new_scene(None).code("ner") == (404, "this model has no task 'ner': it has none")


def test_many_ask_and_one_load_answers_them(new_scene: NewScene, gate: threading.Event) -> None:
    scene = new_scene(config("ner"))
    assert [scene.pool.acquire("ner", "acme") for _ in range(5)] == [None] * 5
    gate.set()
    first = scene.get("ner")
    assert [scene.pool.acquire("ner", "acme") for _ in range(4)] == [first] * 4
    assert scene.number("sixfold_slice_loads_total", task="ner", result="ok") == 1
    assert scene.number("sixfold_slice_load_seconds_count", task="ner") == 1


def test_the_engine_s_thread_never_waits_for_a_load(new_scene: NewScene, gate: threading.Event) -> None:
    scene = new_scene(config("ner", "topic"))
    assert scene.pool.acquire("ner", "acme") is None
    assert scene.pool.acquire("topic", "acme") is None
    assert not scene.pool.adapt()
    scene.pool.close()
    assert scene.resident == set()
    gate.set()


def test_a_budget_is_kept_and_everybody_is_served(new_scene: NewScene) -> None:
    scene = new_scene(config("ner", "topic", "triage", "mood", pinned=["ner"], slices=2))
    for task in ("topic", "triage", "ner", "mood", "topic"):
        scene.use(task)
        assert scene.pool.resident_bytes <= 2 * SIZE_BYTES
        assert "ner" in scene.resident
    assert scene.number("sixfold_slice_residency_seconds_count", task="topic") == 1
    assert scene.number("sixfold_memory_bytes", kind="slices") == 2 * SIZE_BYTES


def test_what_is_in_use_is_not_unloaded_for_another_one(new_scene: NewScene) -> None:
    scene = new_scene(config("ner", "topic", slices=1))
    held = scene.get("ner")
    assert scene.pool.acquire("topic", "acme") is None
    assert scene.resident == {"ner"} and held.layers
    scene.pool.release("ner")
    scene.use("topic")
    assert scene.resident == {"topic"}


def test_one_that_was_asked_for_in_vain_makes_room_by_itself(new_scene: NewScene) -> None:
    """Whoever asked for `ner` is gone when it comes; the next one must not wait for ever."""
    scene = new_scene(config("ner", "topic", slices=1))
    assert scene.pool.acquire("ner", "acme") is None
    assert scene.pool.acquire("topic", "acme") is None
    scene.wait(lambda: scene.resident == {"ner"})
    scene.now += PATIENCE_SECONDS
    scene.wait(lambda: scene.resident == {"topic"})


def test_a_slice_that_does_not_fit_is_refused(new_scene: NewScene) -> None:
    scene = new_scene(config("ner", "topic", pinned=["ner"], slices=1.5))
    status, message = scene.code("topic")
    assert status == 503 and f"the slice has {SIZE_BYTES} bytes; cacheSize is {int(1.5 * SIZE_BYTES)}" in message
    assert set(scene.pool.failures) == {"topic"}
    scene.configure(config("ner", "topic", pinned=["ner"], slices=2))
    scene.use("topic")
    assert scene.pool.failures == {}


def test_a_task_without_a_file_is_told_so_and_served_once_there_is_one(new_scene: NewScene, folder: Path) -> None:
    path = slice_path(folder, "ner")
    content = path.read_bytes()
    path.unlink()
    scene = new_scene(config("ner", "topic", pinned=["ner"]))
    assert "ner.safetensors is missing" in scene.pool.failures["ner"]
    status, message = scene.code("ner")
    assert status == 503 and "is missing" in message
    scene.use("topic")
    path.write_bytes(content)
    assert scene.code("ner")[0] == 503, "files are not looked at with every request"
    scene.now += RETRY_SECONDS
    scene.use("ner")
    assert scene.pool.failures == {}


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-100]),
        lambda path: path.unlink(),
        lambda path: write_slice(path, {"adapters.1.down.bias": torch.tensor([torch.nan])}, Task.GENERATION, (), "x"),
        lambda path: write_slice(path, {"adapters.1.down.bias": torch.ones(8)}, Task.GENERATION, (), "sha256:other"),
        lambda path: write_slice(path, {"head.weight": torch.ones(2, 64)}, Task.CLASSIFICATION, ("a", "b"), "x"),
    ],
    ids=["cut off", "gone", "NaN", "another trunk", "for a classifier"],
)
def test_a_file_that_went_bad_since_the_start_fails_its_own_requests_only(
    new_scene: NewScene, folder: Path, damage: Callable[[Path], None]
) -> None:
    scene = new_scene(config("ner", "topic"))
    damage(slice_path(folder, "ner"))
    assert scene.pool.acquire("ner", "acme") is None
    scene.wait(lambda: bool(scene.pool.failures))
    with pytest.raises(RequestError) as refused:
        scene.pool.acquire("ner", "acme")
    assert refused.value.code == "slice_unusable" and refused.value.retry_after_seconds == RETRY_SECONDS
    assert "ner.safetensors" in refused.value.message or "the model for Generation" in refused.value.message
    assert scene.number("sixfold_slice_loads_total", task="ner", result="failed") == 1
    scene.use("topic")
    scene.now += RETRY_SECONDS
    assert scene.pool.acquire("ner", "acme") is None, "it is tried again"


def test_a_task_is_dropped_while_it_is_in_use(new_scene: NewScene) -> None:
    scene = new_scene(config("ner", "topic"))
    held = scene.get("ner")
    scene.configure(config("topic"))
    assert scene.code("ner")[0] == 404
    assert held.layers and scene.pool.resident_bytes == SIZE_BYTES
    scene.pool.release("ner")
    assert scene.pool.resident_bytes == 0
    assert 'task="ner"' not in "".join(
        line for line in metrics_text(scene).splitlines() if line.startswith("sixfold_slice_resident_bytes")
    )


def test_a_task_is_dropped_while_it_is_loaded(new_scene: NewScene, gate: threading.Event) -> None:
    scene = new_scene(config("ner", "topic"))
    assert scene.pool.acquire("ner", "acme") is None
    scene.section = config("topic")
    scene.pool.adapt()
    gate.set()
    scene.wait(lambda: scene.code("ner")[0] == 404)
    scene.use("topic")
    assert scene.pool.resident_bytes == SIZE_BYTES


def test_a_task_that_becomes_pinned_is_loaded_and_stays(new_scene: NewScene) -> None:
    scene = new_scene(config("ner", "topic", slices=1))
    scene.use("topic")
    scene.configure(config("ner", "topic", pinned=["ner"], slices=1))
    scene.wait(lambda: scene.resident == {"ner"})
    assert scene.code("topic")[0] == 503


def test_a_retired_pool_gives_up_what_nobody_uses(new_scene: NewScene) -> None:
    scene = new_scene(config("ner", "topic", pinned=["ner"]))
    scene.get("topic")
    scene.pool.retire()
    assert scene.pool.resident_bytes == SIZE_BYTES and scene.pool.tasks == ()
    scene.pool.release("topic")
    assert scene.pool.resident_bytes == 0
    scene.pool.enlist()
    assert scene.code("topic")[0] == 200
    scene.wait(lambda: scene.resident == {"ner"})


def test_a_cold_task_that_stays_for_one_tenant_is_reported_once(
    new_scene: NewScene, caplog: pytest.LogCaptureFixture
) -> None:
    scene = new_scene(config("ner", "topic", "mood", pinned=["mood"]))
    scene.use("ner", "acme")
    scene.use("topic", "acme")
    scene.use("topic", "globex")
    scene.use("mood", "acme")
    scene.now += SINGLE_TENANT_SECONDS + 60
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            for task in ("ner", "topic", "mood"):
                scene.use(task, "acme")
    assert [record.getMessage() for record in caplog.records] == [
        "model chat: task ner isn't pinned and has been in memory for 11 minutes for the tenant acme alone"
    ]
    seconds = {
        task: scene.number("sixfold_slice_single_tenant_seconds", task=task) for task in ("ner", "topic", "mood")
    }
    assert seconds == {"ner": SINGLE_TENANT_SECONDS + 60, "topic": 0, "mood": 0}
    assert "acme" not in metrics_text(scene) and "globex" not in metrics_text(scene), "a tenant is no label"


def test_hits_and_misses(new_scene: NewScene) -> None:
    scene = new_scene(config("ner"))
    scene.get("ner")
    assert scene.pool.acquire("ner", "acme", had_to_wait=True) is not None
    assert scene.number("sixfold_slice_requests_total", task="ner", result="hit") == 1
    assert scene.number("sixfold_slice_requests_total", task="ner", result="miss") == 1


def metrics_text(scene: Scene) -> str:
    from prometheus_client import generate_latest

    return generate_latest(scene.metrics.registry).decode()
