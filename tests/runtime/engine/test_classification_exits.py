"""Early exit in the engine: real trunks and heads, and the same answer in any company."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sixfold_api.classification import ExitRule
from sixfold_api.modes import Mode
from sixfold_api.runtime_config import EarlyExitConfig, RuntimeConfig, SanitizeConfig, ServedModel
from sixfold_api.scalars import Task
from sixfold_runtime.config import default_config
from sixfold_runtime.engine.checkpoint import TensorStore
from sixfold_runtime.engine.classification import ClassificationRunner
from sixfold_runtime.engine.errors import RequestError
from sixfold_runtime.engine.exit_heads import ExitHeads, load_exit_heads, write_exit_heads
from sixfold_runtime.engine.exit_plan import ExitPlanner
from sixfold_runtime.engine.fingerprint import trunk_fingerprint
from sixfold_runtime.engine.loader import LoadedModel, load
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.engine.protocol import Classify, Done, FinishReason
from sixfold_runtime.engine.scheduler import Limits
from sixfold_runtime.modes.early_exit import Calibration
from sixfold_runtime.settings import RuntimeSettings

LABELS = ["bad", "so-so", "good"]
LAYERS, WIDTH, DEPTHS = 5, 32, (1, 2, 4)
TEMPERATURES = (1.5, 2.0, 0.7)
THRESHOLD, RELAXATION = 0.75, 0.02
FIXED = EarlyExitConfig(rule=ExitRule.FIXED, threshold=THRESHOLD, length_relaxation=RELAXATION)


def tokens(length: int, seed: int = 0) -> list[int]:
    return torch.randint(2, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def random_heads() -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    dice = torch.Generator().manual_seed(5)

    def head() -> tuple[torch.Tensor, torch.Tensor]:
        weight = torch.randn(len(LABELS), 2 * WIDTH, generator=dice) * 0.16
        return weight, torch.randn(len(LABELS), generator=dice) * 0.1

    return {depth: head() for depth in DEPTHS}


def save_exits(folder: Path) -> None:
    dice = np.random.default_rng(6)
    heads = random_heads()
    calibration = Calibration(
        depths=DEPTHS,
        layers=LAYERS,
        confidences=dice.uniform(1 / 3, 1, (200, len(DEPTHS))),
        agrees=np.ones((200, len(DEPTHS)), bool),
        lengths=dice.integers(3, 60, 200),
        max_disagreement=0.03,
        length_relaxation=0.01,
    )
    exits = ExitHeads(
        labels=tuple(LABELS),
        weights={depth: weight for depth, (weight, _) in heads.items()},
        biases={depth: bias for depth, (_, bias) in heads.items()},
        temperatures=dict(zip(DEPTHS, TEMPERATURES, strict=True)),
        calibration=calibration,
    )
    write_exit_heads(folder, exits, trunk_fingerprint(TensorStore(folder)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, classifier_folder: Path) -> Path:
    import transformers

    folder = tmp_path_factory.mktemp("deep")
    torch.manual_seed(8)
    config = transformers.BertConfig(
        vocab_size=320,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.3,
        id2label=dict(enumerate(LABELS)),
        label2id={label: index for index, label in enumerate(LABELS)},
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    shutil.copy(classifier_folder / "tokenizer.json", folder)
    save_exits(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load(ServedModel(name="intent", task=Task.CLASSIFICATION, path=str(folder)), torch.device("cpu"))


class Policy:
    """The configuration in use, with exits that a test turns on and off."""

    def __init__(self) -> None:
        self.value = default_config(3)
        self.set(3, FIXED)

    def __call__(self) -> RuntimeConfig:
        return self.value

    def set(self, level: int, early_exit: EarlyExitConfig | None) -> None:
        stable = default_config(level).stable.model_copy(update={"early_exit": early_exit})
        self.value = self.value.model_copy(update={"stable": stable})


@pytest.fixture
def policy() -> Policy:
    return Policy()


NewRunner = Callable[..., ClassificationRunner]


@pytest.fixture
def metrics() -> EngineMetrics:
    return EngineMetrics(RuntimeSettings(namespace="ml", policy="bot"))


@pytest.fixture
def new_runner(model: LoadedModel, folder: Path, policy: Policy, metrics: EngineMetrics) -> NewRunner:
    def make(model: LoadedModel = model, policy: Policy = policy, **limits: Any) -> ClassificationRunner:
        assert model.trunk is not None
        heads = load_exit_heads(folder, model.trunk, trunk_fingerprint(TensorStore(folder)), model.labels)
        assert heads is not None
        runner = ClassificationRunner(
            model,
            Limits(**{"max_running": 32, "prefill_tokens": 1000} | limits),
            policy,
            metrics.of("intent"),
            exits=heads,
            clock=iter(range(10**9)).__next__,
        )
        runner.warm_up(1 << 30)
        return runner

    return make


def submit(runner: ClassificationRunner, sink: Any, **texts: list[int]) -> None:
    for name, token_ids in texts.items():
        runner.submit((sink, name), Classify(name, "intent", token_ids))


def finish(runner: ClassificationRunner, sink: Any) -> None:
    while runner.can_step:
        sink.take(runner.step())


@pytest.fixture(scope="module")
def expected(folder: Path) -> Callable[[list[int]], tuple[int, dict[str, float], float]]:
    """Layers, scores, and how close a confidence came to its threshold, computed from transformers' hidden states."""
    import transformers

    module = transformers.BertForSequenceClassification.from_pretrained(folder).eval()
    heads = random_heads()

    @torch.inference_mode()
    def compute(token_ids: list[int]) -> tuple[int, dict[str, float], float]:
        output = module(torch.tensor([token_ids]), output_hidden_states=True)
        margin = 1.0
        for depth, temperature in zip(DEPTHS, TEMPERATURES, strict=True):
            hidden = output.hidden_states[depth][0]
            weight, bias = heads[depth]
            scores = ((weight @ torch.cat([hidden[0], hidden.mean(0)]) + bias) / temperature).softmax(-1)
            over = scores.max().item() - (THRESHOLD - RELAXATION * math.log(len(token_ids)))
            margin = min(margin, abs(over))
            if over >= 0:
                return depth, dict(zip(LABELS, scores.tolist(), strict=True)), margin
        return LAYERS, dict(zip(LABELS, output.logits[0].softmax(-1).tolist(), strict=True)), margin

    return compute


