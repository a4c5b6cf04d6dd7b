"""Prompts that begin with keys and values of earlier ones: what they get, and who never gets them."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sixfold_api.generation import DraftLength, Overlap
from sixfold_api.kv_reuse import KVStore as Store
from sixfold_api.modes import Mode
from sixfold_api.runtime_config import (
    EffectiveConfig,
    KVReuseConfig,
    SamplerPipelineConfig,
    ServedModel,
    SpeculativeConfig,
    SubgraphsConfig,
    TaskConfig,
    WeightSet,
)
from sixfold_api.scalars import FullWeights, Task
from sixfold_runtime.engine import kv_queue, kv_reuse
from sixfold_runtime.engine.checkpoint import TensorStore
from sixfold_runtime.engine.errors import ModelLoadError
from sixfold_runtime.engine.fingerprint import trunk_fingerprint
from sixfold_runtime.engine.forward import make_forward
from sixfold_runtime.engine.generation import GenerationRunner
from sixfold_runtime.engine.kv_reuse import KVReuse, why_not
from sixfold_runtime.engine.kv_shelf import Shelf
from sixfold_runtime.engine.kv_store import Prefix
from sixfold_runtime.engine.loader import LoadedModel, load
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.engine.protocol import Done, Generate, Sampling
from sixfold_runtime.engine.scheduler import Limits
from sixfold_runtime.engine.slice_file import slice_path, write_slice
from sixfold_runtime.engine.slice_loader import TrunkFolder
from sixfold_runtime.engine.slice_pool import SlicePool
from sixfold_runtime.engine.weight_files import ContentDigest, WeightFiles
from sixfold_runtime.engine.weight_loader import Place
from sixfold_runtime.engine.weight_sets import WeightSets
from sixfold_runtime.settings import RuntimeSettings

CPU = torch.device("cpu")
SECONDS = 60.0
BLOCK = 8
KV = KVReuseConfig(
    store=Store.MEMORY,
    ttl_seconds=600,
    max_bytes=2**24,
    memory_bytes=2**24,
    block_tokens=BLOCK,
    min_prompt_tokens=BLOCK + 1,
)
SPECULATIVE = SpeculativeConfig(num_tokens=3, length=DraftLength.FIXED)
PIPELINE = SamplerPipelineConfig(workers=2, overlap=Overlap.ALWAYS)


def tokens(length: int, seed: int = 0) -> list[int]:
    return torch.randint(2, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory, new_decoder: Callable[..., Path]) -> LoadedModel:
    """A part of the target, so that some of its tokens are accepted."""
    folder = new_decoder(tmp_path_factory.mktemp("draft"), num_hidden_layers=1)
    return load(ServedModel(name="draft", task=Task.GENERATION, path=str(folder)), CPU)


@pytest.fixture(scope="module")
def pair() -> tuple[LoadedModel, LoadedModel]:
    """The example pair: trained for each other, most drafted tokens are accepted."""
    folder = Path(__file__).parents[3] / "examples" / "models"
    chat, chat_draft = (
        load(ServedModel(name=name, task=Task.GENERATION, path=str(folder / name)), CPU)
        for name in ("chat", "chat-draft")
    )
    return chat, chat_draft


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory, decoder_folder: Path) -> LoadedModel:
    """Of the same name."""
    folder = tmp_path_factory.mktemp("other")
    shutil.copytree(decoder_folder, folder, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**weights, name: weights[name] + 0.1}, folder / "model.safetensors", {"format": "pt"})
    return load(ServedModel(name="chat", task=Task.GENERATION, path=str(folder)), CPU)


@dataclass
class Scene:
    """Runners of one engine, stepped by hand, over one store."""

    config: Any
    collector: Any
    shelf: Shelf
    woken: threading.Event = field(default_factory=threading.Event)
    runners: list[GenerationRunner] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.set(kv_reuse=KV)

    def set(self, **changes: Any) -> None:
        """Change the configuration."""
        stable = self.config.value.stable.model_copy(update=changes)
        if "kv_reuse" in changes:
            modes = {*stable.active_modes, Mode.KV_CACHE_REUSE}
            active = modes if changes["kv_reuse"] else modes - {Mode.KV_CACHE_REUSE}
            stable = EffectiveConfig.model_validate({**stable.model_dump(), "active_modes": tuple(active)})
        self.config.value = self.config.value.model_copy(update={"stable": stable})
        self.shelf.store.follow(stable.kv_reuse)
        for runner in self.runners:
            runner.adapt()

    def start(self, model: LoadedModel, **options: Any) -> GenerationRunner:
        digest = ContentDigest(WeightFiles.of(Path(model.served.path)), model.served.digest, self.woken.set)
        reuse = KVReuse(self.shelf, digest, model, make_forward(model), self.config, self.woken.set)
        metrics = EngineMetrics(RuntimeSettings()).of(model.served.name)
        limits = Limits(**options.pop("limits", {}))
        runner = GenerationRunner(model, limits, self.config, metrics, kv=reuse, **options)
        runner.warm_up(1 << 30)
        runner.adapt()
        self.runners.append(runner)
        self.wait(lambda: reuse.block_tokens > 0)
        return runner

    def wait(self, until: Callable[[], bool]) -> None:
        while not until():
            assert self.woken.wait(SECONDS), "nobody woke the engine"
            self.woken.clear()

    def submit(self, runner: GenerationRunner, request_id: str, prompt: list[int], **fields: Any) -> None:
        own = {name: fields.pop(name) for name in list(fields) if name in Generate.__annotations__}
        request = Generate(
            request_id, "chat", prompt, Sampling(**{"max_tokens": 12, "temperature": 0.0, **fields}), **own
        )
        runner.submit((self.collector, request_id), request)

    def finish(self, runner: GenerationRunner) -> None:
        """Until all is answered and kept."""
        while runner.running or runner.waiting:
            self.wait(lambda: runner.can_step)
            self.collector.take(runner.step())
        assert self.shelf.store.settle(SECONDS)

    def ask(self, runner: GenerationRunner, request_id: str, prompt: list[int], **fields: Any) -> Done:
        self.submit(runner, request_id, prompt, **fields)
        self.finish(runner)
        done: Done = self.collector.dones[request_id]
        assert done.failure is None, done.failure
        return done

    def found(self, runner: GenerationRunner, prompt: list[int], tenant: str = "") -> Prefix | None:
        """What the store has for a prompt."""
        assert runner.kv is not None
        scope = runner.kv.scope(tenant, KV)
        assert scope is not None
        done = threading.Event()
        lookup = self.shelf.store.find(scope, prompt, done.set)
        assert lookup.is_done or done.wait(SECONDS)
        return lookup.prefix


@pytest.fixture
def scene(config: Any, collector: Any) -> Iterator[Scene]:
    scene = Scene(config, collector, Shelf.open(EngineMetrics(RuntimeSettings()), None, "auto"))
    yield scene
    for runner in scene.runners:
        runner.close()
    scene.shelf.store.close()


def continued_ids(model: LoadedModel, prompt: list[int], prefix: Prefix | None, max_tokens: int = 12) -> list[int]:
    """Greedy decoding by hand that starts from the same keys and values."""
    forward = make_forward(model)
    cache, known = forward.new_cache(1), 0
    if prefix is not None:
        cache.fill(0, prefix.keys, prefix.values)
        known = prefix.tokens
    ids, feed = list[int](), prompt[known:]
    while len(ids) < max_tokens:
        ids.append(int(forward([feed], cache)[0].argmax()))
        feed = ids[-1:]
    return ids


def continued(model: LoadedModel, prompt: list[int], prefix: Prefix | None) -> str:
    return str(model.tokenizer.tokenizer.decode(continued_ids(model, prompt, prefix)))


# -- caches


@pytest.mark.parametrize("architecture", ["Llama", "Qwen2", "Qwen3", "Mistral", "GPTNeoX"])
def test_what_a_cache_is_given_counts_as_what_it_computed(
    architecture: str, tmp_path: Path, new_decoder: Callable[..., Path]
) -> None:
    """Rows with and without a beginning, in blocks of several sizes, in one forward."""
    folder = new_decoder(tmp_path, architecture)
    forward = make_forward(load(ServedModel(name="chat", task=Task.GENERATION, path=str(folder)), CPU))
    prompts = [tokens(length, seed) for seed, length in enumerate((60, 20, 150, 9, 140))]
    beginnings = [40, 0, 128, 8, 16]
    whole = forward.new_cache(len(prompts))
    expected = forward(prompts, whole)
    cache = forward.new_cache(len(prompts))
    for row, beginning in enumerate(beginnings):
        if beginning:
            keys, values = whole.read(row, 0, beginning)
            assert keys.shape == values.shape == (3, keys.shape[1], beginning, keys.shape[3])
            cache.fill(row, keys, values, len(prompts[row]) - beginning)
    assert cache.lengths == beginnings
    rest = [prompt[beginning:] for prompt, beginning in zip(prompts, beginnings, strict=True)]
    torch.testing.assert_close(forward(rest, cache), expected, rtol=1e-4, atol=1e-4)
    for row, prompt in enumerate(prompts):
        for filled, computed in zip(cache.read(row, 5, len(prompt)), whole.read(row, 5, len(prompt)), strict=True):
            torch.testing.assert_close(filled, computed, rtol=1e-4, atol=1e-4)
    for _ in range(2):
        step = [[3]] * len(prompts)
        torch.testing.assert_close(forward(step, cache), forward(step, whole), rtol=1e-4, atol=1e-4)


def test_models_whose_keys_depend_on_the_length_of_the_prompt_share_nothing(
    tmp_path: Path, new_decoder: Callable[..., Path]
) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    folder = new_decoder(tmp_path, rope_parameters=rope)
    model = load(ServedModel(name="chat", task=Task.GENERATION, path=str(folder)), CPU)
    assert "dynamic" in why_not(model)


# -- what a prompt gets


@pytest.mark.parametrize("pipeline", [None, PIPELINE], ids=["inline", "pipeline"])
@pytest.mark.parametrize("speculative", [None, SPECULATIVE], ids=["plain", "speculative"])
def test_an_answer_is_that_of_the_keys_and_values_it_began_with(
    scene: Scene,
    decoder: LoadedModel,
    draft: LoadedModel,
    speculative: SpeculativeConfig | None,
    pipeline: SamplerPipelineConfig | None,
) -> None:
    scene.set(speculative=speculative, sampler_pipeline=pipeline)
    runner = scene.start(decoder, draft=draft)
    history, answered = tokens(30), []
    for turn in range(4):
        history = history + tokens(13, turn)
        prefix = scene.found(runner, history)
        expected = continued(decoder, history, prefix)
        done = scene.ask(runner, str(turn), history)
        assert done.cached_tokens == (prefix.tokens if prefix else 0)
        assert done.prompt_tokens == len(history)
        assert scene.collector.text(str(turn)) == expected
        answered.append(done.cached_tokens)
    # Each turn finds the whole blocks of the one before.
    assert answered == [0, 43 // BLOCK * BLOCK, 56 // BLOCK * BLOCK, 69 // BLOCK * BLOCK]
    assert bool(speculative) == any(done.accepted_tokens for done in scene.collector.dones.values())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("is_own", [True, False], ids=["sixfold", "transformers"])
def test_on_a_gpu(is_own: bool, scene: Scene, tmp_path: Path, new_decoder: Callable[..., Path]) -> None:
    """Through pinned memory in both directions, beside requests that decode."""
    folder = new_decoder(tmp_path, "Llama" if is_own else "GPTNeoX")
    model = load(ServedModel(name="chat", task=Task.GENERATION, path=str(folder)), torch.device("cuda"))
    runner = scene.start(model)
    prompt = tokens(40)
    scene.submit(runner, "mate", tokens(30, 1), max_tokens=60)
    scene.ask(runner, "0", prompt)
    prefix = scene.found(runner, [*prompt, 5])
    assert prefix is not None and prefix.tokens == 40 and prefix.keys.is_pinned()
    scene.submit(runner, "mate2", tokens(30, 2), max_tokens=60)
    assert scene.ask(runner, "1", [*prompt, 5]).cached_tokens == 40
    assert scene.collector.text("1") == continued(model, [*prompt, 5], prefix)


def test_the_answer_is_kept_too(scene: Scene, decoder: LoadedModel) -> None:
    runner = scene.start(decoder)
    prompt = tokens(20)
    done = scene.ask(runner, "first", prompt, max_tokens=30)
    assert done.completion_tokens == 30
    answer = continued_ids(decoder, prompt, None, 30)
    prefix = scene.found(runner, [*prompt, *answer, *tokens(20)])
    assert prefix is not None and prefix.tokens == 48, "whole blocks; the last token of an answer was never fed"


@pytest.mark.parametrize("pipeline", [None, PIPELINE], ids=["inline", "pipeline"])
@pytest.mark.parametrize("length", [25, 26, 27, 28])
def test_what_is_kept_is_what_the_context_has(
    length: int, pipeline: SamplerPipelineConfig | None, scene: Scene, pair: tuple[LoadedModel, LoadedModel]
) -> None:
    """Wherever in a draft the answer ends, rejected tokens are none of it."""
    target, draft = pair
    scene.set(speculative=SPECULATIVE, sampler_pipeline=pipeline)
    runner = scene.start(target, draft=draft)
    prompt = target.tokenizer.tokenizer.encode("ROMEO:\nI come with letters from the king").ids
    for mate in range(2):
        scene.submit(runner, f"mate{mate}", prompt[: 9 + mate], max_tokens=15)
    done = scene.ask(runner, "a", prompt, max_tokens=length)
    assert done.completion_tokens == length and 0 < done.accepted_tokens < done.drafted_tokens
    context = prompt + continued_ids(target, prompt, None, length)
    prefix = scene.found(runner, [*context, 5])
    assert prefix is not None and prefix.tokens >= (len(context) - 1) // BLOCK * BLOCK
    forward = make_forward(target)
    cache = forward.new_cache(1)
    forward([context], cache)
    for kept, computed in zip((prefix.keys, prefix.values), cache.read(0, 0, prefix.tokens), strict=True):
        # Half a step of the largest number, and what rounding in layer after layer makes of float32.
        torch.testing.assert_close(kept, computed, rtol=0, atol=float(computed.abs().max()) / 127)


def test_batch_mates_with_different_beginnings(scene: Scene, decoder: LoadedModel) -> None:
    runner = scene.start(decoder, limits={"prefill_tokens": 256})
    beginnings = {name: tokens(length, length) for name, length in (("a", 33), ("b", 90), ("c", 17), ("d", 140))}
    for name in "abd":
        scene.ask(runner, f"{name}0", beginnings[name])
    prompts = {name: beginning + tokens(11, 99) for name, beginning in beginnings.items()}
    expected = {name: continued(decoder, prompt, scene.found(runner, prompt)) for name, prompt in prompts.items()}
    for name, prompt in prompts.items():
        scene.submit(runner, name, prompt)
    assert runner.waiting == 4
    scene.finish(runner)
    assert {name: scene.collector.text(name) for name in prompts} == expected
    cached = [scene.collector.dones[name].cached_tokens for name in "abcd"]
    assert cached == [32, 88, 0, 136]


def test_one_that_needs_no_lookup_passes_those_that_wait(scene: Scene, decoder: LoadedModel) -> None:
    runner = scene.start(decoder)
    scene.ask(runner, "0", tokens(40))
    scene.submit(runner, "waits", [*tokens(40), 5])
    scene.submit(runner, "short", tokens(4, 1))
    assert runner.waiting == 2
    while "short" not in scene.collector.tokens:
        scene.collector.take(runner.step())
    scene.finish(runner)
    assert scene.collector.dones["waits"].cached_tokens == 40


def test_prompts_that_wait_take_bounded_memory(
    scene: Scene, decoder: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One prefix at a time fits: the others are looked up when it is in use, in their order."""
    monkeypatch.setattr(kv_queue, "_AHEAD_BYTES", 1)
    runner = scene.start(decoder, limits={"max_running": 1})
    prompt = tokens(40)
    scene.ask(runner, "0", prompt)
    for index in range(1, 6):
        scene.submit(runner, str(index), [*prompt, index + 2])
    scene.finish(runner)
    assert [scene.collector.dones[str(index)].cached_tokens for index in range(1, 6)] == [40] * 5
    assert list(scene.collector.dones) == list("012345")


