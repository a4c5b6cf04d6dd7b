"""What generation counts as useful and wasted, and whom it charges the engine's time: real runners on real models."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode

from sixfold_api.generation import DraftLength, Overlap
from sixfold_api.kv_reuse import KVStore
from sixfold_api.modes import Mode
from sixfold_api.runtime_config import (
    CanaryConfig,
    EffectiveConfig,
    KVReuseConfig,
    SamplerPipelineConfig,
    ServedModel,
    SpeculativeConfig,
)
from sixfold_api.scalars import Task
from sixfold_runtime.config import default_config
from sixfold_runtime.engine.forward import make_forward
from sixfold_runtime.engine.generation import GenerationRunner
from sixfold_runtime.engine.kv_reuse import KVReuse
from sixfold_runtime.engine.kv_shelf import Shelf
from sixfold_runtime.engine.loader import LoadedModel, load
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.engine.protocol import Done, Generate, Sampling
from sixfold_runtime.engine.scheduler import Limits
from sixfold_runtime.engine.weight_files import ContentDigest, WeightFiles
from sixfold_runtime.engine.weight_loader import Place
from sixfold_runtime.engine.weight_sets import WeightSets
from sixfold_runtime.settings import RuntimeSettings

CPU = torch.device("cpu")
MODELS = Path(__file__).parents[3] / "examples" / "models"
SECONDS = 60.0
KV = KVReuseConfig(
    store=KVStore.MEMORY,
    ttl_seconds=600,
    max_bytes=2**24,
    memory_bytes=2**24,
    block_tokens=8,
    min_prompt_tokens=9,
)
SPECULATIVE = SpeculativeConfig(num_tokens=4, length=DraftLength.FIXED)
PADDING, REJECTED, RECOMPUTED, CANCELLED = "padding", "rejected_draft", "recomputed_prefix", "cancelled"


def tokens(length: int, seed: int = 0) -> list[int]:
    return torch.randint(2, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class Bench:
    """A runner that is stepped by hand, and what it has counted."""

    def __init__(self, config: Any, collector: Any) -> None:
        self.config, self.collector = config, collector
        self.metrics = EngineMetrics(RuntimeSettings())
        self.shelf = Shelf.open(self.metrics, None, "cpu")
        self.woken = threading.Event()
        self.runner: Any = None

    def set(self, **changes: Any) -> None:
        stable = self.config.value.stable.model_copy(update=changes)
        if "kv_reuse" in changes:
            modes = {*stable.active_modes, Mode.KV_CACHE_REUSE}
            active = modes if changes["kv_reuse"] else modes - {Mode.KV_CACHE_REUSE}
            stable = EffectiveConfig.model_validate({**stable.model_dump(), "active_modes": tuple(active)})
        self.config.value = self.config.value.model_copy(update={"stable": stable})
        self.shelf.follow(stable.kv_reuse)
        if self.runner is not None:
            self.runner.adapt()

    def start(self, model: LoadedModel, draft: LoadedModel | None = None, **limits: Any) -> GenerationRunner:
        digest = ContentDigest(WeightFiles.of(Path(model.served.path)), model.served.digest, self.woken.set)
        reuse = KVReuse(self.shelf, digest, model, make_forward(model), self.config, self.woken.set)
        series = self.metrics.of(model.served.name)
        self.runner = GenerationRunner(model, Limits(**limits), self.config, series, draft=draft, kv=reuse)
        self.runner.warm_up(1 << 30)
        self.runner.adapt()
        return self.runner

    def wait(self, until: Callable[[], bool]) -> None:
        while not until():
            assert self.woken.wait(SECONDS), "nobody woke the engine"
            self.woken.clear()

    def submit(self, name: str, prompt: list[int], max_tokens: int = 12, **fields: Any) -> None:
        request = Generate(name, "chat", prompt, Sampling(max_tokens=max_tokens, temperature=0.0), **fields)
        self.runner.submit((self.collector, name), request)

    def finish(self) -> None:
        while self.runner.running or self.runner.waiting:
            self.wait(lambda: self.runner.can_step)
            self.collector.take(self.runner.step())
        assert self.shelf.store.settle(SECONDS)

    def ask(self, name: str, prompt: list[int], max_tokens: int = 12, **fields: Any) -> Done:
        self.submit(name, prompt, max_tokens, **fields)
        self.finish()
        done: Done = self.collector.dones[name]
        return done

    def flops(self, **labels: str) -> int:
        """Of all series that have these labels."""
        samples = [
            sample.value
            for metric in self.metrics.registry.collect()
            if metric.name == "sixfold_flops"
            for sample in metric.samples
            if sample.name == "sixfold_flops_total" and labels.items() <= sample.labels.items()
        ]
        return round(sum(samples))

    @property
    def causes(self) -> set[str]:
        """Of what was wasted so far."""
        return {
            sample.labels["cause"]
            for metric in self.metrics.registry.collect()
            if metric.name == "sixfold_flops"
            for sample in metric.samples
            if sample.name == "sixfold_flops_total" and sample.labels["outcome"] == "wasted"
        }


@pytest.fixture
def bench(config: Any, collector: Any) -> Iterator[Bench]:
    bench = Bench(config, collector)
    yield bench
    bench.runner.close()
    bench.shelf.store.close()


@pytest.fixture(scope="module")
def noisy_draft(tmp_path_factory: pytest.TempPathFactory, new_decoder: Callable[..., Path]) -> LoadedModel:
    """The target with noise on its weights, so that some of its tokens are accepted and others aren't."""
    folder = new_decoder(tmp_path_factory.mktemp("draft"))
    torch.manual_seed(1)
    weights = {
        name: tensor + 0.03 * tensor.std() * torch.randn_like(tensor) if tensor.dim() > 1 else tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return load(ServedModel(name="draft", task=Task.GENERATION, path=str(folder)), CPU)


@pytest.fixture(scope="module")
def through_transformers(tmp_path_factory: pytest.TempPathFactory, new_decoder: Callable[..., Path]) -> LoadedModel:
    folder = new_decoder(tmp_path_factory.mktemp("mistral"), "Mistral", sliding_window=None)
    return load(ServedModel(name="chat", task=Task.GENERATION, path=str(folder)), CPU)


@pytest.fixture(params=["sixfold", "transformers"])
def model(request: pytest.FixtureRequest, decoder: LoadedModel, through_transformers: LoadedModel) -> LoadedModel:
    return decoder if request.param == "sixfold" else through_transformers


def counted(compute: Callable[[], Any]) -> int:
    """What torch counts, with the products that are written in place, which it leaves out."""

    def addmm_(total: Any, left: Any, right: Any, out_shape: Any = None, **_: Any) -> int:
        return int(2 * left[0] * left[1] * right[1])

    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: addmm_}) as mode:
        compute()
    return mode.get_total_flops()