def check(done: Done, layers: int, scores: dict[str, float]) -> None:
    assert done.failure is None and done.finish_reason == FinishReason.STOP
    assert (done.layers, done.exited) == (layers, layers < LAYERS)
    assert {entry.label: entry.score for entry in done.scores} == pytest.approx(scores, abs=1e-5)
    assert done.scores[0].label == max(scores, key=scores.__getitem__)


MIXED = {f"t{seed}": tokens(3 + 7 * seed % 60, seed) for seed in range(12)}


def test_the_texts_of_these_tests_leave_at_every_exit_and_at_the_end(expected: Any) -> None:
    assert {expected(token_ids)[0] for token_ids in MIXED.values()} == {*DEPTHS, LAYERS}


def test_a_batch_with_mixed_exits_answers_each_text_as_alone(
    new_runner: NewRunner, new_collector: Any, expected: Any
) -> None:
    runner, together = new_runner(), new_collector()
    submit(runner, together, **MIXED)
    finish(runner, together)
    for name, token_ids in MIXED.items():
        alone = new_collector()
        submit(runner, alone, **{name: token_ids})
        finish(runner, alone)
        layers, scores, _ = expected(token_ids)
        check(alone.dones[name], layers, scores)
        check(together.dones[name], layers, scores)


BATCHES = st.lists(st.tuples(st.integers(1, 64), st.integers(0, 10**6)), min_size=1, max_size=12)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(BATCHES, st.integers(1, 8), st.integers(1, 200))
def test_any_batches_answer_each_text_as_alone(
    new_runner: NewRunner, new_collector: Any, expected: Any, batch: list[tuple[int, int]], rows: int, budget: int
) -> None:
    texts = {str(number): tokens(length, seed) for number, (length, seed) in enumerate(batch)}
    wanted = {name: expected(token_ids) for name, token_ids in texts.items()}
    assume(all(margin > 1e-4 for *_, margin in wanted.values()))
    runner, collector = new_runner(max_running=rows, prefill_tokens=budget), new_collector()
    submit(runner, collector, **texts)
    finish(runner, collector)
    for name, (layers, scores, _) in wanted.items():
        check(collector.dones[name], layers, scores)


class Recorder:
    """A trunk that notes what is computed with it."""

    def __init__(self, trunk: Any) -> None:
        self._trunk = trunk
        self.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trunk, name)

    def clear(self) -> None:
        self.computed: list[tuple[int, tuple[int, ...]]] = []
        self.asked: list[tuple[int, ...]] = []

    def layer(self, index: int, rows: Any, slices: Any = None) -> Any:
        self.computed.append((index, tuple(rows.lengths)))
        return self._trunk.layer(index, rows, slices)

    def features(self, rows: Any) -> torch.Tensor:
        self.asked.append(tuple(rows.lengths))
        features: torch.Tensor = self._trunk.features(rows)
        return features


