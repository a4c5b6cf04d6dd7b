"""A classifier's answers computed again through all layers: what is counted is what asking for all layers shows."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sixfold_api.classification import ExitRule
from sixfold_api.runtime_config import (
    EarlyExitConfig,
    RuntimeConfig,
    ServedModel,
    ShadowConfig,
    SubgraphsConfig,
    TaskConfig,
)
from sixfold_api.scalars import Task
from sixfold_runtime.config import default_config
from sixfold_runtime.engine.checkpoint import TensorStore
from sixfold_runtime.engine.classification import ClassificationRunner
from sixfold_runtime.engine.classification_queue import Text
from sixfold_runtime.engine.classification_run import Answer
from sixfold_runtime.engine.exit_heads import ExitHeads
from sixfold_runtime.engine.fingerprint import trunk_fingerprint
from sixfold_runtime.engine.loader import LoadedModel, load
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.engine.protocol import Classify, Done, LabelScore
from sixfold_runtime.engine.scheduler import Limits
from sixfold_runtime.engine.shadow import Shadows
from sixfold_runtime.engine.shadow_classification import ClassificationShadow
from sixfold_runtime.engine.slice_file import slice_path, write_slice
from sixfold_runtime.engine.slice_loader import TrunkFolder
from sixfold_runtime.engine.slice_pool import SlicePool
from sixfold_runtime.modes.early_exit import Calibration
from sixfold_runtime.modes.shadow import is_sampled
from sixfold_runtime.settings import RuntimeSettings

WIDTH, LAYERS = 32, 2
LABELS = ["bad", "so-so", "good"]
TEXTS = [torch.randint(2, 320, (3 + s,), generator=torch.Generator().manual_seed(s)).tolist() for s in range(40)]
TASKS = {"topic": (Task.CLASSIFICATION, ["sport", "music", "war"]), "tags": (Task.TOKEN_CLASSIFICATION, ["O", "PER"])}


class Bench:
    """A classifier and its comparisons, stepped by hand."""

    def __init__(self, model: LoadedModel, sink: Any, exits: ExitHeads | None = None, tasks: bool = False) -> None:
        self.config = configured()
        self.metrics = EngineMetrics(RuntimeSettings())
        self.shadows = Shadows()
        self.slices: SlicePool | None = None
        metrics = self.metrics.of("intent")
        if tasks:
            folder = TrunkFolder(Path(model.served.path), Task.CLASSIFICATION)
            assert model.trunk is not None
            self.slices = SlicePool(folder, model.trunk, self._section, metrics.slices)
        self.answers: list[tuple[Text, Answer]] = []
        self.shadow = ClassificationShadow(self.shadows, model, self.slices, metrics.shadow, piece_tokens=8)
        self.runner = ClassificationRunner(
            model, Limits(), lambda: self.config, metrics, exits=exits, slices=self.slices, answered=self._answered
        )
        self._sink = sink

    def _answered(self, text: Text, answer: Answer) -> None:
        self.answers.append((text, answer))
        self.shadow.answered(text, answer)

    def _section(self) -> SubgraphsConfig | None:
        return self.config.stable.classification_subgraphs

    def ask(self, prefix: str = "t", **fields: Any) -> list[Done]:
        for index, ids in enumerate(TEXTS):
            name = f"{prefix}{index}"
            self.runner.submit((self._sink, name), Classify(name, "intent", ids, **fields))
        while self.runner.can_step:
            self._sink.take(self.runner.step())
        return [self._sink.dones[f"{prefix}{index}"] for index in range(len(TEXTS))]

    def compare(self) -> int:
        pieces = 0
        while len(self.shadows):
            self.shadows.advance()
            pieces += 1
        return pieces

    def count(self, result: str, task: str = "Classification") -> float:
        labels = {**self.metrics.labels, "variant": "intent", "task": task, "level": "3", "arm": "stable"}
        return self.metrics.registry.get_sample_value("sixfold_shadow_total", {**labels, "result": result}) or 0.0


def configured(level: int = 3, exits: EarlyExitConfig | None = None, rate: float = 1.0) -> RuntimeConfig:
    section = SubgraphsConfig(tasks=tuple(TaskConfig(name=name) for name in TASKS), on_demand=False)
    config = default_config(level)
    update = {
        "shadow": ShadowConfig(sample_rate=rate),
        "early_exit": exits,
        "classification_subgraphs": section,
    }
    return config.model_copy(update={"stable": config.stable.model_copy(update=update)})


ALWAYS = EarlyExitConfig(rule=ExitRule.FIXED, threshold=0.0, length_relaxation=0.0)


@pytest.fixture
def heads() -> ExitHeads:
    """Random ones: they are often wrong."""
    dice, numbers = torch.Generator().manual_seed(5), np.random.default_rng(5)
    calibration = Calibration(
        depths=(1,),
        layers=LAYERS,
        confidences=numbers.uniform(0.4, 1, (50, 1)),
        agrees=np.ones((50, 1), bool),
        lengths=numbers.integers(3, 60, 50),
        max_disagreement=0.03,
        length_relaxation=0.0,
    )
    weight = torch.randn(len(LABELS), 2 * WIDTH, generator=dice) * 0.2
    return ExitHeads(tuple(LABELS), {1: weight}, {1: torch.zeros(len(LABELS))}, {1: 1.0}, calibration)


@pytest.fixture
def tasked(copy_of: Callable[[Path], Path], classifier_folder: Path) -> LoadedModel:
    """The classifier with two tasks."""
    folder = copy_of(classifier_folder)
    dice = torch.Generator().manual_seed(9)
    fingerprint = trunk_fingerprint(TensorStore(folder))
    for name, (task, labels) in TASKS.items():
        width = WIDTH if task is Task.TOKEN_CLASSIFICATION else 2 * WIDTH
        tensors = {
            "head.weight": torch.randn(len(labels), width, generator=dice),
            "head.bias": torch.zeros(len(labels)),
        }
        write_slice(slice_path(folder, name), tensors, task, labels, fingerprint)
    return load(ServedModel(name="intent", task=Task.CLASSIFICATION, path=str(folder)), torch.device("cpu"))


def test_without_exits_all_agree(classifier: LoadedModel, collector: Any) -> None:
    bench = Bench(classifier, collector)
    bench.ask()
    bench.compare()
    assert (bench.count("agree"), bench.count("differ"), bench.count("skipped")) == (len(TEXTS), 0, 0)


def test_exits_differ_as_often_as_offline(classifier: LoadedModel, heads: ExitHeads, collector: Any) -> None:
    bench = Bench(classifier, collector, heads)
    whole = bench.ask("all", early_exit=False)
    bench.shadows.clear()
    bench.config = configured(exits=ALWAYS)
    early = bench.ask()
    assert all(done.exited for done in early)
    differ = sum(first.scores[0].label != second.scores[0].label for first, second in zip(early, whole, strict=True))
    assert 0 < differ < len(TEXTS)
    bench.compare()
    assert (bench.count("agree"), bench.count("differ")) == (len(TEXTS) - differ, differ)


def test_the_sampled_share_is_compared(classifier: LoadedModel, collector: Any) -> None:
    bench = Bench(classifier, collector)
    bench.config = configured(rate=0.5)
    bench.ask()
    bench.compare()
    assert bench.count("agree") == sum(is_sampled(f"t{index}", 0.5) for index in range(len(TEXTS)))


def test_level_0_is_not_compared_with_itself(classifier: LoadedModel, collector: Any) -> None:
    bench = Bench(classifier, collector)
    bench.config = configured(level=0)
    bench.ask()
    assert len(bench.shadows) == 0


def test_long_texts_are_computed_layer_by_layer(classifier: LoadedModel, collector: Any) -> None:
    """A piece is at most 8 tokens through both layers, or one layer."""
    bench = Bench(classifier, collector)
    bench.ask()
    assert bench.compare() == sum(1 if len(ids) <= 8 else 2 for ids in TEXTS)


@pytest.mark.parametrize("task", TASKS)
def test_answers_of_task_slices(tasked: LoadedModel, collector: Any, task: str) -> None:
    bench = Bench(tasked, collector, tasks=True)
    bench.ask(task=task)
    bench.compare()
    assert bench.count("agree", TASKS[task][0].value) == len(TEXTS)
    assert bench.slices is not None
    bench.slices.close()


def test_a_token_that_differs_makes_an_answer_differ(tasked: LoadedModel, collector: Any) -> None:
    """In every second answer the last token gets another label than the model gave it."""
    bench = Bench(tasked, collector, tasks=True)
    bench.ask(task="tags")
    bench.shadows.clear()
    for index, (text, answer) in enumerate(bench.answers):
        *others, last = answer.token_labels
        label = last.label if index % 2 else next(label for label in TASKS["tags"][1] if label != last.label)
        bench.shadow.answered(text, replace(answer, token_labels=[*others, LabelScore(label, last.score)]))
    bench.compare()
    agree, differ = (bench.count(result, "TokenClassification") for result in ("agree", "differ"))
    assert (agree, differ) == (len(TEXTS) // 2, len(TEXTS) // 2)
    assert bench.slices is not None
    bench.slices.close()


def test_a_slice_that_is_gone_is_not_loaded_for_a_comparison(tasked: LoadedModel, collector: Any) -> None:
    bench = Bench(tasked, collector, tasks=True)
    bench.ask(task="topic")
    assert bench.slices is not None
    bench.slices.retire()
    bench.compare()
    assert (bench.count("skipped"), bench.count("agree")) == (len(TEXTS), 0)
    bench.slices.close()
