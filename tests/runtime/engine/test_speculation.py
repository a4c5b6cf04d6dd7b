"""Speculation in the generation loop, stepped by hand on tiny models: who gets drafts, and what can go wrong with them.

The draft is the target with noise on its weights, so that some of its tokens are accepted and others aren't.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sixfold_api.generation import DraftLength
from sixfold_api.runtime_config import ServedModel, SpeculativeConfig
from sixfold_api.scalars import Task
from sixfold_runtime.config import default_config
from sixfold_runtime.engine.generation import GenerationRunner
from sixfold_runtime.engine.loader import LoadedModel, load
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.engine.protocol import FinishReason, Generate, Sampling
from sixfold_runtime.engine.scheduler import Limits
from sixfold_runtime.settings import RuntimeSettings

CPU = torch.device("cpu")
NewRunner = Callable[..., GenerationRunner]
NewModel = Callable[..., LoadedModel]


def tokens(length: int, seed: int = 0) -> list[int]:
    return torch.randint(2, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def request(name: str, ids: list[int], *, speculative: bool = True, **sampling: Any) -> Generate:
    settings = Sampling(**{"temperature": 0.0, "max_tokens": 24, **sampling})
    return Generate(name, "chat", ids, settings, speculative=speculative)


PROMPTS = {str(seed): tokens(length, seed) for seed, length in enumerate((5, 17, 40, 1, 90, 12, 3, 64))}


@pytest.fixture
def new_model(tmp_path: Path, new_decoder: Callable[..., Path]) -> NewModel:
    """The tiny decoder of conftest, changed, with noise of a share of each weight's deviation."""
    made = iter(range(100))

    def make(noise: float = 0.0, dtype: torch.dtype = torch.float32, **changes: Any) -> LoadedModel:
        folder = tmp_path / str(next(made))
        folder.mkdir()
        new_decoder(folder, "Llama", **changes)
        weights = load_file(folder / "model.safetensors")
        torch.manual_seed(1)
        noisy = {
            name: (tensor + noise * tensor.std() * torch.randn_like(tensor)).to(dtype) if tensor.dim() > 1 else tensor
            for name, tensor in weights.items()
        }
        save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})
        return load(ServedModel(name="chat", task=Task.GENERATION, path=str(folder)), CPU)

    return make


@pytest.fixture
def draft(new_model: NewModel) -> LoadedModel:
    return new_model(noise=0.03)


@pytest.fixture
def speculating(decoder: LoadedModel, draft: LoadedModel) -> NewRunner:
    def make(
        drafting: LoadedModel | None = draft,
        num_tokens: int = 5,
        length: DraftLength = DraftLength.FIXED,
        target: LoadedModel = decoder,
        **limits: Any,
    ) -> GenerationRunner:
        config = default_config(2)
        speculative = SpeculativeConfig(num_tokens=num_tokens, length=length)
        config = config.model_copy(update={"stable": config.stable.model_copy(update={"speculative": speculative})})
        metrics = EngineMetrics(RuntimeSettings()).of("chat")
        runner = GenerationRunner(target, Limits(**limits), lambda: config, metrics, draft=drafting)
        runner.warm_up(1 << 30)
        return runner

    return make


def submit(runner: GenerationRunner, sink: Any, *requests: Generate) -> None:
    for wanted in requests:
        runner.submit((sink, wanted.id), wanted)


def finish(runner: GenerationRunner, sink: Any) -> None:
    for _ in range(1000):
        if not (runner.running or runner.waiting):
            return
        sink.take(runner.step())
    raise AssertionError("the runner still has work")


@pytest.fixture
def plain(speculating: NewRunner, new_collector: Callable[[], Any]) -> dict[str, str]:
    """What the prompts are answered without a draft."""
    runner, sink = speculating(None, max_running=1), new_collector()
    submit(runner, sink, *(request(name, ids) for name, ids in PROMPTS.items()))
    finish(runner, sink)
    return {name: sink.text(name) for name in PROMPTS}