@pytest.fixture
def recorder(model: LoadedModel) -> Recorder:
    return Recorder(model.trunk)


@pytest.fixture
def recorded(model: LoadedModel, recorder: Recorder) -> LoadedModel:
    return dataclasses.replace(model, trunk=recorder)


def test_nothing_is_computed_twice_nor_for_texts_that_left(
    new_runner: NewRunner, recorded: LoadedModel, recorder: Recorder, collector: Any, expected: Any
) -> None:
    runner = new_runner(recorded)
    recorder.clear()
    submit(runner, collector, **MIXED)
    finish(runner, collector)
    layers = {name: expected(token_ids)[0] for name, token_ids in MIXED.items()}
    for index in range(LAYERS):
        lengths = tuple(len(token_ids) for name, token_ids in MIXED.items() if layers[name] > index)
        assert [found for depth, found in recorder.computed if depth == index] == [lengths]
    assert recorder.asked == [
        tuple(len(token_ids) for name, token_ids in MIXED.items() if layers[name] >= depth) for depth in DEPTHS
    ]


def test_without_the_mode_nobody_leaves_and_level_2_turns_it_off_for_new_texts(
    new_runner: NewRunner, policy: Policy, collector: Any, expected: Any
) -> None:
    runner = new_runner(max_running=len(MIXED) // 4)  # a batch takes four times as many
    submit(runner, collector, **MIXED)
    submit(runner, collector, late=MIXED["t0"])
    collector.take(runner.step())
    policy.set(2, None)
    assert not runner.adapt(), "a mode that the level turned off is no news of the runner's"
    while len(collector.dones) < len(MIXED):
        collector.take(runner.step())
    finish(runner, collector)
    for name, token_ids in MIXED.items():
        assert (collector.dones[name].layers, collector.dones[name].level) == (expected(token_ids)[0], 3)
    late = collector.dones["late"]
    assert (late.layers, late.exited, late.level) == (LAYERS, False, 2)


def test_a_request_may_ask_for_all_layers(new_runner: NewRunner, collector: Any, expected: Any) -> None:
    name = next(name for name, token_ids in MIXED.items() if expected(token_ids)[0] < LAYERS)
    runner = new_runner()
    runner.submit((collector, "full"), Classify("full", "intent", MIXED[name], early_exit=False))
    submit(runner, collector, early=MIXED[name])
    finish(runner, collector)
    assert collector.dones["early"].exited
    assert (collector.dones["full"].layers, collector.dones["full"].exited) == (LAYERS, False)


def test_answers_of_exits_do_not_wait_for_the_others(new_runner: NewRunner, collector: Any, expected: Any) -> None:
    runner = new_runner()
    submit(runner, collector, **MIXED)
    collector.take(runner.step())
    assert set(collector.dones) == {name for name, ids in MIXED.items() if expected(ids)[0] == DEPTHS[0]}
    assert runner.running == len(MIXED) - len(collector.dones)


@pytest.mark.parametrize("step_tokens", [10, 100, 250])
def test_a_step_computes_a_part_of_a_large_batch(
    step_tokens: int,
    new_runner: NewRunner,
    recorded: LoadedModel,
    recorder: Recorder,
    policy: Policy,
    collector: Any,
    expected: Any,
) -> None:
    runner = new_runner(recorded, prefill_tokens=step_tokens)
    submit(runner, collector, **MIXED)
    while runner.can_step:
        recorder.clear()
        collector.take(runner.step())
        computed = sum(sum(lengths) for _, lengths in recorder.computed)
        assert computed <= step_tokens * LAYERS or len(recorder.computed) == 1
    for name, token_ids in MIXED.items():
        layers, scores, _ = expected(token_ids)
        check(collector.dones[name], layers, scores)


def test_cancelled_texts_are_computed_no_further(
    new_runner: NewRunner,
    recorded: LoadedModel,
    recorder: Recorder,
    metrics: EngineMetrics,
    collector: Any,
    expected: Any,
) -> None:
    through = [name for name, token_ids in MIXED.items() if expected(token_ids)[0] == LAYERS]
    runner = new_runner(recorded)
    submit(runner, collector, queued=[5, 6], **MIXED)
    runner.cancel((collector, "queued"))
    collector.take(runner.step())
    runner.cancel((collector, through[0]))
    runner.cancel((collector, through[0]))
    runner.cancel((collector, "never"))
    recorder.clear()
    finish(runner, collector)
    assert set(collector.dones) == set(MIXED) - {through[0]}
    assert len(MIXED[through[0]]) not in {length for _, lengths in recorder.computed for length in lengths}
    assert runner.running == 0
    labels = {"namespace": "ml", "policy": "bot", "variant": "intent", "level": "3", "outcome": "cancelled"}
    assert metrics.registry.get_sample_value("sixfold_engine_requests_total", labels) == 2


def test_a_batch_that_is_cancelled_whole_ends(new_runner: NewRunner, collector: Any, expected: Any) -> None:
    runner = new_runner()
    name = next(name for name, token_ids in MIXED.items() if expected(token_ids)[0] == LAYERS)
    submit(runner, collector, **{name: MIXED[name]})
    collector.take(runner.step())
    runner.cancel((collector, name))
    finish(runner, collector)
    assert not collector.dones and not runner.can_step
    submit(runner, collector, next=[5])
    finish(runner, collector)
    assert collector.dones["next"].scores


@pytest.fixture
def poisoned(folder: Path, tmp_path: Path) -> Iterator[LoadedModel]:
    """Token 300 has a NaN embedding."""
    import transformers

    shutil.copytree(folder, tmp_path / "poisoned")
    module = transformers.BertForSequenceClassification.from_pretrained(folder)
    module.bert.embeddings.word_embeddings.weight.data[300] = math.nan
    module.save_pretrained(tmp_path / "poisoned")
    served = ServedModel(name="intent", task=Task.CLASSIFICATION, path=str(tmp_path / "poisoned"))
    yield load(served, torch.device("cpu"))


def test_nan_fails_its_text_only_and_never_exits(
    new_runner: NewRunner, poisoned: LoadedModel, metrics: EngineMetrics, collector: Any, expected: Any
) -> None:
    runner = new_runner(poisoned)
    texts = {name: [id_ if id_ != 300 else 301 for id_ in token_ids] for name, token_ids in MIXED.items()}
    submit(runner, collector, nan=[5, 300, 6], **texts)
    finish(runner, collector)
    failure = collector.dones["nan"].failure
    assert failure is not None and (failure.status, failure.code) == (500, "non_finite_logits")
    assert not collector.dones["nan"].exited
    for name, token_ids in texts.items():
        layers, scores, _ = expected(token_ids)
        check(collector.dones[name], layers, scores)
    labels = {"namespace": "ml", "policy": "bot", "variant": "intent"}
    assert metrics.registry.get_sample_value("sixfold_non_finite_logits_total", labels) == 1


def test_a_layer_that_raises_fails_those_that_are_left(
    new_runner: NewRunner, recorded: LoadedModel, recorder: Recorder, collector: Any, expected: Any
) -> None:
    runner = new_runner(recorded)
    submit(runner, collector, **MIXED)
    collector.take(runner.step())
    left = set(MIXED) - set(collector.dones)

    def explode(*_: Any) -> Any:
        raise RuntimeError("broken")

    works, recorder.layer = recorder.layer, explode  # type: ignore[method-assign]
    finish(runner, collector)
    recorder.layer = works  # type: ignore[method-assign]
    for name in MIXED:
        failure = collector.dones[name].failure
        assert (failure is not None and failure.code == "engine_error") == (name in left)
    submit(runner, collector, later=[5])
    finish(runner, collector)
    assert collector.dones["later"].scores


@pytest.mark.parametrize(("top_k", "count"), [(None, 3), (1, 1), (2, 2), (3, 3), (50, 3)])
def test_top_k_cuts_the_labels_of_both_kinds(
    top_k: int | None, count: int, new_runner: NewRunner, collector: Any
) -> None:
    runner = new_runner()
    for name, token_ids in MIXED.items():
        runner.submit((collector, name), Classify(name, "intent", token_ids, top_k=top_k))
    finish(runner, collector)
    assert {len(done.scores) for done in collector.dones.values()} == {count}
    assert {done.exited for done in collector.dones.values()} == {True, False}


@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        ({"top_k": 0}, 400, "invalid_top_k"),
        ({"top_k": -1}, 400, "invalid_top_k"),
        ({"task": "ner"}, 400, "tasks_unsupported"),
        ({"token_ids": [5] * 65}, 400, "context_length_exceeded"),
        ({"token_ids": [320]}, 400, "invalid_token_ids"),
        ({"token_ids": []}, 400, "empty_prompt"),
    ],
)
def test_bad_requests_are_refused(
    changes: dict[str, Any], status: int, code: str, new_runner: NewRunner, collector: Any
) -> None:
    runner = new_runner()
    request = {"id": "bad", "model": "intent", "token_ids": [5, 6], **changes}
    with pytest.raises(RequestError) as caught:
        runner.submit((collector, "bad"), Classify(**request))
    assert (caught.value.status, caught.value.code) == (status, code)
    assert not runner.can_step


