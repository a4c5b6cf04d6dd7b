"""Prompts that begin with keys and values of earlier ones: what they get."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kv_scene import BLOCK, CPU, PIPELINE, SECONDS, SPECULATIVE, Scene, continued, continued_ids, opened, tokens

from sixfold_api.runtime_config import (
    SamplerPipelineConfig,
    ServedModel,
    SpeculativeConfig,
)
from sixfold_api.scalars import Task
from sixfold_runtime.engine import kv_queue, kv_reuse
from sixfold_runtime.engine.forward import make_forward
from sixfold_runtime.engine.kv_reuse import why_not
from sixfold_runtime.engine.loader import LoadedModel, load


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


@pytest.fixture
def scene(config: Any, collector: Any) -> Iterator[Scene]:
    with opened(config, collector) as scene:
        yield scene


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
