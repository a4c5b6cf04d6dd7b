"""Task slices in classification: texts of different tasks share a batch, and one that waits holds up nobody."""

from __future__ import annotations

import dataclasses
import math
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sixfold_api.runtime_config import RuntimeConfig, ServedModel, SubgraphsConfig, TaskConfig
from sixfold_api.scalars import Task
from sixfold_runtime.config import default_config
from sixfold_runtime.engine.checkpoint import TensorStore
from sixfold_runtime.engine.classification import ClassificationRunner
from sixfold_runtime.engine.errors import RequestError
from sixfold_runtime.engine.fingerprint import trunk_fingerprint
from sixfold_runtime.engine.loader import LoadedModel, load
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.engine.protocol import Classify, Done
from sixfold_runtime.engine.scheduler import Limits
from sixfold_runtime.engine.slice_file import slice_info, slice_path, write_slice
from sixfold_runtime.engine.slice_loader import TrunkFolder
from sixfold_runtime.engine.slice_pool import SlicePool
from sixfold_runtime.settings import RuntimeSettings

LAYERS, WIDTH, INNER = 3, 32, 64
LABELS = {
    "topic": (Task.CLASSIFICATION, ["sport", "music", "war", "food"]),
    "tone": (Task.CLASSIFICATION, ["kind", "rude"]),
    "tags": (Task.TOKEN_CLASSIFICATION, ["O", "PER", "LOC"]),
}