def test_series_tell_depths_confidences_seconds_and_drift(
    new_runner: NewRunner, metrics: EngineMetrics, policy: Policy, collector: Any, expected: Any
) -> None:
    runner = new_runner()

    def value(name: str, **labels: str) -> float:
        where = {"namespace": "ml", "policy": "bot", "variant": "intent", **labels}
        return metrics.registry.get_sample_value(name, where) or 0.0

    submit(runner, collector, **MIXED)
    finish(runner, collector)
    layers = [expected(token_ids)[0] for token_ids in MIXED.values()]
    for depth in (*DEPTHS, LAYERS):
        assert value("sixfold_exit_total", level="3", depth=str(depth)) == layers.count(depth)
        asked = sum(layer >= depth for layer in layers)
        assert value("sixfold_exit_confidence_count", depth=str(depth)) == asked
    assert value("sixfold_exit_request_seconds_count", level="3", exited="true") == sum(n < LAYERS for n in layers)
    assert value("sixfold_exit_request_seconds_count", level="3", exited="false") == layers.count(LAYERS)

    assert not value("sixfold_exit_length_drift"), "too few texts for a figure"
    for turn in range(250):
        runner.submit((collector, f"s{turn}"), Classify(f"s{turn}", "intent", [5, 6]))
        finish(runner, collector)
    assert value("sixfold_exit_length_drift") > 0.25, "two tokens each, calibrated on 3 to 60"
    assert value("sixfold_exit_rate_drift") != 0
    policy.set(2, None)
    runner.adapt()
    assert not value("sixfold_exit_length_drift"), "nobody may exit"


