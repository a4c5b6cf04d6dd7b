"""Full and quantised weights by level: what answers whom, and what happens while weights are exchanged."""

from __future__ import annotations

import shutil
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import generate_latest
from safetensors.torch import load_file, save_file

from sixfold_api.effective import effective
from sixfold_api.generation import GenerationSpec, QuantizedSpec, SamplerPipelineSpec, SpeculativeSpec
from sixfold_api.modes import Mode
from sixfold_api.pods import VariantRef
from sixfold_api.policy import InferencePolicySpec
from sixfold_api.runtime_config import Draft, RuntimeConfig, ServedModel, WeightSet
from sixfold_api.scalars import FullWeights, Task
from sixfold_runtime.engine import held_sets
from sixfold_runtime.engine.engine import Engine
from sixfold_runtime.engine.errors import RequestError
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.engine.protocol import SWAPPING, Done, Generate, Sampling
from sixfold_runtime.engine.scheduler import Limits
from sixfold_runtime.engine.weight_loader import Place
from sixfold_runtime.engine.weight_sets import WeightSets
from sixfold_runtime.settings import RuntimeSettings

CPU = torch.device("cpu")
SECONDS = 60.0
PLENTY, NO_ROOM = 2**32, 2**20
PROMPT = [5, 6, 7]


def levels(level: int) -> RuntimeConfig:
    """Of a policy with quantised weights from level 1 and a draft from level 2."""
    generation = GenerationSpec(
        variant_ref=VariantRef(name="chat"),
        quantized=QuantizedSpec(variant_ref=VariantRef(name="chat-int4")),
        speculative=SpeculativeSpec(draft_variant_ref=VariantRef(name="chat-draft")),
        sampler_pipeline=SamplerPipelineSpec(),
    )
    return RuntimeConfig(sequence=level, stable=effective(InferencePolicySpec(generation=generation), level).config)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, decoder_folder: Path) -> dict[str, Path]:
    """`chat`, and `chat-int4`: the same architecture and tokenizer with other weights."""
    other = tmp_path_factory.mktemp("weights") / "chat-int4"
    shutil.copytree(decoder_folder, other)
    weights = load_file(other / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    changed = {name: tensor + 0.2 * torch.randn(tensor.shape, generator=generator) for name, tensor in weights.items()}
    save_file({**changed, "lm_head.weight": weights["lm_head.weight"]}, other / "model.safetensors", {"format": "pt"})
    return {"chat": decoder_folder, "chat-int4": other}


@dataclass
class Scene:
    """A model's weight sets, stepped by hand."""

    folders: dict[str, Path]
    collector: Any
    config: RuntimeConfig = field(default_factory=lambda: levels(0))
    available_bytes: int = PLENTY
    metrics: EngineMetrics = field(default_factory=lambda: EngineMetrics(RuntimeSettings()))
    loaded: threading.Event = field(default_factory=threading.Event)
    sets: WeightSets = field(init=False)

    def start(
        self, full_weights: FullWeights = FullWeights.AUTO, draft: Draft | None = None, **limits: Any
    ) -> WeightSets:
        served = ServedModel(
            name="chat",
            task=Task.GENERATION,
            path=str(self.folders["chat"]),
            quantized=WeightSet(name="chat-int4", path=str(self.folders["chat-int4"])),
            full_weights=full_weights,
            draft=draft,
        )
        place = Place(CPU, Limits(**limits), 0.5, lambda _: self.available_bytes)
        self.sets = WeightSets(served, place, lambda: self.config, self.metrics, self.loaded.set)
        return self.sets

    def level(self, level: int) -> None:
        self.config = levels(level)
        self.sets.adapt()

    def submit(self, request_id: str, tokens: int = 12) -> None:
        request = Generate(request_id, "chat", PROMPT, Sampling(max_tokens=tokens, temperature=0.0))
        self.sets.submit((self.collector, request_id), request)

    def step(self) -> None:
        self.collector.take(self.sets.step())
        self.sets.adapt()

    def run(self) -> None:
        """Until nothing can be computed any more."""
        while self.sets.can_step:
            self.step()

    def finish_load(self) -> None:
        """Wait for the loading thread and take what it brought."""
        assert self.loaded.wait(SECONDS)
        self.loaded.clear()
        self.sets.adapt()

    def answer(self, request_id: str, tokens: int = 12) -> str:
        self.submit(request_id, tokens)
        self.run()
        done: Done = self.collector.dones[request_id]
        assert done.failure is None, done.failure
        return str(self.collector.text(request_id))

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, {**self.metrics.labels, **labels}) or 0.0

    def weight_bytes(self, variant: str) -> float:
        return self.metric("sixfold_memory_bytes", variant=variant, kind="weights")