def alone(model: LoadedModel, prompt_tokens: int, answer_tokens: int) -> int:
    """A prompt in one piece, then a token a step; the last one is never fed."""
    flops = make_forward(model).flops
    steps = sum(flops.forward(1, prompt_tokens + nth, 1) for nth in range(1, answer_tokens))
    return flops.forward(prompt_tokens, prompt_tokens**2, 1) + steps


# -- operations


def test_a_request_alone_costs_what_the_model_says(bench: Bench, model: LoadedModel) -> None:
    bench.start(model)
    assert bench.ask("a", tokens(40)).completion_tokens == 12
    assert bench.flops() == bench.flops(outcome="useful", cause="", estimated="false") == alone(model, 40, 12)
    assert bench.causes == set()


def test_a_long_prompt_in_pieces_costs_what_its_pieces_cost(bench: Bench, model: LoadedModel) -> None:
    bench.start(model, prefill_tokens=32)
    bench.ask("a", tokens(70), max_tokens=1)
    flops = make_forward(model).flops
    pieces = [flops.forward(count, count * end, 1) for count, end in ((32, 32), (32, 64), (6, 70))]
    assert bench.flops() == bench.flops(outcome="useful") == sum(pieces)


@pytest.mark.parametrize("pipeline", [None, SamplerPipelineConfig(workers=2, overlap=Overlap.ALWAYS)])
def test_nothing_that_is_computed_goes_uncounted(
    bench: Bench, model: LoadedModel, noisy_draft: LoadedModel, pipeline: SamplerPipelineConfig | None
) -> None:
    """Useful and wasted operations together are those that torch counts, drafts and padding among them."""
    bench.set(speculative=SPECULATIVE, sampler_pipeline=pipeline)
    bench.start(model, noisy_draft, prefill_tokens=128)
    for seed, length in enumerate((5, 17, 40, 1, 90, 12)):
        bench.submit(str(seed), tokens(length, seed), max_tokens=20, speculative=seed != 2)
    assert bench.flops() == 0, "what hasn't ended may still turn out to be wasted"
    total = counted(bench.finish)
    assert bench.flops() == total
    assert bench.flops(cause=PADDING) > 0
    assert bench.flops(cause=REJECTED) > 0
    assert bench.causes == {PADDING, REJECTED}