@pytest.mark.parametrize("length", DraftLength)
def test_rows_accept_different_numbers_of_tokens(
    speculating: NewRunner, plain: dict[str, str], collector: Any, length: DraftLength
) -> None:
    runner = speculating(length=length, max_running=8)
    submit(runner, collector, *(request(name, ids) for name, ids in PROMPTS.items()))
    finish(runner, collector)
    assert {name: collector.text(name) for name in PROMPTS} == plain
    shares = {done.accepted_tokens for done in collector.dones.values()}
    assert len(shares) > 2, "the batch was ragged"
    assert any(0 < done.accepted_tokens < done.drafted_tokens for done in collector.dones.values())


def test_who_opts_out_gets_no_draft_in_the_same_batch(
    speculating: NewRunner, plain: dict[str, str], collector: Any
) -> None:
    runner = speculating(length=DraftLength.COST_MODEL, max_running=8)
    out = {"1", "4", "6"}
    submit(runner, collector, *(request(n, ids, speculative=n not in out) for n, ids in PROMPTS.items()))
    finish(runner, collector)
    assert {name: collector.text(name) for name in PROMPTS} == plain
    assert {name for name, done in collector.dones.items() if not done.drafted_tokens} == out


def test_sampled_and_greedy_requests_share_a_batch(
    speculating: NewRunner, plain: dict[str, str], collector: Any, new_collector: Callable[[], Any]
) -> None:
    seeded = request("seeded", tokens(20, 9), temperature=1.0, seed=3)
    alone, runner = new_collector(), speculating(None)
    submit(runner, alone, seeded)
    finish(runner, alone)
    runner = speculating(max_running=8)
    free = request("free", tokens(11, 10), temperature=1.0, top_p=0.9)
    submit(runner, collector, seeded, free, *(request(name, PROMPTS[name]) for name in "012"))
    finish(runner, collector)
    assert collector.text("seeded") == alone.text("seeded")
    assert {name: collector.text(name) for name in "012"} == {name: plain[name] for name in "012"}
    assert collector.dones["free"].completion_tokens == 24


def test_a_cancelled_request_leaves_the_others_as_they_are(
    speculating: NewRunner, plain: dict[str, str], collector: Any
) -> None:
    runner = speculating(max_running=8)
    submit(runner, collector, *(request(name, ids) for name, ids in PROMPTS.items()))
    for _ in range(3):
        collector.take(runner.step())
    gone = [name for name in ("1", "4") if name not in collector.dones]
    for name in gone:
        runner.cancel((collector, name))
    finish(runner, collector)
    left = set(PROMPTS) - set(gone)
    assert {name: collector.text(name) for name in left} == {name: plain[name] for name in left}
    assert not set(gone) & set(collector.dones)
    assert runner.kv_bytes == speculating(None).kv_bytes, "both caches are empty again"