def test_a_model_without_exit_heads_says_so_and_answers(
    model: LoadedModel, policy: Policy, metrics: EngineMetrics, collector: Any
) -> None:
    runner = ClassificationRunner(model, Limits(), policy, metrics.of("intent"))
    assert "has no exit heads" in runner.unsupported[Mode.EARLY_EXIT]
    submit(runner, collector, **MIXED)
    finish(runner, collector)
    assert {done.layers for done in collector.dones.values()} == {LAYERS}
    policy.set(2, None)
    assert runner.adapt() and runner.unsupported == {}
    damaged = ClassificationRunner(model, Limits(), Policy(), metrics.of("intent"), why_no_exits="it is damaged")
    assert damaged.unsupported == {Mode.EARLY_EXIT: "it is damaged"}


def test_thresholds_that_no_text_reaches_are_told(new_runner: NewRunner, policy: Policy) -> None:
    runner = new_runner()
    assert runner.unsupported == {}
    policy.set(3, EarlyExitConfig(rule=ExitRule.CALIBRATED, max_disagreement=0.0))
    runner.adapt()
    assert "no calibration text would leave early" in runner.unsupported[Mode.EARLY_EXIT]


def test_thresholds_are_chosen_again_only_when_the_rule_changes(folder: Path, model: LoadedModel) -> None:
    assert model.trunk is not None
    heads = load_exit_heads(folder, model.trunk, trunk_fingerprint(TensorStore(folder)), model.labels)
    planner = ExitPlanner(heads, "")
    assert planner.plan is None
    planner.follow(FIXED)
    first = planner.plan
    assert first is not None and first.exits.thresholds == dict.fromkeys(DEPTHS, THRESHOLD)
    planner.follow(None)
    assert planner.plan is None
    planner.follow(FIXED.model_copy())
    assert planner.plan is first, "turned off and on again"
    planner.follow(FIXED.model_copy(update={"sanitize": SanitizeConfig(keep="a-z")}))
    assert planner.plan is first, "what the gateway does changes no threshold"
    planner.follow(FIXED.model_copy(update={"threshold": 0.5}))
    assert planner.plan is not first and planner.plan is not None
    assert planner.plan.exits.thresholds == dict.fromkeys(DEPTHS, 0.5)