def test_padding_is_where_rows_are_padded(bench: Bench, model: LoadedModel) -> None:
    """Three prompts of 7, 20 and 20 tokens: the linears of transformers compute the padding too."""
    bench.start(model)
    for seed, length in enumerate((7, 20, 20)):
        bench.submit(str(seed), tokens(length, seed), max_tokens=1)
    bench.finish()
    flops = make_forward(model).flops
    own = sum(flops.forward(length, length**2, 1) for length in (7, 20, 20))
    assert bench.flops(outcome="useful") == own
    if model.decoder is not None:  # rows of one span share its 20 queries and columns
        assert bench.flops(cause=PADDING) == flops.forward(0, 20**2 - 7**2)
    else:  # the logits of two positions are computed for every row
        assert bench.flops(cause=PADDING) == 3 * flops.forward(20, 20**2, 2) - own


def test_rows_of_one_length_pad_nothing(bench: Bench, model: LoadedModel) -> None:
    bench.start(model)
    for seed in range(3):
        bench.submit(str(seed), tokens(20, seed))
    bench.finish()
    assert bench.flops(outcome="useful") == 3 * alone(model, 20, 12)
    assert bench.causes == set()


def test_a_draft_that_is_always_right_wastes_nothing(bench: Bench, decoder: LoadedModel) -> None:
    bench.set(speculative=SPECULATIVE)
    bench.start(decoder, decoder)
    # One token of the prompt, two steps of 4 drafted tokens and one of the target's own.
    done = bench.ask("a", tokens(20), max_tokens=11)
    assert (done.drafted_tokens, done.accepted_tokens) == (8, 8)
    assert bench.causes == set()


def test_a_rejected_draft_is_wasted_on_both_sides(bench: Bench, decoder: LoadedModel, noisy_draft: LoadedModel) -> None:
    """The target's part against what accepted tokens would have cost alone; the rest is the draft's."""
    bench.set(speculative=SPECULATIVE)
    bench.start(decoder, noisy_draft)
    done = bench.ask("a", tokens(20), max_tokens=60)
    assert 0 < done.accepted_tokens < done.drafted_tokens
    rejected = done.drafted_tokens - done.accepted_tokens
    target, draft = make_forward(decoder).flops, make_forward(noisy_draft).flops
    wasted = bench.flops(outcome="wasted")
    assert bench.causes == {REJECTED}
    least, most = (rejected * (target.forward(1, end, 1) + draft.forward(1, end, 1)) for end in (20, 20 + 60))
    # A rejected position also widened the rectangle of those that were accepted beside it.
    assert least < wasted < 1.1 * most
    assert bench.flops() == wasted + bench.flops(outcome="useful")


def test_the_example_pair_counts_what_torch_counts(bench: Bench) -> None:
    chat, draft = (
        load(ServedModel(name=name, task=Task.GENERATION, path=str(MODELS / name)), CPU)
        for name in ("chat", "chat-draft")
    )
    bench.set(speculative=SPECULATIVE)
    bench.start(chat, draft)
    encode = chat.tokenizer.tokenizer.encode
    for name, text in (("a", "HAMLET:\nTo be, or not to be"), ("b", "ROMEO:\nBut soft! What light")):
        bench.submit(name, encode(text).ids, max_tokens=30)
    assert counted(bench.finish) == bench.flops()
    assert {REJECTED} <= bench.causes <= {REJECTED, PADDING}


def test_all_that_was_computed_for_a_cancelled_request_is_wasted(
    bench: Bench, decoder: LoadedModel, noisy_draft: LoadedModel
) -> None:
    bench.set(speculative=SPECULATIVE)
    runner = bench.start(decoder, noisy_draft)
    bench.submit("gone", tokens(20), max_tokens=100)

    def steps() -> None:
        for _ in range(8):
            bench.collector.take(runner.step())

    total = counted(steps)
    runner.cancel((bench.collector, "gone"))
    assert bench.flops() == bench.flops(outcome="wasted", cause=CANCELLED, estimated="false") == total
    bench.submit("waits", tokens(20, 1))
    runner.cancel((bench.collector, "waits"))
    assert bench.flops() == total, "nothing was computed for it"


