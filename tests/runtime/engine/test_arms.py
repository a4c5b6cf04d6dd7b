"""A canary beside the stable arm on one engine: each request obeys its arm's configuration, and keeps it."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sixfold_api.classification import ExitRule
from sixfold_api.effective import effective
from sixfold_api.generation import GenerationSpec, QuantizedSpec, SpeculativeSpec
from sixfold_api.kv_reuse import KVStore
from sixfold_api.modes import Mode
from sixfold_api.pods import VariantRef
from sixfold_api.policy import InferencePolicySpec
from sixfold_api.runtime_config import (
    CANARY,
    STABLE,
    CanaryConfig,
    Draft,
    EarlyExitConfig,
    EffectiveConfig,
    KVReuseConfig,
    RuntimeConfig,
    ServedModel,
    WeightSet,
)
from sixfold_api.scalars import FullWeights, Task
from sixfold_runtime.config import default_config
from sixfold_runtime.engine.classification import ClassificationRunner
from sixfold_runtime.engine.engine import Engine
from sixfold_runtime.engine.exit_heads import ExitHeads
from sixfold_runtime.engine.loader import LoadedModel
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.engine.protocol import Chunk, Classify, Done, Generate, Sampling
from sixfold_runtime.engine.scheduler import Limits
from sixfold_runtime.engine.weight_loader import Place
from sixfold_runtime.engine.weight_sets import WeightSets
from sixfold_runtime.modes.early_exit import Calibration
from sixfold_runtime.settings import RuntimeSettings

CPU = torch.device("cpu")
SECONDS = 60.0
PROMPT = [5, 6, 7]
SPEC = InferencePolicySpec(
    generation=GenerationSpec(
        variant_ref=VariantRef(name="chat"),
        quantized=QuantizedSpec(variant_ref=VariantRef(name="chat-int4")),
        speculative=SpeculativeSpec(draft_variant_ref=VariantRef(name="chat-draft")),
    )
)


def at(level: int) -> EffectiveConfig:
    """Quantised weights from level 1, a draft from level 2."""
    return effective(SPEC, level).config


def arms(stable: EffectiveConfig, canary: EffectiveConfig | None = None) -> RuntimeConfig:
    return RuntimeConfig(
        sequence=1, stable=stable, canary=None if canary is None else CanaryConfig(percent=50, config=canary)
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, decoder_folder: Path) -> dict[str, Path]:
    """`chat`, and `chat-int4`: other weights of the same shape."""
    other = tmp_path_factory.mktemp("weights") / "chat-int4"
    shutil.copytree(decoder_folder, other)
    weights = load_file(other / "model.safetensors")
    dice = torch.Generator().manual_seed(1)
    changed = {name: tensor + 0.2 * torch.randn(tensor.shape, generator=dice) for name, tensor in weights.items()}
    save_file({**changed, "lm_head.weight": weights["lm_head.weight"]}, other / "model.safetensors", {"format": "pt"})
    return {"chat": decoder_folder, "chat-int4": other}


@dataclass
class Scene:
    """A model's weight sets, stepped by hand."""

    folders: dict[str, Path]
    sink: Any
    config: RuntimeConfig = field(default_factory=lambda: arms(at(0)))
    loaded: threading.Event = field(default_factory=threading.Event)
    sets: WeightSets = field(init=False)

    def start(self, full_weights: FullWeights, draft: Draft | None = None, **limits: Any) -> WeightSets:
        served = ServedModel(
            name="chat",
            task=Task.GENERATION,
            path=str(self.folders["chat"]),
            quantized=WeightSet(name="chat-int4", path=str(self.folders["chat-int4"])),
            full_weights=full_weights,
            draft=draft,
        )
        place = Place(CPU, Limits(**limits), 0.5, lambda _: 2**32)
        metrics = EngineMetrics(RuntimeSettings())
        self.sets = WeightSets(served, place, lambda: self.config, metrics, self.loaded.set)
        return self.sets

    def configure(self, stable: EffectiveConfig, canary: EffectiveConfig | None = None) -> None:
        self.config = arms(stable, canary)
        self.sets.adapt()

    def submit(self, name: str, arm: str, tokens: int = 12) -> None:
        sampling = Sampling(max_tokens=tokens, temperature=0.0)
        self.sets.submit((self.sink, name), Generate(name, "chat", PROMPT, sampling, arm=arm))

    def step(self) -> None:
        self.sink.take(self.sets.step())
        self.sets.adapt()

    def run(self) -> None:
        while self.sets.can_step:
            self.step()

    def finish_load(self) -> None:
        """Wait for the loading thread and take what it brought."""
        assert self.loaded.wait(SECONDS)
        self.loaded.clear()
        self.sets.adapt()

    def done(self, name: str) -> Done:
        done: Done = self.sink.dones[name]
        assert done.failure is None, done.failure
        return done