def test_a_stop_string_inside_accepted_tokens_ends_the_answer_there(
    speculating: NewRunner, plain: dict[str, str], collector: Any, decoder: LoadedModel
) -> None:
    """The draft is the target itself, so that whole drafts are accepted; the stop is in the middle of one."""
    for name, text in plain.items():
        stop = text[len(text) // 2 : len(text) // 2 + 3]
        runner = speculating(decoder, num_tokens=8)
        submit(runner, collector, request(name, PROMPTS[name], stop=(stop,)))
        finish(runner, collector)
        assert collector.text(name) == text[: text.index(stop)], name
        done = collector.dones[name]
        assert done.finish_reason is FinishReason.STOP
        assert done.accepted_tokens < done.completion_tokens <= 24


def test_no_more_tokens_than_asked_for_and_none_beyond_the_context(speculating: NewRunner, collector: Any) -> None:
    runner = speculating(num_tokens=8)
    wanted = {"one": (tokens(20), 1), "two": (tokens(20), 2), "three": (tokens(20), 3), "full": (tokens(250), 99)}
    submit(runner, collector, *(request(n, ids, max_tokens=most) for n, (ids, most) in wanted.items()))
    finish(runner, collector)
    made = {name: done.completion_tokens for name, done in collector.dones.items()}
    assert made == {"one": 1, "two": 2, "three": 3, "full": 6}
    assert all(done.finish_reason is FinishReason.LENGTH for done in collector.dones.values())


def test_beyond_the_drafts_context_decoding_is_plain(
    speculating: NewRunner, plain: dict[str, str], collector: Any, new_model: NewModel
) -> None:
    """The draft has 48 positions: no draft for a longer prompt, and for a shorter one until it gets there."""
    short = new_model(noise=0.03, max_position_embeddings=48)
    runner = speculating(short, max_running=8)
    submit(runner, collector, *(request(name, ids) for name, ids in PROMPTS.items()))
    finish(runner, collector)
    assert {name: collector.text(name) for name in PROMPTS} == plain
    drafted = {name: done.drafted_tokens for name, done in collector.dones.items()}
    assert drafted["4"] == drafted["7"] == 0
    assert 0 < drafted["2"] < drafted["1"]


def test_nan_in_the_drafts_logits_ends_drafting_only(
    speculating: NewRunner, plain: dict[str, str], collector: Any, draft: LoadedModel
) -> None:
    """For the request that has it; the others are drafted for as before."""
    assert draft.decoder is not None
    runner = speculating(max_running=8)
    draft.decoder.embeddings[PROMPTS["2"][3]] = torch.nan
    submit(runner, collector, *(request(name, ids) for name, ids in PROMPTS.items()))
    finish(runner, collector)
    assert {name: collector.text(name) for name in PROMPTS} == plain
    assert collector.dones["2"].accepted_tokens == 0
    assert sum(done.accepted_tokens for done in collector.dones.values()) > 0
    assert runner.notes.unsupported == {}


def test_a_draft_that_raises_ends_drafting_only(
    speculating: NewRunner, plain: dict[str, str], collector: Any, draft: LoadedModel
) -> None:
    assert draft.decoder is not None
    runner = speculating(max_running=8)
    submit(runner, collector, *(request(name, ids) for name, ids in PROMPTS.items()))
    for _ in range(3):
        collector.take(runner.step())
    draft.decoder.embeddings = draft.decoder.embeddings[:1]  # the index is out of range from now on
    finish(runner, collector)
    assert {name: collector.text(name) for name in PROMPTS} == plain
    assert "drafting failed" in next(iter(runner.notes.unsupported.values()))


def test_nan_in_a_row_of_the_target_fails_that_request_only(
    speculating: NewRunner, plain: dict[str, str], collector: Any, new_model: NewModel
) -> None:
    target = new_model()
    assert target.decoder is not None
    runner = speculating(target=target, max_running=8)
    poisoned = PROMPTS["2"][3]
    spared = [name for name, ids in PROMPTS.items() if poisoned not in ids]
    target.decoder.embeddings[poisoned] = torch.nan
    submit(runner, collector, *(request(name, PROMPTS[name]) for name in ("2", *spared)))
    finish(runner, collector)
    failure = collector.dones["2"].failure
    assert failure is not None and failure.status == 500
    for name in spared:
        if collector.dones[name].failure is None:  # else it came to write the poisoned token itself
            assert collector.text(name) == plain[name]
    assert sum(collector.dones[name].failure is None for name in spared) >= 4


@pytest.mark.parametrize("changes", [{"dtype": torch.bfloat16}, {"vocab_size": 384}, {"num_hidden_layers": 1}])
def test_the_draft_may_have_another_type_padding_or_depth(
    speculating: NewRunner, plain: dict[str, str], collector: Any, new_model: NewModel, changes: dict[str, Any]
) -> None:
    """The target's vocabulary has 320 rows; a draft with 384 is padded, and what lies beyond is never proposed."""
    runner = speculating(new_model(noise=0.03, **changes), max_running=8)
    submit(runner, collector, *(request(name, ids) for name, ids in PROMPTS.items()))
    finish(runner, collector)
    assert {name: collector.text(name) for name in PROMPTS} == plain
    assert sum(done.drafted_tokens for done in collector.dones.values()) > 0
