"""Classifiers with exits and task slices in the engine's thread: what is served, what is told, and what damage does."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sixfold_api.modes import Mode
from sixfold_api.runtime_config import EarlyExitConfig, RuntimeConfig, ServedModel, SubgraphsConfig, TaskConfig
from sixfold_api.scalars import Task
from sixfold_runtime.config import default_config
from sixfold_runtime.engine import slice_loader
from sixfold_runtime.engine.engine import Engine
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.engine.protocol import Chunk, Classify, Done
from sixfold_runtime.engine.task_slice import TaskSlice
from sixfold_runtime.settings import RuntimeSettings

SECONDS = 60.0
TEXT = [5, 6, 7, 8, 9, 10]


class Sink:
    def __init__(self) -> None:
        self.dones: dict[str, Done] = {}
        self._changed = threading.Condition()

    def deliver(self, chunks: Sequence[Chunk], dones: Sequence[Done]) -> None:
        with self._changed:
            self.dones.update((done.id, done) for done in dones)
            self._changed.notify_all()

    def wait(self, *ids: str) -> list[Done]:
        with self._changed:
            assert self._changed.wait_for(lambda: self.dones.keys() >= set(ids), SECONDS), self.dones
        return [self.dones[request_id] for request_id in ids]


class Scene:
    """An engine over one classifier, and its configuration."""

    def __init__(self, folder: Path, *tasks: str, task: Task = Task.CLASSIFICATION) -> None:
        self.sink, self.told = Sink(), threading.Event()
        self.config = self._with(*tasks)
        self.served = ServedModel(name="intent", task=task, path=str(folder))
        metrics = EngineMetrics(RuntimeSettings())
        self.engine = Engine([self.served], lambda: self.config, metrics, device="cpu", on_models=self.told.set)
        self.engine.start()
        self.wait_told()
        assert self.engine.is_ready, self.engine.why_not_ready()
        self.model = self.engine.models["intent"]

    def _with(self, *tasks: str) -> RuntimeConfig:
        config = default_config(3)
        section = SubgraphsConfig(tasks=tuple(TaskConfig(name=name) for name in tasks), on_demand=True)
        settings = {
            "active_modes": (Mode.EARLY_EXIT, Mode.SUBGRAPHS),
            "early_exit": EarlyExitConfig(),
            "classification_subgraphs": section if tasks else None,
        }
        return config.model_copy(update={"stable": config.stable.model_copy(update=settings)})

    def offer(self, *tasks: str) -> None:
        self.told.clear()
        self.config = self._with(*tasks)
        self.engine.config_changed()
        self.wait_told()

    def wait_told(self) -> None:
        assert self.told.wait(SECONDS)

    def ask(self, *tasks: str) -> list[Done]:
        """One text for each of the tasks."""
        ids = [f"{index}-{task}" for index, task in enumerate(tasks)]
        self.sink.dones.clear()
        self.engine.submit(
            self.sink,
            [Classify(request_id, "intent", TEXT, task=task) for request_id, task in zip(ids, tasks, strict=True)],
        )
        return self.sink.wait(*ids)


NewScene = Callable[..., Scene]


@pytest.fixture
def new_scene() -> Iterator[NewScene]:
    scenes: list[Scene] = []

    def make(*arguments: Any, **options: Any) -> Scene:
        scenes.append(Scene(*arguments, **options))
        return scenes[-1]

    yield make
    for scene in scenes:
        scene.engine.stop()


def test_own_head_and_tasks_of_both_kinds_side_by_side(new_scene: NewScene, classifiers: Path) -> None:
    scene = new_scene(classifiers / "intent", "topic", "pos")
    own, topic, pos = scene.ask("", "topic", "pos")
    assert {entry.label for entry in own.scores} == {"bad", "so-so", "good"}
    assert {entry.label for entry in topic.scores} == {"sport", "music", "war", "food"}
    assert [entry.label in ("NOUN", "OTHER") for entry in pos.token_labels] == [True] * len(TEXT)
    assert scene.model.labels == ("bad", "so-so", "good")
    assert [(task.name, task.task, task.labels) for task in scene.model.tasks] == [
        ("topic", "Classification", ["sport", "music", "war", "food"]),
        ("pos", "TokenClassification", ["NOUN", "OTHER"]),
    ]
    assert scene.model.state.slice_errors == {}


def test_a_trunk_that_has_tasks_only(new_scene: NewScene, classifiers: Path) -> None:
    scene = new_scene(classifiers / "trunk", "topic")
    own, topic = scene.ask("", "topic")
    assert topic.failure is None and topic.layers == 4 and not topic.exited
    assert own.failure is not None and own.failure.code == "task_required"
    assert scene.model.labels == ()


def test_tasks_come_and_go_with_the_configuration(new_scene: NewScene, classifiers: Path) -> None:
    scene = new_scene(classifiers / "intent")
    (refused,) = scene.ask("topic")
    assert refused.failure is not None and refused.failure.status == 404
    scene.offer("topic", "pos")
    assert [done.failure for done in scene.ask("topic", "pos")] == [None, None]
    scene.offer("pos")
    topic, pos = scene.ask("topic", "pos")
    assert topic.failure is not None and topic.failure.message == "this model has no task 'topic': it has pos"
    assert pos.failure is None


def test_damaged_exits_leave_a_classifier_that_serves(new_scene: NewScene, classifiers: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(classifiers / "intent", tmp_path / "intent"))
    exits = folder / "exits.safetensors"
    exits.write_bytes(exits.read_bytes()[:-64])
    scene = new_scene(folder, "topic")
    own, topic = scene.ask("", "topic")
    assert own.failure is None and own.layers == 4 and not own.exited
    assert topic.failure is None
    assert "exits.safetensors" in scene.model.unsupported[Mode.EARLY_EXIT]


def test_a_damaged_slice_leaves_the_others(new_scene: NewScene, classifiers: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(classifiers / "intent", tmp_path / "intent"))
    shutil.copy(classifiers / "trunk" / "slices" / "topic.safetensors", folder / "slices" / "topic.safetensors")
    scene = new_scene(folder, "topic", "pos")
    own, topic, pos = scene.ask("", "topic", "pos")
    assert own.failure is None and pos.failure is None
    assert topic.failure is not None and (topic.failure.status, topic.failure.code) == (503, "slice_unusable")
    assert "was made for other weights" in topic.failure.message
    assert set(scene.model.state.slice_errors) == {"topic"}
    assert Mode.SUBGRAPHS not in scene.model.unsupported, "the other task is served"
    scene.offer("topic")
    assert "was made for other weights" in scene.model.unsupported[Mode.SUBGRAPHS]


def test_nothing_spins_while_all_wait_for_a_slice(
    new_scene: NewScene, classifiers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, load = threading.Event(), slice_loader.load_slice

    def when_open(*arguments: Any) -> TaskSlice:
        assert opened.wait(SECONDS)
        return load(*arguments)

    monkeypatch.setattr(slice_loader, "load_slice", when_open)
    scene = new_scene(classifiers / "intent", "topic", "pos")
    scene.engine.submit(scene.sink, [Classify("waits", "intent", TEXT, task="topic")])
    scene.engine.submit(scene.sink, [Classify("goes", "intent", TEXT)])
    scene.sink.wait("goes")
    assert not scene.model.can_step and scene.engine.waiting == 1
    opened.set()
    scene.sink.wait("waits")
    assert scene.sink.dones["waits"].failure is None


def test_a_model_for_tokens_labels_tokens(new_scene: NewScene, classifiers: Path, tmp_path: Path) -> None:
    from transformers import BertConfig, BertForTokenClassification

    config = BertConfig.from_pretrained(classifiers / "intent", num_labels=2, id2label={0: "NOUN", 1: "OTHER"})
    torch.manual_seed(1)
    BertForTokenClassification(config).save_pretrained(tmp_path)
    shutil.copy(classifiers / "intent" / "tokenizer.json", tmp_path)
    scene = new_scene(tmp_path, task=Task.TOKEN_CLASSIFICATION)
    (done,) = scene.ask("")
    assert done.failure is None and len(done.token_labels) == len(TEXT)
    assert scene.model.labels == ("NOUN", "OTHER")