def tokens(length: int, seed: int = 0) -> list[int]:
    return torch.randint(2, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def save_slices(folder: Path) -> None:
    """Adapters and a head over features; feed-forward parts and a head; a head for tokens."""
    dice = torch.Generator().manual_seed(9)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=dice) * 0.3

    fingerprint = trunk_fingerprint(TensorStore(folder))
    topic = {"head.weight": random(4, 2 * WIDTH), "head.bias": random(4)}
    for layer in range(LAYERS):
        topic |= {
            f"adapters.{layer}.down.weight": random(8, WIDTH),
            f"adapters.{layer}.down.bias": random(8),
            f"adapters.{layer}.up.weight": random(WIDTH, 8),
            f"adapters.{layer}.up.bias": random(WIDTH),
        }
    layer = "bert.encoder.layer.1"
    tone = {
        f"{layer}.intermediate.dense.weight": random(INNER, WIDTH),
        f"{layer}.intermediate.dense.bias": random(INNER),
        f"{layer}.output.dense.weight": random(WIDTH, INNER),
        f"{layer}.output.dense.bias": random(WIDTH),
        "head.weight": random(2, 2 * WIDTH),
        "head.bias": random(2),
    }
    tags = {"head.weight": random(3, WIDTH), "head.bias": random(3)}
    for name, tensors in (("topic", topic), ("tone", tone), ("tags", tags)):
        task, labels = LABELS[name]
        write_slice(slice_path(folder, name), tensors, task, labels, fingerprint)
    write_slice(slice_path(folder, "foreign"), tags, Task.TOKEN_CLASSIFICATION, LABELS["tags"][1], "sha256:other")
    slice_path(folder, "torn").write_bytes(slice_path(folder, "tone").read_bytes()[:2000])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, classifier_folder: Path) -> Path:
    import transformers

    folder = tmp_path_factory.mktemp("shared")
    torch.manual_seed(8)
    config = transformers.BertConfig(
        vocab_size=320,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.3,
        id2label={0: "bad", 1: "good"},
        label2id={"bad": 0, "good": 1},
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    shutil.copy(classifier_folder / "tokenizer.json", folder)
    save_slices(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load(ServedModel(name="intent", task=Task.CLASSIFICATION, path=str(folder)), torch.device("cpu"))


class Bench:
    """A runner over a pool, and the engine's part of bringing slices in."""

    def __init__(self, model: LoadedModel, folder: Path, sink: Any) -> None:
        self.sink = sink
        self.woken = threading.Event()
        self.configure(*LABELS)
        self._model, self._folder = model, folder

    def configure(self, *tasks: str, pinned: bool = False, cache_bytes: int | None = None) -> None:
        section = SubgraphsConfig(
            tasks=tuple(TaskConfig(name=name, pinned=pinned) for name in tasks), on_demand=True, cache_bytes=cache_bytes
        )
        stable = default_config(3).stable.model_copy(update={"classification_subgraphs": section})
        self.config: RuntimeConfig = default_config(3).model_copy(update={"stable": stable})

    def start(self, model: LoadedModel | None = None, **limits: Any) -> None:
        model = model or self._model
        assert model.trunk is not None
        metrics = EngineMetrics(RuntimeSettings()).of("intent")
        self.pool = SlicePool(
            TrunkFolder(self._folder, Task.CLASSIFICATION),
            model.trunk,
            lambda: self.config.stable.classification_subgraphs,
            metrics.slices,
            wake=self.woken.set,
        )
        self.runner = ClassificationRunner(
            model,
            Limits(**{"max_running": 32, "prefill_tokens": 1000} | limits),
            lambda: self.config,
            metrics,
            slices=self.pool,
        )

    def submit(self, task: str = "", **texts: list[int]) -> None:
        for name, token_ids in texts.items():
            self.runner.submit((self.sink, name), Classify(name, "intent", token_ids, task=task, tenant="t"))

    def step_all(self) -> None:
        while self.runner.can_step:
            self.sink.take(self.runner.step())

    def wait_for_slice(self) -> None:
        assert self.woken.wait(30), "no slice came"
        self.woken.clear()
        self.runner.adapt()

    def finish(self) -> None:
        self.step_all()
        while self.runner.waiting:
            self.wait_for_slice()
            self.step_all()


@pytest.fixture
def bench(model: LoadedModel, folder: Path, collector: Any) -> Iterator[Bench]:
    bench = Bench(model, folder, collector)
    yield bench
    bench.runner.close()
    bench.pool.close()


TEXTS = [tokens(3 + 11 * seed % 60, seed) for seed in range(12)]
TASKS = ["", "topic", "tone", "tags"]


def same(found: Done, wanted: Done) -> None:
    assert found.failure is None and wanted.failure is None
    for entries, expected in ((found.scores, wanted.scores), (found.token_labels, wanted.token_labels)):
        assert [entry.label for entry in entries] == [entry.label for entry in expected]
        assert [entry.score for entry in entries] == pytest.approx([entry.score for entry in expected], abs=1e-5)


def test_tasks_share_a_batch_and_each_text_is_answered_as_alone(bench: Bench, collector: Any) -> None:
    bench.configure(*LABELS, pinned=True)
    bench.start()
    for number, token_ids in enumerate(TEXTS):
        bench.submit(TASKS[number % 4], **{f"alone{number}": token_ids})
        bench.finish()
    for number, token_ids in enumerate(TEXTS):
        bench.submit(TASKS[number % 4], **{f"together{number}": token_ids})
    collector.take(bench.runner.step())
    assert not bench.runner.can_step, "one batch, and no exits"
    for number, token_ids in enumerate(TEXTS):
        done, task = collector.dones[f"together{number}"], TASKS[number % 4]
        same(done, collector.dones[f"alone{number}"])
        assert (done.layers, done.exited) == (LAYERS, False)
        if task == "tags":
            assert len(done.token_labels) == len(token_ids) and not done.scores
        else:
            assert len(done.scores) == len(LABELS[task][1] if task else ["bad", "good"]) and not done.token_labels


def test_the_models_own_answer_is_transformers(bench: Bench, folder: Path, collector: Any) -> None:
    import transformers

    bench.start()
    bench.submit(own=TEXTS[5])
    bench.submit("tone", tone=TEXTS[5])
    bench.finish()
    module = transformers.BertForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        scores = module(torch.tensor([TEXTS[5]])).logits[0].softmax(-1).tolist()
    found = {entry.label: entry.score for entry in collector.dones["own"].scores}
    assert found == pytest.approx({"bad": scores[0], "good": scores[1]}, abs=1e-5)


def test_a_text_that_waits_for_its_slice_holds_up_nobody_and_spins_nothing(bench: Bench, collector: Any) -> None:
    bench.start()
    bench.submit("topic", cold=TEXTS[0])
    bench.submit(own=TEXTS[1])
    bench.step_all()
    assert set(collector.dones) == {"own"}
    assert bench.runner.waiting == 1 and not bench.runner.can_step
    bench.finish()
    assert [entry.label for entry in collector.dones["cold"].scores]
    bench.submit("topic", warm=TEXTS[0])
    bench.step_all()
    same(collector.dones["warm"], collector.dones["cold"])


@pytest.mark.parametrize(("task", "reason"), [("torn", "damaged"), ("foreign", "other weights")])
def test_a_slice_that_cannot_be_used_is_refused_with_the_reason(
    task: str, reason: str, bench: Bench, collector: Any
) -> None:
    bench.configure(*LABELS, task)
    bench.start()
    refused: dict[str, RequestError] = {}
    for name in ("first", "second"):
        try:
            bench.submit(task, **{name: TEXTS[0]})
        except RequestError as error:
            refused[name] = error
        bench.submit("tone", **{f"{name}-tone": TEXTS[1]})
        bench.finish()
    for name in ("first", "second"):
        failure = refused.get(name) or collector.dones[name].failure
        assert failure is not None and (failure.status, failure.code) == (503, "slice_unusable")
        assert reason in failure.message
        assert collector.dones[f"{name}-tone"].scores


def test_an_unknown_task_is_refused_with_the_known_ones(bench: Bench) -> None:
    bench.start()
    with pytest.raises(RequestError) as caught:
        bench.submit("ner", bad=TEXTS[0])
    assert (caught.value.status, caught.value.code) == (404, "task_not_found")
    assert all(name in caught.value.message for name in LABELS)


def test_a_task_that_is_taken_away_while_a_text_waits_for_it(bench: Bench, collector: Any) -> None:
    bench.start()
    bench.submit("topic", waits=TEXTS[0])
    bench.step_all()
    bench.configure("tone")
    bench.runner.adapt()
    bench.finish()
    failure = collector.dones["waits"].failure
    assert failure is None or (failure.status, failure.code) == (404, "task_not_found")


class Flaky:
    """A trunk that raises when it is told to."""

    def __init__(self, trunk: Any) -> None:
        self._trunk = trunk
        self.is_broken = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trunk, name)

    def layer(self, *args: Any) -> Any:
        if self.is_broken:
            raise RuntimeError("broken")
        return self._trunk.layer(*args)


def answered(bench: Bench, trunk: Flaky) -> None:
    bench.step_all()


def cancelled(bench: Bench, trunk: Flaky) -> None:
    bench.runner.cancel((bench.sink, "held"))
    bench.runner.cancel((bench.sink, "held"))


def failed(bench: Bench, trunk: Flaky) -> None:
    trunk.is_broken = True
    bench.step_all()
    trunk.is_broken = False


@pytest.mark.parametrize("end", [answered, cancelled, failed])
def test_a_slice_is_given_back_once_however_a_text_ends(
    end: Callable[[Bench, Flaky], None], bench: Bench, model: LoadedModel, folder: Path, collector: Any
) -> None:
    """The pool has room for one slice: the next task gets in only if the last one was given back, and giving back
    too often is an error of the pool's."""
    largest = max(slice_path(folder, name).stat().st_size for name in LABELS)
    bench.configure(*LABELS, cache_bytes=largest)
    trunk = Flaky(model.trunk)
    bench.start(dataclasses.replace(model, trunk=trunk))
    for turn, task in enumerate(("topic", "tone", "topic")):
        bench.submit(task, **{f"first{turn}": TEXTS[0]})
        bench.finish()
        assert collector.dones[f"first{turn}"].failure is None
        bench.submit(task, held=TEXTS[1])
        end(bench, trunk)
        collector.dones.pop("held", None)
    assert bench.runner.waiting == 0


def test_closing_gives_back_what_queued_texts_hold(bench: Bench, folder: Path) -> None:
    bench.configure(*LABELS, pinned=True)
    bench.start()
    for number, token_ids in enumerate(TEXTS):
        bench.submit(TASKS[number % 4], **{str(number): token_ids})
    bench.runner.close()
    bench.configure("tone", pinned=True)
    bench.runner.adapt()
    bench.wait_for_slice()
    assert bench.pool.resident_bytes == slice_info(slice_path(folder, "tone")).size_bytes


def test_a_nan_slice_text_fails_alone(bench: Bench, folder: Path, tmp_path: Path, collector: Any) -> None:
    import transformers

    shutil.copytree(folder, tmp_path / "poisoned")
    module = transformers.BertForSequenceClassification.from_pretrained(folder)
    module.bert.embeddings.word_embeddings.weight.data[300] = math.nan
    module.save_pretrained(tmp_path / "poisoned")
    served = ServedModel(name="intent", task=Task.CLASSIFICATION, path=str(tmp_path / "poisoned"))
    bench.configure(*LABELS, pinned=True)
    bench.start(load(served, torch.device("cpu")))
    for task in TASKS:
        bench.submit(task, **{f"nan-{task}": [5, 300, 6], f"good-{task}": [5, 299, 6]})
    bench.finish()
    for task in TASKS:
        failure = collector.dones[f"nan-{task}"].failure
        assert failure is not None and failure.code == "non_finite_logits"
        good = collector.dones[f"good-{task}"]
        assert good.failure is None and (good.scores or good.token_labels)


def test_a_bare_trunk_asks_for_a_task(bench: Bench, folder: Path, tmp_path: Path, collector: Any) -> None:
    import transformers

    transformers.BertForSequenceClassification.from_pretrained(folder).bert.save_pretrained(tmp_path)
    shutil.copy(folder / "tokenizer.json", tmp_path)
    bare = load(ServedModel(name="intent", task=Task.CLASSIFICATION, path=str(tmp_path)), torch.device("cpu"))
    bench.configure("topic", "tags", pinned=True)
    bench.start(bare)
    bench.runner.warm_up(1 << 30)
    with pytest.raises(RequestError) as caught:
        bench.submit(own=TEXTS[0])
    assert (caught.value.status, caught.value.code) == (400, "task_required")
    assert "topic, tags" in caught.value.message
    bench.submit("topic", good=TEXTS[0])
    bench.finish()
    assert len(collector.dones["good"].scores) == 4