@pytest.fixture
def scene(folders: dict[str, Path], collector: Any) -> Scene:
    return Scene(dict(folders), collector)


@pytest.fixture(scope="module")
def texts(folders: dict[str, Path], new_collector: Callable[[], Any]) -> dict[str, str]:
    """What each set of weights answers alone."""
    answers = {}
    for name, folder in folders.items():
        alone = Scene({"chat": folder, "chat-int4": folder}, new_collector())
        alone.start(FullWeights.SWAP)
        alone.submit("a", STABLE)
        alone.run()
        answers[name] = alone.sink.text("a")
    assert answers["chat"] != answers["chat-int4"]
    return answers


# -- weights


def test_two_arms_on_two_sets_of_weights_at_once(scene: Scene, texts: dict[str, str]) -> None:
    sets = scene.start(FullWeights.RESIDENT)
    scene.configure(at(0), at(1))
    for index in range(3):
        scene.submit(f"s{index}", STABLE)
        scene.submit(f"c{index}", CANARY)
    scene.step()
    assert [held.runner.running for held in sets._sets] == [3, 3], "both compute"
    scene.run()
    for index in range(3):
        assert (scene.sink.text(f"s{index}"), scene.done(f"s{index}").level) == (texts["chat"], 0)
        assert (scene.sink.text(f"c{index}"), scene.done(f"c{index}").level) == (texts["chat-int4"], 1)
    assert not sets.unsupported


def test_a_canary_that_ends_changes_nothing_for_what_has_begun(scene: Scene, texts: dict[str, str]) -> None:
    """One that has not begun is the stable arm's: its level and its weights say the same."""
    scene.start(FullWeights.RESIDENT, max_running=1)
    scene.configure(at(0), at(1))
    scene.submit("begun", CANARY)
    scene.submit("waits", CANARY)
    scene.step()
    scene.configure(at(0))
    scene.submit("late", CANARY)
    scene.run()
    assert (scene.sink.text("begun"), scene.done("begun").level) == (texts["chat-int4"], 1)
    for name in ("waits", "late"):
        assert (scene.sink.text(name), scene.done(name).level) == (texts["chat"], 0)


def test_a_promoted_canary_is_stable_without_a_wait(scene: Scene, texts: dict[str, str]) -> None:
    sets = scene.start(FullWeights.RESIDENT)
    scene.configure(at(0), at(1))
    scene.submit("before", CANARY)
    scene.step()
    scene.configure(at(1))
    assert sets.active == "chat-int4" and not sets.is_swapping
    scene.submit("after", STABLE)
    scene.run()
    assert scene.sink.text("before") == scene.sink.text("after") == texts["chat-int4"]


def test_with_swap_both_arms_run_on_the_stable_weights_and_the_pod_says_so(scene: Scene, texts: dict[str, str]) -> None:
    sets = scene.start(FullWeights.SWAP)
    scene.configure(at(0), at(1))
    scene.submit("c", CANARY)
    scene.run()
    assert scene.sink.text("c") == texts["chat"]
    assert "fullWeights Swap" in sets.unsupported[Mode.QUANTIZED]
    scene.configure(at(0))
    assert not sets.unsupported


