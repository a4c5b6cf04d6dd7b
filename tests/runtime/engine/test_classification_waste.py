"""What classifying costs: known texts give exact counts, and what early exit would save is what it then does save."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from sixfold_api.runtime_config import CANARY, CanaryConfig, EarlyExitConfig, RuntimeConfig, ServedModel
from sixfold_api.scalars import Task
from sixfold_runtime.config import default_config
from sixfold_runtime.engine.checkpoint import TensorStore
from sixfold_runtime.engine.classification import ClassificationRunner
from sixfold_runtime.engine.exit_heads import ExitHeads, load_exit_heads, write_exit_heads
from sixfold_runtime.engine.fingerprint import trunk_fingerprint
from sixfold_runtime.engine.loader import LoadedModel, load
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.engine.model_flops import model_flops
from sixfold_runtime.engine.protocol import Classify
from sixfold_runtime.engine.scheduler import Limits
from sixfold_runtime.modes.early_exit import Calibration
from sixfold_runtime.settings import RuntimeSettings

LABELS = ["bad", "so-so", "good"]
LAYERS, WIDTH, DEPTHS = 5, 32, (1, 2, 4)
USEFUL: dict[str, str] = {"outcome": "useful", "cause": ""}


def tokens(length: int, seed: int = 0) -> list[int]:
    return torch.randint(2, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


TEXTS = {f"t{seed}": tokens(3 + 7 * seed % 60, seed) for seed in range(12)}


def save_classifier(folder: Path, architecture: str, **sizes: int) -> None:
    import transformers

    torch.manual_seed(8)
    config = getattr(transformers, f"{architecture}Config")(
        vocab_size=320,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.3,
        id2label=dict(enumerate(LABELS)),
        label2id={label: index for index, label in enumerate(LABELS)},
        **sizes,
    )
    getattr(transformers, f"{architecture}ForSequenceClassification")(config).save_pretrained(folder)


def save_exits(folder: Path) -> None:
    """Of a calibration by which texts leave at all three."""
    dice, numbers = torch.Generator().manual_seed(5), np.random.default_rng(6)
    confidences = numbers.uniform(0.34, 1, (400, len(DEPTHS)))
    calibration = Calibration(
        depths=DEPTHS,
        layers=LAYERS,
        confidences=confidences,
        agrees=confidences > 0.7,
        lengths=numbers.integers(3, 60, 400),
        max_disagreement=0.03,
        length_relaxation=0.0,
    )
    weights = {depth: torch.randn(len(LABELS), 2 * WIDTH, generator=dice) * 0.16 for depth in DEPTHS}
    biases = {depth: torch.zeros(len(LABELS)) for depth in DEPTHS}
    heads = ExitHeads(tuple(LABELS), weights, biases, dict.fromkeys(DEPTHS, 1.0), calibration)
    write_exit_heads(folder, heads, trunk_fingerprint(TensorStore(folder)))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory, classifier_folder: Path) -> Callable[..., LoadedModel]:
    def make(architecture: str, **sizes: int) -> LoadedModel:
        folder = tmp_path_factory.mktemp(architecture)
        save_classifier(folder, architecture, **sizes)
        shutil.copy(classifier_folder / "tokenizer.json", folder)
        if architecture == "Bert":
            save_exits(folder)
        served = ServedModel(name="intent", task=Task.CLASSIFICATION, path=str(folder))
        return load(served, torch.device("cpu"))

    return make


@pytest.fixture(scope="module")
def model(loaded: Callable[..., LoadedModel]) -> LoadedModel:
    return loaded("Bert")


@pytest.fixture(scope="module")
def electra(loaded: Callable[..., LoadedModel]) -> LoadedModel:
    """transformers computes it, padded."""
    model = loaded("Electra", embedding_size=WIDTH)
    assert model.trunk is None
    return model


@pytest.fixture(scope="module")
def exits(model: LoadedModel) -> ExitHeads:
    assert model.trunk is not None
    folder = Path(model.served.path)
    heads = load_exit_heads(folder, model.trunk, trunk_fingerprint(TensorStore(folder)), model.labels)
    assert heads is not None
    return heads


class Clock:
    """Stands still, unless a test says how much later it is at every look."""

    def __init__(self) -> None:
        self.seconds, self.tick = 0.0, 0.0

    def __call__(self) -> float:
        self.seconds += self.tick
        return self.seconds


class Bench:
    """A runner, and what it counted."""

    def __init__(self, model: LoadedModel, exits: ExitHeads | None, **limits: Any) -> None:
        self.metrics, self.clock = EngineMetrics(RuntimeSettings(namespace="ml", policy="bot")), Clock()
        self.config = default_config(3)
        self.set(3, EarlyExitConfig())
        self.runner = ClassificationRunner(
            model,
            Limits(**{"max_running": 32, "prefill_tokens": 1000} | limits),
            lambda: self.config,
            self.metrics.of("intent"),
            exits=exits,
            clock=self.clock,
        )

    def set(self, level: int, early_exit: EarlyExitConfig | None) -> None:
        stable = default_config(level).stable.model_copy(update={"early_exit": early_exit})
        self.config = RuntimeConfig(sequence=1, stable=stable)

    def classify(self, sink: Any, texts: dict[str, list[int]] = TEXTS, **request: Any) -> None:
        for name, token_ids in texts.items():
            self.runner.submit((sink, name), Classify(name, "intent", token_ids, **request))
        while self.runner.can_step:
            sink.take(self.runner.step())

    def flops(self, **labels: str) -> float:
        return sum(
            sample.value
            for metric in self.metrics.registry.collect()
            for sample in metric.samples
            if sample.name == "sixfold_flops_total" and labels.items() <= sample.labels.items()
        )


@pytest.fixture
def bench(model: LoadedModel, exits: ExitHeads) -> Iterator[Bench]:
    bench = Bench(model, exits)
    yield bench
    bench.runner.close()


def whole(model: LoadedModel, texts: dict[str, list[int]] = TEXTS) -> int:
    """All layers and the head, of every text alone."""
    flops = model_flops(model)
    return sum(flops.text(len(ids)) + flops.forward(0, 0, 1) for ids in texts.values())


def test_with_early_exit_the_layers_that_ran_are_useful(bench: Bench, model: LoadedModel, collector: Any) -> None:
    bench.classify(collector)
    flops = model_flops(model)
    layers = {name: done.layers for name, done in collector.dones.items()}
    assert set(layers.values()) == {*DEPTHS, LAYERS}, "texts leave everywhere"
    expected = sum(
        flops.text(len(TEXTS[name]), depth) + flops.forward(0, 0, depth == LAYERS) for name, depth in layers.items()
    )
    assert bench.flops(variant="intent", level="3", arm="stable", estimated="false", **USEFUL) == expected
    assert bench.flops() == expected


@pytest.mark.parametrize("step_tokens", [20, 1000])
def test_without_it_what_it_would_save_is_what_it_does_save(
    model: LoadedModel, exits: ExitHeads, new_collector: Any, step_tokens: int
) -> None:
    bench = Bench(model, exits, prefill_tokens=step_tokens)
    on, off = new_collector(), new_collector()
    bench.classify(on)
    saved = sum(model_flops(model).text(len(TEXTS[name]), LAYERS - done.layers) for name, done in on.dones.items())
    bench.set(2, None)
    bench.classify(off)
    assert all(done.layers == LAYERS and not done.exited for done in off.dones.values())
    wasted = {"level": "2", "outcome": "wasted"}
    assert bench.flops(**wasted, cause="unneeded_layers", estimated="true") == saved > 0
    assert bench.flops(**wasted) == saved
    assert bench.flops(level="2") == whole(model)


def test_asking_for_all_layers_is_no_waste(bench: Bench, model: LoadedModel, collector: Any) -> None:
    bench.set(2, None)
    bench.classify(collector, early_exit=False)
    assert bench.flops(**USEFUL) == bench.flops() == whole(model)


def test_batches_that_are_not_looked_at_count_as_those_that_were(
    bench: Bench, model: LoadedModel, new_collector: Any
) -> None:
    on = new_collector()
    bench.classify(on)
    saved = sum(len(TEXTS[name]) * (LAYERS - done.layers) for name, done in on.dones.items())
    share = saved / (LAYERS * sum(map(len, TEXTS.values())))
    bench.set(2, None)
    bench.clock.tick = 1.0  # looking takes about as long as computing: one batch uses up its share of the time
    bench.classify(new_collector())
    flops, unneeded = model_flops(model), {"cause": "unneeded_layers"}
    for name, token_ids in TEXTS.items():
        before, total = bench.flops(**unneeded), bench.flops()
        bench.classify(new_collector(), {name: token_ids})
        counted = bench.flops(**unneeded) - before
        assert counted == round(share * flops.text(len(token_ids))), "a look would have said a number of whole layers"
        assert bench.flops() - total == whole(model, {name: token_ids})


def test_each_arm_is_counted_as_what_it_obeys(bench: Bench, model: LoadedModel, collector: Any) -> None:
    canary = bench.config.stable
    bench.set(2, None)
    bench.config = bench.config.model_copy(update={"canary": CanaryConfig(percent=50, config=canary)})
    for number, (name, token_ids) in enumerate(TEXTS.items()):
        arm = CANARY if number % 2 else "stable"
        bench.runner.submit((collector, name), Classify(name, "intent", token_ids, arm=arm))
    bench.classify(collector, {})
    arms = [{name: ids for number, (name, ids) in enumerate(TEXTS.items()) if number % 2 == arm} for arm in (0, 1)]
    assert bench.flops(arm="stable", level="2") == bench.flops(arm="stable") == whole(model, arms[0])
    assert bench.flops(arm="stable", cause="unneeded_layers") > 0
    assert bench.flops(arm=CANARY, level="3") == bench.flops(arm=CANARY, **USEFUL) < whole(model, arms[1])


def test_a_padded_batch(electra: LoadedModel, collector: Any) -> None:
    bench = Bench(electra, None)
    bench.classify(collector)
    flops = model_flops(electra)
    assert bench.flops(**USEFUL) == whole(electra)
    lengths = [len(token_ids) for token_ids in TEXTS.values()]
    padded = sum(flops.text(max(lengths)) - flops.text(length) for length in lengths)
    assert bench.flops(outcome="wasted", cause="padding", estimated="false") == padded > 0
    assert bench.flops() == whole(electra) + padded


def test_what_is_counted_is_what_torch_counts(model: LoadedModel, collector: Any) -> None:
    bench = Bench(model, None)
    in_place = {  # which torch leaves out
        torch.ops.aten.addmm_: lambda _, left, right, **__: 2 * left[0] * left[1] * right[1],
        torch.ops.aten.baddbmm_: lambda _, left, right, **__: 2 * left[0] * left[1] * left[2] * right[2],
    }
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        bench.classify(collector)
    assert bench.flops() == counter.get_total_flops()


def test_what_was_computed_for_a_text_that_was_cancelled_is_wasted(model: LoadedModel) -> None:
    small = Bench(model, None, prefill_tokens=1)  # a layer a step
    keys = {}
    for name in ("t1", "t2"):
        keys[name] = (object(), name)
        small.runner.submit(keys[name], Classify(name, "intent", TEXTS[name]))  # type: ignore[arg-type]
    small.runner.step()
    small.runner.step()
    small.runner.cancel(keys["t1"])  # type: ignore[arg-type]
    flops = model_flops(model)
    assert small.flops() == small.flops(outcome="wasted", cause="cancelled") == flops.text(len(TEXTS["t1"]), 2)
    small.runner.submit(keys["t1"], Classify("t1", "intent", TEXTS["t1"]))  # type: ignore[arg-type]
    small.runner.cancel(keys["t1"])  # type: ignore[arg-type]
    while small.runner.can_step:
        small.runner.step()
    assert small.flops(cause="cancelled") == flops.text(len(TEXTS["t1"]), 2), "nothing was computed in the queue"
    assert small.flops(**USEFUL) == whole(model, {"t2": TEXTS["t2"]})


def test_a_steps_seconds_are_divided_by_tokens(model: LoadedModel, new_collector: Any) -> None:
    bench, alone = Bench(model, None), new_collector()
    bench.clock.tick = 1.0
    texts = {"long": tokens(30), "short": tokens(10)}
    bench.classify(alone, texts)
    seconds = {name: done.engine_seconds for name, done in alone.dones.items()}
    assert seconds["long"] == pytest.approx(3 * seconds["short"])
    assert sum(seconds.values()) == pytest.approx(round(sum(seconds.values()))), "whole ticks of one step"


def test_a_text_that_leaves_early_pays_for_its_own_layers(bench: Bench, collector: Any) -> None:
    bench.clock.tick = 1.0
    bench.classify(collector)
    a_token = {name: done.engine_seconds / len(TEXTS[name]) for name, done in collector.dones.items()}
    by_depth = sorted((collector.dones[name].layers, cost) for name, cost in a_token.items())
    costs = [cost for _, cost in by_depth]
    assert costs == sorted(costs) and costs[0] < costs[-1]
    assert all(cost > 0 for cost in costs)