@pytest.fixture
def scene(folders: dict[str, Path], collector: Any) -> Scene:
    return Scene(dict(folders), collector)


@pytest.fixture(scope="module")
def texts(folders: dict[str, Path], new_collector: Callable[[], Any]) -> dict[str, str]:
    """What each set of weights answers alone."""
    answers = {}
    for name in folders:
        scene = Scene({"chat": folders[name], "chat-int4": folders[name]}, new_collector())
        scene.start(FullWeights.SWAP)
        answers[name] = scene.answer("a")
    assert answers["chat"] != answers["chat-int4"]
    return answers


def test_resident_sets_answer_by_level(scene: Scene, texts: dict[str, str]) -> None:
    sets = scene.start()
    assert sets.full_weights is FullWeights.RESIDENT
    for index, level in enumerate((0, 1, 0, 2, 3)):
        scene.level(level)
        name = "chat-int4" if level else "chat"
        assert sets.active == name
        assert scene.answer(f"r{index}") == texts[name]
    assert scene.weight_bytes("chat") > 0
    assert scene.weight_bytes("chat-int4") > 0
    assert sets.swap_seconds is None, "nothing was exchanged"


def test_running_requests_finish_on_their_weights_while_new_ones_get_others(
    scene: Scene, texts: dict[str, str]
) -> None:
    sets = scene.start()
    scene.submit("old")
    scene.step()
    scene.level(1)
    scene.submit("new")
    scene.step()
    assert [held.runner.running for held in sets._sets] == [1, 1], "both compute"
    scene.run()
    assert scene.collector.text("old") == texts["chat"]
    assert scene.collector.text("new") == texts["chat-int4"]
    assert scene.collector.dones["old"].level == 0
    assert scene.collector.dones["new"].level == 1


def test_a_request_that_has_not_begun_moves_with_the_level(scene: Scene, texts: dict[str, str]) -> None:
    """Else its level would say one thing and its weights another."""
    scene.start(max_running=1)
    scene.submit("first")
    scene.submit("second")
    scene.step()
    scene.level(1)
    scene.run()
    assert scene.collector.text("first") == texts["chat"]
    assert scene.collector.text("second") == texts["chat-int4"]
    assert scene.collector.dones["second"].level == 1


def test_a_swap_with_room_keeps_nobody_waiting(scene: Scene, texts: dict[str, str]) -> None:
    sets = scene.start(FullWeights.SWAP)
    assert scene.weight_bytes("chat-int4") == 0, "at level 0 only the full weights are loaded"
    runner, weights = weakref.ref(sets._sets.get("chat").runner), sets._sets.get("chat").weights
    scene.submit("runs")
    scene.step()
    scene.level(1)
    assert not sets.is_swapping
    scene.submit("meanwhile")
    scene.collector.take(sets.step())
    scene.finish_load()
    assert scene.answer("new") == texts["chat-int4"]
    assert scene.collector.text("runs") == scene.collector.text("meanwhile") == texts["chat"]
    assert runner() is weights() is None, "the old weights are gone"
    assert scene.weight_bytes("chat") == 0
    assert scene.weight_bytes("chat-int4") > 0
    assert sets.swap_seconds > 0
    assert scene.metric("sixfold_weight_swaps_total", variant="chat", result="ok") == 1
    assert scene.metric("sixfold_weight_swap_seconds_count", variant="chat") == 1