def test_weights_that_a_canary_needs_and_that_could_not_be_loaded_are_loaded_for_it(
    scene: Scene, texts: dict[str, str], tmp_path: Path
) -> None:
    good = scene.folders["chat-int4"]
    scene.folders["chat-int4"] = tmp_path / "late"
    sets = scene.start(FullWeights.RESIDENT)
    scene.configure(at(0), at(1))
    scene.finish_load()
    assert "late" in sets.unsupported[Mode.QUANTIZED]
    scene.submit("early", CANARY)
    scene.run()
    assert scene.sink.text("early") == texts["chat"], "served meanwhile"
    shutil.copytree(good, tmp_path / "late")
    scene.configure(at(0), at(1))  # another configuration is another try
    scene.finish_load()
    scene.submit("c", CANARY)
    scene.run()
    assert scene.sink.text("c") == texts["chat-int4"]
    assert sets.active == "chat" and not sets.unsupported


# -- modes of generation


def test_only_the_arm_with_speculation_drafts(scene: Scene) -> None:
    scene.start(FullWeights.RESIDENT, Draft(name="chat-draft", path=str(scene.folders["chat-int4"])))
    scene.configure(at(1), at(2))
    scene.submit("s", STABLE, tokens=40)
    scene.submit("c", CANARY, tokens=40)
    scene.run()
    assert scene.done("s").drafted_tokens == 0 < scene.done("c").drafted_tokens
    assert scene.sink.text("s") == scene.sink.text("c"), "the same weights, and nothing is lost"


def test_a_canary_without_what_its_mode_needs_says_so(scene: Scene) -> None:
    sets = scene.start(FullWeights.RESIDENT)
    scene.configure(at(1))
    assert not sets.unsupported
    scene.configure(at(1), at(2))
    assert "draft" in sets.unsupported[Mode.SPECULATIVE]


class Waiting:
    """A sink that lets a test wait for the ends of its requests."""

    def __init__(self) -> None:
        self.dones: dict[str, Done] = {}
        self._changed = threading.Condition()

    def deliver(self, chunks: Sequence[Chunk], dones: Sequence[Done]) -> None:
        with self._changed:
            self.dones.update((done.id, done) for done in dones)
            self._changed.notify_all()

    def wait(self, name: str) -> Done:
        with self._changed:
            assert self._changed.wait_for(lambda: name in self.dones, SECONDS)
        assert self.dones[name].failure is None, self.dones[name].failure
        return self.dones[name]


def test_only_the_arm_with_reuse_finds_and_keeps(decoder_folder: Path) -> None:
    reuse = KVReuseConfig(
        store=KVStore.MEMORY, ttl_seconds=600, max_bytes=0, memory_bytes=2**26, block_tokens=16, min_prompt_tokens=17
    )
    plain = default_config(3).stable
    config = arms(plain, plain.model_copy(update={"kv_reuse": reuse}))
    served = ServedModel(name="chat", task=Task.GENERATION, path=str(decoder_folder))
    loaded, sink = threading.Event(), Waiting()
    engine = Engine(
        [served], lambda: config, EngineMetrics(RuntimeSettings()), device="cpu", limits=Limits(), on_models=loaded.set
    )
    engine.start()
    try:
        assert loaded.wait(SECONDS)
        prompt = torch.randint(2, 320, (64,), generator=torch.Generator().manual_seed(3)).tolist()
        found = {}
        for name, arm in (("s0", STABLE), ("c0", CANARY), ("s1", STABLE), ("c1", CANARY)):
            sampling = Sampling(max_tokens=4, temperature=0.0)
            engine.submit(sink, [Generate(name, "chat", prompt, sampling, arm=arm)])
            found[name] = sink.wait(name).cached_tokens
            assert engine.shelf is not None and engine.shelf.store.settle(SECONDS)
        assert found == {"s0": 0, "c0": 0, "s1": 0, "c1": 48}
    finally:
        engine.stop()