def test_a_step_on_its_way_is_counted_to_the_request_that_is_cancelled(bench: Bench, decoder: LoadedModel) -> None:
    bench.set(sampler_pipeline=SamplerPipelineConfig(workers=2, overlap=Overlap.ALWAYS))
    runner = bench.start(decoder)
    bench.submit("gone", tokens(20), max_tokens=100)

    def steps() -> None:
        for _ in range(5):
            bench.collector.take(runner.step())
        runner.cancel((bench.collector, "gone"))
        bench.collector.take(runner.step())

    assert counted(steps) == bench.flops(cause=CANCELLED) == bench.flops()


def test_level_and_arm_are_those_of_the_request(bench: Bench, decoder: LoadedModel) -> None:
    bench.config.set_level(3)
    canary = CanaryConfig(percent=50, config=default_config(1).stable)
    bench.config.value = bench.config.value.model_copy(update={"canary": canary})
    bench.start(decoder)
    bench.submit("stable", tokens(20))
    bench.submit("canary", tokens(20, 1), arm="canary")
    bench.submit("foreign", tokens(20, 2), arm="<script>")
    bench.finish()
    assert bench.flops(level="3", arm="stable") == 2 * alone(decoder, 20, 12)
    assert bench.flops(level="1", arm="canary") == alone(decoder, 20, 12)
    assert bench.flops() == 3 * alone(decoder, 20, 12)


# -- beginnings of prompts


def test_a_repeated_prompt_without_reuse_is_an_estimate(bench: Bench, model: LoadedModel) -> None:
    bench.start(model)
    bench.ask("first", tokens(100))
    assert bench.causes == set()
    bench.ask("again", tokens(100))
    # Blocks of 32 tokens: three of them, each token over all 100 columns.
    expected = make_forward(model).flops.forward(96, 96 * 100)
    assert bench.flops(cause=RECOMPUTED, estimated="true") == bench.flops(outcome="wasted") == expected
    assert bench.flops() == 2 * alone(model, 100, 12)


def test_the_next_turn_of_a_conversation_repeats_the_answer_too(bench: Bench, decoder: LoadedModel) -> None:
    bench.start(decoder, prefill_tokens=32)
    prompt = tokens(60)
    bench.ask("first", prompt, max_tokens=40)
    answer = decoder.tokenizer.tokenizer.encode(bench.collector.text("first")).ids
    context = [*prompt, *answer]
    bench.ask("next", [*context, *tokens(10, 5)], max_tokens=1)
    flops = make_forward(decoder).flops
    # The answer's last token was never fed, and text needn't be tokenised as it was generated: the prompt's block is
    # there for sure, and blocks are whole.
    wasted = bench.flops(cause=RECOMPUTED)
    assert wasted in [
        sum(flops.forward(32, 32 * end) for end in range(32, 32 * blocks + 1, 32)) for blocks in (1, 2, 3)
    ]


def test_with_reuse_the_waste_vanishes(bench: Bench, decoder: LoadedModel) -> None:
    bench.set(kv_reuse=KV)
    runner = bench.start(decoder)
    bench.wait(lambda: runner.kv is not None and runner.kv.block_tokens > 0)
    bench.ask("first", tokens(100))
    before = bench.flops()
    assert bench.ask("again", tokens(100)).cached_tokens == 96
    assert bench.causes == set()
    flops = make_forward(decoder).flops
    steps = alone(decoder, 100, 12) - flops.forward(100, 100**2, 1)
    assert bench.flops() - before == flops.forward(4, 4 * 100, 1) + steps


def test_what_reuse_has_lost_is_no_estimate(bench: Bench, decoder: LoadedModel) -> None:
    bench.set(kv_reuse=KV)
    runner = bench.start(decoder)
    bench.wait(lambda: runner.kv is not None and runner.kv.block_tokens > 0)
    bench.ask("first", tokens(100))
    bench.set(kv_reuse=KV.model_copy(update={"memory_bytes": 1}))  # evicts all
    assert bench.ask("again", tokens(100)).cached_tokens == 0
    assert bench.causes == {RECOMPUTED}
    expected = make_forward(decoder).flops.forward(96, 96 * 100)
    assert bench.flops(cause=RECOMPUTED, estimated="false") == expected