def test_a_swap_without_room_queues_new_requests_until_the_weights_are_there(
    scene: Scene, texts: dict[str, str]
) -> None:
    sets = scene.start(FullWeights.SWAP, max_waiting=3)
    weights = weakref.ref(sets._sets.get("chat").runner)
    scene.submit("runs")
    scene.step()
    scene.available_bytes = NO_ROOM // 1024
    scene.level(1)
    assert sets.is_swapping
    for name in ("a", "b", "c"):
        scene.submit(name)
    with pytest.raises(RequestError) as refused:
        scene.submit("d")
    assert (refused.value.status, refused.value.code) == (429, SWAPPING)
    assert refused.value.retry_after_seconds >= 1
    assert (sets.running, sets.waiting) == (1, 3)
    assert scene.metric("sixfold_swap_queued_requests", variant="chat") == 3
    sets.cancel((scene.collector, "b"))

    scene.available_bytes = PLENTY
    scene.run()
    assert scene.collector.text("runs") == texts["chat"], "what ran has finished"
    assert weights() is None, "the old weights went first"
    assert not sets.can_step, "nothing spins while weights are loaded"
    assert (sets.active, sets.is_broken) == ("", False)
    scene.finish_load()
    scene.run()
    assert scene.collector.text("a") == scene.collector.text("c") == texts["chat-int4"]
    assert scene.collector.dones.keys() == {"runs", "a", "c"}
    assert scene.collector.dones["a"].level == 1


def test_a_level_that_comes_back_before_the_weights_went(scene: Scene, texts: dict[str, str]) -> None:
    sets = scene.start(FullWeights.SWAP)
    scene.submit("runs")
    scene.step()
    scene.available_bytes = 0
    scene.level(1)
    scene.submit("queued")
    scene.level(0)
    scene.run()
    assert scene.collector.text("runs") == scene.collector.text("queued") == texts["chat"]
    assert (sets.active, sets.is_swapping, sets.swap_seconds) == ("chat", False, None)


def test_a_level_that_comes_back_while_weights_are_loaded(scene: Scene, texts: dict[str, str]) -> None:
    """What was loaded is given up again, and nothing counts as an exchange."""
    sets = scene.start(FullWeights.SWAP)
    scene.level(1)
    scene.level(0)
    scene.finish_load()
    assert scene.answer("a") == texts["chat"]
    assert [held.name for held in sets._sets] == ["chat"]
    assert scene.weight_bytes("chat-int4") == 0
    assert sets.swap_seconds is None


def broken(scene: Scene, tmp_path: Path, name: str) -> Path:
    folder = Path(shutil.copytree(scene.folders[name], tmp_path / name))
    (folder / "model.safetensors").write_bytes(b"damaged")
    scene.folders[name] = folder
    return folder