# -- exits


@dataclass
class Exits:
    """A classifier with exits, stepped by hand."""

    runner: ClassificationRunner
    sink: Any
    config: list[RuntimeConfig]

    def submit(self, arm: str, texts: Sequence[list[int]]) -> None:
        for index, ids in enumerate(texts):
            name = f"{arm}{index}"
            self.runner.submit((self.sink, name), Classify(name, "intent", ids, arm=arm))

    def run(self) -> None:
        while self.runner.can_step:
            self.sink.take(self.runner.step())

    def layers(self, arm: str) -> list[int | None]:
        return [self.sink.dones[name].layers for name in sorted(self.sink.dones) if name.startswith(arm)]


def fixed(threshold: float) -> EffectiveConfig:
    rule = EarlyExitConfig(rule=ExitRule.FIXED, threshold=threshold, length_relaxation=0.0)
    return default_config(3).stable.model_copy(update={"early_exit": rule})


TEXTS = [torch.randint(2, 320, (5 + 3 * s,), generator=torch.Generator().manual_seed(s)).tolist() for s in range(6)]


@pytest.fixture
def exits(classifier: LoadedModel, collector: Any) -> Exits:
    labels, width = classifier.labels, 32
    dice, numbers = torch.Generator().manual_seed(5), np.random.default_rng(5)
    calibration = Calibration((1,), 2, numbers.uniform(0.4, 1, (50, 1)), np.ones((50, 1), bool),
                              numbers.integers(3, 60, 50), 0.03, 0.0)  # fmt: skip
    weight = torch.randn(len(labels), 2 * width, generator=dice) * 0.2
    heads = ExitHeads(labels, {1: weight}, {1: torch.zeros(len(labels))}, {1: 1.0}, calibration)
    config = [arms(fixed(0.0))]
    metrics = EngineMetrics(RuntimeSettings()).of("intent")
    runner = ClassificationRunner(classifier, Limits(), lambda: config[0], metrics, exits=heads)
    runner.warm_up(1 << 30)
    return Exits(runner, collector, config)


def test_exits_by_arm_in_one_batch(exits: Exits) -> None:
    """The stable arm's leave at the first exit, the canary's nowhere, and the other way round."""
    none = default_config(3).stable
    for stable, canary in ((fixed(0.0), none), (none, fixed(0.0))):
        exits.config[0] = arms(stable, canary)
        exits.sink.dones.clear()
        exits.submit(STABLE, TEXTS)
        exits.submit(CANARY, TEXTS)
        exits.run()
        assert exits.layers(STABLE) == [1 if stable is not none else 2] * len(TEXTS)
        assert exits.layers(CANARY) == [1 if canary is not none else 2] * len(TEXTS)


def test_thresholds_by_arm(exits: Exits) -> None:
    """Between two thresholds, a text leaves in one arm and stays in the other."""
    exits.config[0] = arms(fixed(0.0), fixed(0.99))
    exits.submit(STABLE, TEXTS)
    exits.submit(CANARY, TEXTS)
    exits.run()
    assert exits.layers(STABLE) == [1] * len(TEXTS)
    assert 2 in exits.layers(CANARY)


def test_a_text_keeps_the_thresholds_with_which_it_began(exits: Exits) -> None:
    exits.config[0] = arms(fixed(0.99), fixed(0.0))
    exits.submit(CANARY, TEXTS)
    exits.runner._begin()
    exits.config[0] = arms(fixed(0.99))
    exits.run()
    assert exits.layers(CANARY) == [1] * len(TEXTS)


def test_a_canary_with_exits_that_the_model_lacks_says_so(classifier: LoadedModel) -> None:
    config = arms(default_config(3).stable, fixed(0.5))
    metrics = EngineMetrics(RuntimeSettings()).of("intent")
    runner = ClassificationRunner(classifier, Limits(), lambda: config, metrics)
    assert "exit heads" in runner.unsupported[Mode.EARLY_EXIT]