def test_tenants_and_those_who_opt_out_repeat_nothing_of_others(bench: Bench, decoder: LoadedModel) -> None:
    runner = bench.start(decoder)
    bench.ask("one", tokens(100), tenant="one")
    bench.ask("two", tokens(100), tenant="two")
    bench.ask("private", tokens(100), tenant="one", kv_reuse=False)
    assert bench.causes == set()
    runner.keep_nothing_of("one")
    bench.ask("erased", tokens(100), tenant="one")
    assert bench.causes == set()
    bench.ask("two again", tokens(100), tenant="two")
    assert bench.causes == {RECOMPUTED}


def test_a_model_that_cannot_reuse_repeats_nothing(
    bench: Bench, tmp_path: Path, new_decoder: Callable[..., Path]
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    folder = new_decoder(tmp_path, rope_parameters=rope)
    bench.start(load(ServedModel(name="chat", task=Task.GENERATION, path=str(folder)), CPU))
    for name in ("first", "again"):
        bench.ask(name, tokens(100))
    assert bench.causes == set()


# -- seconds and bytes


@pytest.mark.parametrize("overlap", [None, Overlap.ALWAYS])
def test_requests_are_charged_what_the_engine_was_busy(
    chat: ServedModel, config: Any, collector: Any, overlap: Overlap | None
) -> None:
    metrics = EngineMetrics(RuntimeSettings())
    pipeline = None if overlap is None else SamplerPipelineConfig(workers=2, overlap=overlap)
    stable = config.value.stable.model_copy(update={"sampler_pipeline": pipeline})
    config.value = config.value.model_copy(update={"stable": stable})
    metrics.config_applied(config.value)
    sets = WeightSets(chat, Place(CPU, Limits(prefill_tokens=64), 0.5), config, metrics)
    for seed, length in enumerate((5, 100, 40, 17)):
        request = Generate(str(seed), "chat", tokens(length, seed), Sampling(max_tokens=10 + 5 * seed, temperature=0.0))
        sets.submit((collector, str(seed)), request)
    while sets.can_step:
        collector.take(sets.step())
    sets.close()
    level = str(config.value.stable.level)
    labels = {"namespace": "default", "policy": "local", "variant": "chat", "level": level}
    busy = metrics.registry.get_sample_value("sixfold_engine_busy_seconds_total", labels)
    charged = [done.engine_seconds for done in collector.dones.values()]
    assert len(charged) == 4 and min(charged) > 0
    assert busy is not None
    assert sum(charged) <= 1.0001 * busy
    print(f"charged {sum(charged) / busy:.1%} of {busy:.3f} busy seconds")


class Clock:
    """Each look at it is a second later."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1
        return self.seconds


def test_a_failed_request_says_what_it_cost(decoder: LoadedModel, config: Any, collector: Any) -> None:
    runner = GenerationRunner(decoder, Limits(), config, EngineMetrics(RuntimeSettings()).of("chat"), clock=Clock())
    for index in range(2):
        runner.submit((collector, str(index)), Generate(str(index), "chat", tokens(9), Sampling(max_tokens=5)))
    collector.take(runner.step())
    decoder.decoder.embeddings, weights = decoder.decoder.embeddings * torch.nan, decoder.decoder.embeddings  # type: ignore[union-attr]
    try:
        while runner.running:
            collector.take(runner.step())
    finally:
        decoder.decoder.embeddings = weights  # type: ignore[union-attr]
    first, second = (collector.dones[name] for name in "01")
    assert first.failure is not None and first.failure.code == "non_finite_logits"
    assert first.engine_seconds == second.engine_seconds > 0, "they were computed alike"


def test_memory_that_holds_tokens(bench: Bench, decoder: LoadedModel) -> None:
    runner = bench.start(decoder)
    assert (runner.kv_bytes, runner.kv_used_bytes) == (0, 0)
    for seed, length in enumerate((30, 50)):
        bench.submit(str(seed), tokens(length, seed))
    bench.collector.take(runner.step())
    shape = decoder.decoder.cache_shape  # type: ignore[union-attr]
    assert runner.kv_used_bytes == (30 + 50) * shape.bytes_per_token
    assert runner.kv_bytes == 2 * 128 * shape.bytes_per_token, "two rows of the smallest capacity"
    bench.finish()
    assert (runner.kv_bytes, runner.kv_used_bytes) == (0, 0)