def test_a_long_answer_is_kept_in_pieces(scene: Scene, decoder: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the rest of it after the next answer, where the store doesn't take all at once."""
    token_bytes = 2 * 3 * 2 * 8 * 4
    monkeypatch.setattr(kv_reuse, "_PIECE_BYTES", 3 * BLOCK * token_bytes)
    monkeypatch.setattr(kv_reuse, "QUEUE_BYTES", 6 * BLOCK * token_bytes)
    runner, prompt = scene.start(decoder), tokens(100)
    cached = [scene.ask(runner, str(turn), prompt, max_tokens=5).cached_tokens for turn in range(4)]
    assert cached == [0, 6 * BLOCK, 12 * BLOCK, 12 * BLOCK]


# -- what comes between


def test_cancelling_while_a_prompt_is_looked_up(scene: Scene, decoder: LoadedModel) -> None:
    runner = scene.start(decoder)
    scene.ask(runner, "0", tokens(40))
    scene.submit(runner, "gone", [*tokens(40), 5])
    assert (runner.waiting, runner.running) == (1, 0)
    runner.cancel((scene.collector, "gone"))
    assert (runner.waiting, runner.running, runner.can_step) == (0, 0, False)
    assert scene.ask(runner, "next", [*tokens(40), 6]).cached_tokens == 40
    assert list(scene.collector.dones) == ["0", "next"]


def test_a_cancelled_answer_is_not_kept(scene: Scene, decoder: LoadedModel) -> None:
    runner = scene.start(decoder)
    scene.submit(runner, "gone", tokens(40), max_tokens=50)
    while "gone" not in scene.collector.tokens:
        scene.wait(lambda: runner.can_step)
        scene.collector.take(runner.step())
    runner.cancel((scene.collector, "gone"))
    assert scene.shelf.store.settle(SECONDS)
    assert scene.found(runner, tokens(40)) is None


def test_those_that_wait_are_given_back_when_the_weights_go(scene: Scene, decoder: LoadedModel) -> None:
    runner, other = scene.start(decoder, limits={"max_running": 1}), scene.start(decoder)
    prompt = tokens(40)
    scene.ask(runner, "0", prompt)
    for name in ("running", "queued", "looked up"):
        scene.submit(runner, name, prompt, max_tokens=3)
        if name != "looked up":
            scene.wait(lambda: runner.can_step)
            scene.collector.take(runner.step())
    withdrawn = runner.withdraw()
    assert [key[1] for key, _ in withdrawn] == ["queued", "looked up"]
    for key, request in withdrawn:
        other.submit(key, request)
    scene.finish(runner)
    scene.finish(other)
    assert {name: done.cached_tokens for name, done in scene.collector.dones.items()} == {
        "0": 0, "running": 32, "queued": 32, "looked up": 32,
    }  # fmt: skip


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
