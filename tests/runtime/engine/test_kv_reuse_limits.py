"""Prompts that begin with keys and values of earlier ones: who never gets them."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kv_scene import BLOCK, CPU, KV, SECONDS, Scene, continued, opened, tokens
from safetensors.torch import load_file, save_file

from sixfold_api.modes import Mode
from sixfold_api.runtime_config import (
    ServedModel,
    SubgraphsConfig,
    TaskConfig,
    WeightSet,
)
from sixfold_api.scalars import FullWeights, Task
from sixfold_runtime.engine.checkpoint import TensorStore
from sixfold_runtime.engine.errors import ModelLoadError
from sixfold_runtime.engine.fingerprint import trunk_fingerprint
from sixfold_runtime.engine.forward import make_forward
from sixfold_runtime.engine.generation import GenerationRunner
from sixfold_runtime.engine.kv_reuse import KVReuse
from sixfold_runtime.engine.loader import LoadedModel, load
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.engine.protocol import Generate, Sampling
from sixfold_runtime.engine.scheduler import Limits
from sixfold_runtime.engine.slice_file import slice_path, write_slice
from sixfold_runtime.engine.slice_loader import TrunkFolder
from sixfold_runtime.engine.slice_pool import SlicePool
from sixfold_runtime.engine.weight_files import ContentDigest, WeightFiles
from sixfold_runtime.engine.weight_loader import Place
from sixfold_runtime.engine.weight_sets import WeightSets
from sixfold_runtime.settings import RuntimeSettings


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory, decoder_folder: Path) -> LoadedModel:
    """Of the same name."""
    folder = tmp_path_factory.mktemp("other")
    shutil.copytree(decoder_folder, folder, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**weights, name: weights[name] + 0.1}, folder / "model.safetensors", {"format": "pt"})
    return load(ServedModel(name="chat", task=Task.GENERATION, path=str(folder)), CPU)


@pytest.fixture
def scene(config: Any, collector: Any) -> Iterator[Scene]:
    with opened(config, collector) as scene:
        yield scene


@pytest.mark.parametrize("is_queued", [False, True], ids=["looked up", "queued"])
def test_a_level_without_reuse_takes_effect_on_those_that_have_not_begun(
    is_queued: bool, scene: Scene, decoder: LoadedModel
) -> None:
    runner = scene.start(decoder, limits={"max_running": 1})
    prompt = tokens(40)
    scene.ask(runner, "0", prompt)
    scene.submit(runner, "running", tokens(4), max_tokens=6)
    scene.collector.take(runner.step())
    scene.submit(runner, "a", [*prompt, 5])
    if is_queued:
        scene.wait(lambda: runner.can_step)
        scene.collector.take(runner.step())
    scene.set(kv_reuse=None)
    scene.finish(runner)
    assert scene.collector.dones["a"].cached_tokens == 0
    assert scene.collector.text("a") == continued(decoder, [*prompt, 5], None)
    scene.set(kv_reuse=KV)
    assert scene.ask(runner, "b", [*prompt, 5]).cached_tokens == 0, "memory was given up, and nothing was kept"
    assert scene.ask(runner, "c", [*prompt, 5]).cached_tokens == 40


def test_another_block_size_finds_nothing_and_starts_anew(scene: Scene, decoder: LoadedModel) -> None:
    runner = scene.start(decoder)
    scene.ask(runner, "0", tokens(40))
    scene.set(kv_reuse=KV.model_copy(update={"block_tokens": 16, "min_prompt_tokens": 17}))
    assert runner.kv is not None and runner.kv.block_tokens == 16
    assert scene.ask(runner, "1", [*tokens(40), 5]).cached_tokens == 0
    assert scene.ask(runner, "2", [*tokens(40), 5]).cached_tokens == 32


def test_a_request_that_wants_no_reuse_neither_finds_nor_leaves_anything(scene: Scene, decoder: LoadedModel) -> None:
    runner = scene.start(decoder)
    prompt = tokens(40)
    scene.ask(runner, "0", prompt, kv_reuse=False)
    assert scene.found(runner, prompt) is None
    scene.ask(runner, "1", prompt)
    assert scene.ask(runner, "2", prompt, kv_reuse=False).cached_tokens == 0
    assert scene.ask(runner, "3", prompt).cached_tokens == 32


# -- who shares


def test_tenants_share_nothing(scene: Scene, decoder: LoadedModel) -> None:
    runner = scene.start(decoder)
    prompt = tokens(40)
    scene.ask(runner, "0", prompt, tenant="alice")
    assert scene.ask(runner, "1", prompt, tenant="bob").cached_tokens == 0
    assert scene.ask(runner, "2", prompt).cached_tokens == 0
    assert scene.ask(runner, "3", prompt, tenant="alice").cached_tokens == 32


def test_new_weights_of_the_same_name_begin_anew(
    scene: Scene, decoder: LoadedModel, other_weights: LoadedModel
) -> None:
    old, new = scene.start(decoder), scene.start(other_weights)
    prompt = tokens(40)
    scene.ask(old, "0", prompt)
    assert scene.ask(new, "1", prompt).cached_tokens == 0
    assert scene.collector.text("1") == continued(other_weights, prompt, None)
    assert scene.ask(old, "2", prompt).cached_tokens == scene.ask(new, "3", prompt).cached_tokens == 32


def test_erasing_a_tenant_also_keeps_nothing_of_what_runs(scene: Scene, decoder: LoadedModel) -> None:
    runner = scene.start(decoder)
    prompt, erased = tokens(40), threading.Event()
    scene.ask(runner, "0", prompt, tenant="alice")
    scene.ask(runner, "1", prompt, tenant="bob")
    for name in ("alice", "bob"):
        scene.submit(runner, name, tokens(50, 1), tenant=name, max_tokens=5)
        scene.wait(lambda: runner.can_step)
        scene.collector.take(runner.step())
    runner.keep_nothing_of("alice")
    blocks = []
    scene.shelf.store.erase(scene.shelf.salt("alice"), lambda count, error: (blocks.append(count), erased.set()))
    assert erased.wait(SECONDS)
    scene.finish(runner)
    assert blocks == [51 // BLOCK]
    assert scene.found(runner, prompt, "alice") is None and scene.found(runner, tokens(50, 1), "alice") is None
    assert scene.found(runner, prompt, "bob") is not None and scene.found(runner, tokens(50, 1), "bob") is not None


def slice_of(folder: Path, task: str, seed: int) -> None:
    """A slice that replaces a feed-forward part of the first layer."""
    dice = torch.Generator().manual_seed(seed)
    name = "model.layers.0.mlp.up_proj"
    tensors = {
        f"{name}.delta_a": torch.randn(4, 32, generator=dice),
        f"{name}.delta_b": torch.randn(64, 4, generator=dice),
    }
    write_slice(slice_path(folder, task), tensors, Task.GENERATION, [], trunk_fingerprint(TensorStore(folder)))


def test_task_slices_share_nothing(scene: Scene, decoder_folder: Path, tmp_path: Path) -> None:
    """Nor does a slice of the same name with another content."""
    folder = Path(shutil.copytree(decoder_folder, tmp_path / "chat"))
    slice_of(folder, "poem", 1)
    slice_of(folder, "law", 2)
    served = ServedModel(name="chat", task=Task.GENERATION, path=str(folder))
    section = SubgraphsConfig(tasks=tuple(TaskConfig(name=task) for task in ("poem", "law")), on_demand=True)
    scene.set(generation_subgraphs=section)
    prompt, cached = tokens(40), {}
    for start in range(2):
        model = load(served, CPU)
        assert model.decoder is not None
        pool = SlicePool(
            TrunkFolder(folder, Task.GENERATION), model.decoder, lambda: section,
            EngineMetrics(RuntimeSettings()).of("chat").slices, wake=scene.woken.set,
        )  # fmt: skip
        runner = scene.start(model, slices=pool)
        for task in ("poem", "law", ""):
            for again in range(2):
                name = f"{task}{start}{again}"
                scene.submit(runner, name, prompt, task=task)
                while runner.running or runner.waiting:
                    scene.wait(lambda runner=runner: runner.adapt() or runner.can_step)  # type: ignore[misc]
                    scene.collector.take(runner.step())
                assert scene.shelf.store.settle(SECONDS)
                cached[name] = scene.collector.dones[name].cached_tokens
        slice_of(folder, "poem", 3)
    assert cached == {
        "poem00": 0, "poem01": 32, "law00": 0, "law01": 32, "00": 0, "01": 32,
        "poem10": 0, "poem11": 32, "law10": 32, "law11": 32, "10": 32, "11": 32,
    }  # fmt: skip
    assert scene.collector.text("poem00") != scene.collector.text("poem10")


def test_other_weights_answer_those_that_were_looked_up_for_the_old_ones(
    scene: Scene, decoder_folder: Path, other_weights: LoadedModel
) -> None:
    """The level changes while a prompt waits for the keys and values of weights that it will not get."""
    served = ServedModel(
        name="chat",
        task=Task.GENERATION,
        path=str(decoder_folder),
        quantized=WeightSet(name="chat-int4", path=other_weights.served.path),
        full_weights=FullWeights.RESIDENT,
    )
    place = Place(CPU, Limits(), 0.5, lambda _: 2**32)
    sets = WeightSets(served, place, scene.config, EngineMetrics(RuntimeSettings()), scene.woken.set, shelf=scene.shelf)
    try:
        prompt, cached = tokens(40), {}
        for name, is_quantized in (("0", False), ("1", False), ("2", True), ("3", True), ("4", False)):
            scene.wait(lambda: sets.adapt() or (sets.kv is not None and sets.kv.block_tokens > 0))
            request = Generate(name, "chat", prompt, Sampling(max_tokens=12, temperature=0.0))
            sets.submit((scene.collector, name), request)
            modes = {Mode.KV_CACHE_REUSE, *([Mode.QUANTIZED] if is_quantized else [])}
            scene.set(active_modes=tuple(modes))
            sets.adapt()
            while sets.running or sets.waiting:
                scene.wait(lambda: sets.can_step)
                scene.collector.take(sets.step())
            assert scene.shelf.store.settle(SECONDS)
            cached[name] = scene.collector.dones[name].cached_tokens
        assert cached == {"0": 0, "1": 32, "2": 0, "3": 32, "4": 32}
        assert scene.collector.text("2") == continued(other_weights, prompt, None)
    finally:
        sets.close()


# -- digests


def test_a_digest_tells_any_change_of_the_weights(decoder_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(decoder_folder, tmp_path / "chat"))
    files = WeightFiles.of(folder)
    digest, recorded = files.digest(), files.digest("sha256:prepared")
    assert WeightFiles.of(folder).digest() == digest and recorded.startswith("sha256:prepared ")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] += 1e-3
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match="were changed after they were loaded"):
        files.digest()
    assert WeightFiles.of(folder).digest() != digest
    assert WeightFiles.of(folder).digest("sha256:prepared") != recorded


def test_without_a_digest_nothing_is_reused_and_it_says_why(scene: Scene, decoder_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(decoder_folder, tmp_path / "chat"))
    model = load(ServedModel(name="chat", task=Task.GENERATION, path=str(folder)), CPU)
    files = WeightFiles.of(folder)
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    digest = ContentDigest(files, "", scene.woken.set)
    reuse = KVReuse(scene.shelf, digest, model, make_forward(model), scene.config, scene.woken.set)
    runner = GenerationRunner(model, Limits(), scene.config, EngineMetrics(RuntimeSettings()).of("chat"), kv=reuse)
    assert "still being computed" in runner.notes.unsupported[Mode.KV_CACHE_REUSE]
    runner.adapt()
    scene.wait(lambda: bool(digest.problem))
    assert "changed after they were loaded" in runner.notes.unsupported[Mode.KV_CACHE_REUSE]
    for name in ("0", "1"):
        assert scene.ask(runner, name, tokens(40)).cached_tokens == 0