def test_weights_that_cannot_be_loaded_leave_the_others_in_place(
    scene: Scene, texts: dict[str, str], folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = broken(scene, tmp_path, "chat-int4")
    sets = scene.start(FullWeights.SWAP)
    scene.level(1)
    scene.finish_load()
    assert scene.answer("a") == texts["chat"]
    assert "model.safetensors is damaged" in sets.weights_error
    assert "model.safetensors is damaged" in sets.unsupported[Mode.QUANTIZED]
    assert scene.metric("sixfold_weight_swaps_total", variant="chat", result="failed") == 1
    sets.adapt()
    assert not sets._exchange.is_loading, "no second try with the same configuration"

    shutil.copy(folders["chat-int4"] / "model.safetensors", folder)
    scene.level(2)
    scene.finish_load()
    assert scene.answer("b") == texts["chat-int4"]
    assert sets.weights_error == ""
    assert Mode.QUANTIZED not in sets.unsupported


def test_weights_that_made_room_in_vain_come_back(scene: Scene, texts: dict[str, str], tmp_path: Path) -> None:
    sets = scene.start(FullWeights.SWAP)
    original = scene.folders["chat-int4"]
    hidden = Path(shutil.move(original, tmp_path / "hidden"))
    sets._loader.fits_beside = lambda *_: False
    try:
        scene.level(1)
        scene.submit("queued")
        scene.finish_load()
        scene.finish_load()
    finally:
        shutil.move(hidden, original)
    scene.run()
    assert scene.collector.text("queued") == texts["chat"]
    assert "chat-int4" in sets.weights_error
    scene.level(0)
    assert sets.weights_error == "", "the level asks for what is there"


def test_no_weights_at_all_fail_requests_until_the_configuration_changes(
    scene: Scene, texts: dict[str, str], tmp_path: Path
) -> None:
    for name in ("chat", "chat-int4"):
        scene.folders[name] = Path(shutil.copytree(scene.folders[name], tmp_path / name))
    sets = scene.start(FullWeights.SWAP)
    sets._loader.fits_beside = lambda *_: False
    kept = {name: (folder / "config.json").read_bytes() for name, folder in scene.folders.items()}
    for folder in scene.folders.values():
        (folder / "config.json").unlink()
    scene.level(1)
    scene.submit("queued")
    scene.finish_load()
    scene.finish_load()
    scene.run()
    assert sets.is_broken
    assert scene.collector.dones["queued"].failure.status == 503
    with pytest.raises(RequestError, match=r"config\.json is missing"):
        scene.submit("late")

    for name, content in kept.items():
        (scene.folders[name] / "config.json").write_bytes(content)
    scene.level(0)
    scene.finish_load()
    assert not sets.is_broken
    assert scene.answer("again") == texts["chat"]


def test_quantised_weights_that_fail_at_the_start_fall_back_to_full_ones(
    scene: Scene, texts: dict[str, str], tmp_path: Path
) -> None:
    broken(scene, tmp_path, "chat-int4")
    scene.config = levels(1)
    sets = scene.start()
    assert scene.answer("a") == texts["chat"]
    assert "damaged" in sets.unsupported[Mode.QUANTIZED]


def test_quantised_weights_with_another_tokenizer_are_refused(scene: Scene, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(scene.folders["chat-int4"], tmp_path / "other"))
    tokens = (folder / "tokenizer.json").read_text(encoding="utf-8")
    (folder / "tokenizer.json").write_text(tokens.replace('"</s>"', '"</x>"'), encoding="utf-8")
    scene.folders["chat-int4"] = folder
    sets = scene.start(FullWeights.SWAP)
    scene.level(1)
    scene.finish_load()
    assert "another tokenizer" in sets.weights_error


def test_a_draft_serves_both_sets(scene: Scene, texts: dict[str, str]) -> None:
    """Greedy answers with the draft are those without it, on either weights."""
    draft = Draft(name="chat-draft", path=str(scene.folders["chat"]))
    sets = scene.start(FullWeights.RESIDENT, draft)
    scene.level(2)
    assert scene.answer("a") == texts["chat-int4"]
    assert scene.collector.dones["a"].drafted_tokens > 0
    assert Mode.SPECULATIVE not in sets.unsupported
    assert scene.weight_bytes("chat-draft") > 0
    assert scene.metric("sixfold_draft_tokens_total", variant="chat-int4", level="2") > 0


def test_a_draft_with_another_tokenizer_is_refused_and_said_so(
    scene: Scene, texts: dict[str, str], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(scene.folders["chat"], tmp_path / "draft"))
    tokens = (folder / "tokenizer.json").read_text(encoding="utf-8")
    (folder / "tokenizer.json").write_text(tokens.replace('"</s>"', '"</x>"'), encoding="utf-8")
    sets = scene.start(draft=Draft(name="chat-draft", path=str(folder)))
    scene.level(2)
    assert "another tokenizer" in sets.unsupported[Mode.SPECULATIVE]
    assert "'</s>'" in sets.unsupported[Mode.SPECULATIVE]
    assert scene.answer("a") == texts["chat-int4"]
    assert scene.collector.dones["a"].drafted_tokens == 0


def test_speculation_without_a_draft_says_so(scene: Scene) -> None:
    sets = scene.start()
    scene.level(2)
    assert "without a draft" in sets.unsupported[Mode.SPECULATIVE]
    scene.level(1)
    assert Mode.SPECULATIVE not in sets.unsupported, "it is off"


def test_a_sampler_pipeline_without_a_gpu_says_so_before_any_request(scene: Scene) -> None:
    sets = scene.start()
    scene.level(3)
    assert "without a GPU" in sets.unsupported[Mode.SAMPLER_PIPELINE]
    scene.level(2)
    assert Mode.SAMPLER_PIPELINE not in sets.unsupported


def test_weights_are_gone_without_a_collection_that_stops_the_process(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected: list[bool] = []
    monkeypatch.setattr(held_sets, "release_memory", lambda _, have_cycles: collected.append(have_cycles))
    scene.start(FullWeights.SWAP)
    scene.answer("a")
    scene.level(1)
    scene.finish_load()
    scene.sets._loader.fits_beside = lambda *_: False
    scene.level(0)
    scene.finish_load()
    assert collected == [False, False]


def test_every_series_can_be_scraped_while_weights_come_and_go(scene: Scene) -> None:
    sets = scene.start(FullWeights.SWAP)
    scene.answer("a")
    scene.level(1)
    scene.finish_load()
    assert [held.name for held in sets._sets] == ["chat-int4"]
    scraped = generate_latest(scene.metrics.registry).decode()
    assert 'sixfold_requests_running{namespace="default",policy="local",variant="chat"} 0.0' in scraped


def test_an_exchange_that_keeps_requests_waiting_waits_for_its_turn(scene: Scene, texts: dict[str, str]) -> None:
    sets = scene.start(FullWeights.SWAP)
    sets._turn.is_shared = True
    scene.available_bytes = 0
    scene.level(1)
    assert sets._turn.is_waiting
    assert not sets.is_swapping
    assert scene.answer("before") == texts["chat"], "the old weights answer until it is this engine's turn"
    scene.available_bytes = PLENTY
    sets._turn.give()
    assert scene.loaded.wait(SECONDS)
    scene.loaded.clear()
    sets._loader.fits_beside = lambda *_: False
    sets.adapt()
    assert sets.is_swapping
    assert not sets._turn.is_waiting, "the turn is over once the exchange has begun: requests wait, others may follow"
    scene.finish_load()
    assert scene.answer("after") == texts["chat-int4"]


def test_a_level_that_comes_back_gives_up_the_turn(scene: Scene) -> None:
    sets = scene.start(FullWeights.SWAP)
    sets._turn.is_shared = True
    scene.available_bytes = 0
    scene.level(1)
    scene.level(0)
    assert not sets._turn.is_waiting
    assert sets.active == "chat"


def test_the_engines_thread_swaps_without_requests(folders: dict[str, Path], new_collector: Callable[[], Any]) -> None:
    """Nothing but the change of the configuration wakes it; states are told as they change."""
    config, told, changed = [levels(0)], [], threading.Condition()
    served = ServedModel(
        name="chat",
        task=Task.GENERATION,
        path=str(folders["chat"]),
        quantized=WeightSet(name="chat-int4", path=str(folders["chat-int4"])),
        full_weights=FullWeights.SWAP,
    )

    def on_models() -> None:
        with changed:
            told.append(engine.models["chat"].state)
            changed.notify_all()

    engine = Engine([served], lambda: config[0], EngineMetrics(RuntimeSettings()), device="cpu", on_models=on_models)
    engine.start()
    with changed:
        assert changed.wait_for(lambda: told and told[-1].ready, SECONDS)
        assert (told[-1].weights, told[-1].full_weights) == ("chat", FullWeights.SWAP)
    config[0] = levels(1)
    engine.config_changed()
    with changed:
        assert changed.wait_for(lambda: told[-1].weights == "chat-int4", SECONDS)
        assert told[-1].swap_seconds > 0
    engine.stop()
