"""The generation loop, stepped by hand: what each request gets, whoever shares its batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sixfold_runtime.engine.errors import ModelLoadError, RequestError
from sixfold_runtime.engine.generation import GenerationRunner
from sixfold_runtime.engine.loader import LoadedModel
from sixfold_runtime.engine.protocol import FinishReason, Generate, Sampling

NewRunner = Callable[..., GenerationRunner]
GREEDY = {"temperature": 0.0, "max_tokens": 12}


def tokens(length: int, seed: int = 0) -> list[int]:
    return torch.randint(2, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def request(request_id: str, token_ids: list[int], **sampling: Any) -> Generate:
    return Generate(request_id, "chat", token_ids, Sampling(**{**GREEDY, **sampling}))


def submit(runner: GenerationRunner, sink: Any, *requests: Generate) -> None:
    for wanted in requests:
        runner.submit((sink, wanted.id), wanted)


def finish(runner: GenerationRunner, sink: Any, steps: int = 1000) -> None:
    for _ in range(steps):
        if not (runner.running or runner.waiting):
            return
        sink.take(runner.step())
    raise AssertionError("the runner still has work")


@cache
def reference(folder: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def expected_ids(model: LoadedModel, token_ids: list[int], max_tokens: int = 12) -> list[int]:
    """What transformers' own generate() writes."""
    generated = reference(model.served.path).generate(
        torch.tensor([token_ids]),
        attention_mask=torch.ones(1, len(token_ids), dtype=torch.long),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
        stop_strings=None,
    )
    ids: list[int] = generated[0, len(token_ids) :].tolist()
    return ids


def expected_text(model: LoadedModel, token_ids: list[int], max_tokens: int = 12) -> str:
    return str(model.tokenizer.tokenizer.decode(expected_ids(model, token_ids, max_tokens)))


LENGTHS = (5, 17, 40, 1, 90, 12, 3)


def test_greedy_output_equals_generate(new_runner: NewRunner, decoder: LoadedModel, collector: Any) -> None:
    """Batched prefill, chunked prefill (90 of 64) and batched decode together."""
    runner = new_runner(max_running=5, prefill_tokens=64)
    prompts = {str(seed): tokens(length, seed) for seed, length in enumerate(LENGTHS)}
    submit(runner, collector, *(request(name, prompt) for name, prompt in prompts.items()))
    finish(runner, collector)
    for name, prompt in prompts.items():
        assert collector.text(name) == expected_text(decoder, prompt), name
        done = collector.dones[name]
        assert (done.finish_reason, done.prompt_tokens) == (FinishReason.LENGTH, len(prompt))
        assert done.completion_tokens == collector.tokens[name] == 12
    assert runner.kv_bytes == 0


def test_requests_join_and_leave_between_steps(new_runner: NewRunner, decoder: LoadedModel, collector: Any) -> None:
    runner = new_runner(prefill_tokens=32)
    prompts = {name: tokens(length, length) for name, length in (("a", 9), ("b", 30), ("c", 70), ("d", 4))}
    submit(runner, collector, request("a", prompts["a"], max_tokens=20))
    for _ in range(3):
        collector.take(runner.step())
    submit(runner, collector, request("b", prompts["b"], max_tokens=3), request("c", prompts["c"], max_tokens=15))
    for _ in range(5):
        collector.take(runner.step())
    submit(runner, collector, request("d", prompts["d"], max_tokens=2))
    finish(runner, collector)
    for name, limit in (("a", 20), ("b", 3), ("c", 15), ("d", 2)):
        assert collector.text(name) == expected_text(decoder, prompts[name], limit), name


def test_a_running_stream_gets_a_token_in_every_step_whatever_arrives(new_runner: NewRunner, collector: Any) -> None:
    runner = new_runner(prefill_tokens=16)
    submit(runner, collector, request("stream", tokens(5), max_tokens=30))
    collector.take(runner.step())
    submit(runner, collector, *(request(f"long{seed}", tokens(150, seed)) for seed in range(3)))
    for step in range(20):
        collector.take(runner.step())
        assert collector.tokens["stream"] == step + 2


@pytest.mark.parametrize("victim", ["a", "b", "c"])
def test_a_cancelled_request_is_gone_and_the_others_go_on(
    victim: str, new_runner: NewRunner, decoder: LoadedModel, collector: Any
) -> None:
    runner = new_runner()
    prompts = {name: tokens(length, length) for name, length in (("a", 9), ("b", 30), ("c", 14))}
    submit(runner, collector, *(request(name, prompt) for name, prompt in prompts.items()))
    for _ in range(4):
        collector.take(runner.step())
    runner.cancel((collector, victim))
    assert runner.running == 2
    before = collector.tokens[victim]
    finish(runner, collector)
    assert collector.tokens[victim] == before and victim not in collector.dones
    for name in prompts.keys() - {victim}:
        assert collector.text(name) == expected_text(decoder, prompts[name])


def test_a_cancelled_prefill_stops_at_its_chunk(new_runner: NewRunner, decoder: LoadedModel, collector: Any) -> None:
    runner = new_runner(prefill_tokens=16)
    submit(runner, collector, request("long", tokens(200)), request("next", tokens(6, 1)))
    collector.take(runner.step())
    runner.cancel((collector, "long"))
    assert (runner.running, runner.waiting, runner.kv_bytes) == (0, 1, 0)
    finish(runner, collector)
    assert list(collector.dones) == ["next"]
    assert collector.text("next") == expected_text(decoder, tokens(6, 1))


def test_cancelling_what_waits_or_never_was(new_runner: NewRunner, collector: Any) -> None:
    runner = new_runner()
    submit(runner, collector, request("a", tokens(3)), request("b", tokens(3)))
    runner.cancel((collector, "a"))
    runner.cancel((collector, "never"))
    finish(runner, collector)
    assert list(collector.dones) == ["b"]


@given(data=st.data())
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_order_of_arrivals_and_cancellations_changes_no_answer(
    data: st.DataObject, new_runner: NewRunner, new_collector: Callable[[], Any], answers: dict[int, str]
) -> None:
    runner, collector = new_runner(max_running=4, prefill_tokens=24), new_collector()
    live: dict[str, int] = {}
    for name in map(str, range(8)):
        length = data.draw(st.sampled_from(sorted(answers)))
        live[name] = length
        submit(runner, collector, request(name, tokens(length, length)))
        for _ in range(data.draw(st.integers(0, 4))):
            collector.take(runner.step())
        if data.draw(st.booleans()):
            victim = data.draw(st.sampled_from(sorted(live)))
            if victim not in collector.dones:
                runner.cancel((collector, victim))
                del live[victim]
    finish(runner, collector)
    assert collector.dones.keys() == live.keys()
    for name, length in live.items():
        assert collector.text(name) == answers[length]
    assert runner.kv_bytes == 0


@pytest.fixture(scope="module")
def answers(decoder: LoadedModel) -> dict[int, str]:
    """transformers' answer to a prompt of each length."""
    return {length: expected_text(decoder, tokens(length, length)) for length in (1, 7, 20, 31, 60)}


def test_a_seed_decides_the_output_whoever_shares_the_batch(new_runner: NewRunner, collector: Any) -> None:
    sampled = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 20}
    runner = new_runner()
    submit(runner, collector, request("alone", tokens(8), **sampled, seed=5))
    finish(runner, collector)
    submit(runner, collector, request("first", tokens(30, 3), **sampled, seed=5))
    collector.take(runner.step())
    submit(
        runner,
        collector,
        request("same", tokens(8), **sampled, seed=5),
        request("other", tokens(8), **sampled, seed=6),
        request("greedy", tokens(8)),
    )
    finish(runner, collector)
    assert collector.text("same") == collector.text("alone")
    assert collector.text("other") != collector.text("alone")
    assert len({collector.text(name) for name in ("alone", "other", "greedy")}) == 3


def test_without_a_seed_two_answers_differ(new_runner: NewRunner, collector: Any) -> None:
    runner = new_runner()
    submit(runner, collector, *(request(str(i), tokens(8), temperature=2.0, max_tokens=20) for i in range(2)))
    finish(runner, collector)
    assert collector.text("0") != collector.text("1")


def test_stop_strings_end_a_stream_without_leaking(new_runner: NewRunner, decoder: LoadedModel, collector: Any) -> None:
    whole = expected_text(decoder, tokens(40, 2))
    stop = whole[5:8]
    runner = new_runner()
    submit(runner, collector, request("a", tokens(40, 2), stop=(stop, "never")))
    finish(runner, collector)
    assert collector.text("a") == whole[: whole.index(stop)]
    assert collector.dones["a"].finish_reason == FinishReason.STOP
    assert collector.dones["a"].completion_tokens < 12


def test_the_end_of_sequence_token_ends_a_stream(new_runner: NewRunner, decoder: LoadedModel, collector: Any) -> None:
    generated = expected_ids(decoder, tokens(7))
    length = generated.index(generated[4]) + 1
    runner = new_runner(replace(decoder, eos_ids=frozenset([generated[4]])))
    submit(runner, collector, request("a", tokens(7)))
    finish(runner, collector)
    done = collector.dones["a"]
    assert (done.finish_reason, done.completion_tokens) == (FinishReason.STOP, length)
    assert collector.text("a") == decoder.tokenizer.tokenizer.decode(generated[: length - 1])


@pytest.mark.parametrize(
    ("token_ids", "sampling", "code"),
    [
        ([], {}, "empty_prompt"),
        ([5, 320], {}, "invalid_token_ids"),
        ([-1], {}, "invalid_token_ids"),
        ([2**63], {}, "invalid_token_ids"),
        ([5] * 256, {}, "context_length_exceeded"),
        ([5] * 5000, {}, "context_length_exceeded"),
        ([5], {"max_tokens": 0}, "invalid_max_tokens"),
        ([5], {"max_tokens": -1}, "invalid_max_tokens"),
        ([5], {"temperature": -0.1}, "invalid_temperature"),
        ([5], {"temperature": float("nan")}, "invalid_temperature"),
        ([5], {"temperature": float("inf")}, "invalid_temperature"),
        ([5], {"top_p": 0.0}, "invalid_top_p"),
        ([5], {"top_p": 1.1}, "invalid_top_p"),
        ([5], {"top_p": float("nan")}, "invalid_top_p"),
    ],
)
def test_bad_requests_are_refused_and_the_next_one_works(
    token_ids: list[int], sampling: dict[str, Any], code: str, new_runner: NewRunner, collector: Any
) -> None:
    runner = new_runner()
    with pytest.raises(RequestError) as caught:
        submit(runner, collector, request("bad", token_ids, **sampling))
    assert (caught.value.status, caught.value.code) == (400, code)
    submit(runner, collector, request("good", [5]))
    finish(runner, collector)
    assert list(collector.dones) == ["good"]


@pytest.mark.parametrize(("prompt", "max_tokens", "generated"), [(250, 10**9, 6), (255, 5, 1), (1, 256, 255)])
def test_max_tokens_ends_at_the_context(
    prompt: int, max_tokens: int, generated: int, new_runner: NewRunner, collector: Any
) -> None:
    runner = new_runner()
    submit(runner, collector, request("a", tokens(prompt), max_tokens=max_tokens))
    finish(runner, collector)
    assert collector.dones["a"].completion_tokens == generated
    assert collector.dones["a"].finish_reason == FinishReason.LENGTH


def test_a_full_queue_refuses(new_runner: NewRunner, collector: Any) -> None:
    runner = new_runner(max_waiting=2)
    submit(runner, collector, request("a", tokens(3)), request("b", tokens(3)))
    with pytest.raises(RequestError) as caught:
        submit(runner, collector, request("c", tokens(3)))
    assert (caught.value.status, caught.value.code) == (503, "engine_overloaded")
    finish(runner, collector)
    assert sorted(collector.dones) == ["a", "b"]


def test_too_little_memory_cuts_the_context(new_runner: NewRunner, decoder: LoadedModel, collector: Any) -> None:
    runner = new_runner()
    runner.warm_up(384 * 100)
    assert runner.context_tokens == 100
    with pytest.raises(RequestError, match="the context of 100 allows 99"):
        submit(runner, collector, request("a", tokens(100)))
    with pytest.raises(ModelLoadError, match="no memory for a KV cache"):
        runner.warm_up(384)


def test_non_finite_logits_fail_only_their_request(new_runner: NewRunner, decoder: LoadedModel, collector: Any) -> None:
    assert decoder.decoder is not None
    embedding = decoder.decoder.embeddings
    clean = embedding[0].clone()
    prompts = {"a": tokens(30, 1), "b": tokens(9, 2)}
    texts = {name: expected_text(decoder, prompt) for name, prompt in prompts.items()}
    runner = new_runner()
    try:
        embedding[0] = float("nan")
        submit(runner, collector, request("a", prompts["a"]), request("poisoned", [5, 0]), request("b", prompts["b"]))
        finish(runner, collector)
        submit(runner, collector, request("later", prompts["b"]))
        finish(runner, collector)
    finally:
        embedding[0] = clean
    failure = collector.dones["poisoned"].failure
    assert failure is not None and (failure.status, failure.code) == (500, "non_finite_logits")
    assert collector.dones["poisoned"].finish_reason == FinishReason.ERROR
    assert collector.text("poisoned") == ""
    assert {name: collector.text(name) for name in prompts} == texts
    assert collector.text("later") == texts["b"]


def test_a_forward_that_raises_fails_its_requests_and_nothing_later(
    new_runner: NewRunner, decoder: LoadedModel, collector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = new_runner(prefill_tokens=32)
    submit(runner, collector, request("a", tokens(5)), request("b", tokens(20, 1)))
    collector.take(runner.step())

    def explode(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(decoder.decoder, "logits", explode)
        collector.take(runner.step())
    submit(runner, collector, request("c", tokens(9, 2)))
    finish(runner, collector)
    assert {collector.dones[name].failure.code for name in "ab"} == {"out_of_memory"}
    assert collector.text("c") == expected_text(decoder, tokens(9, 2))


def test_a_request_keeps_the_level_at_which_it_began(new_runner: NewRunner, config: Any, collector: Any) -> None:
    runner = new_runner(max_running=1)
    config.set_level(3)
    submit(runner, collector, request("running", tokens(3)), request("queued", tokens(3)))
    collector.take(runner.step())
    config.set_level(1)
    finish(runner, collector)
    assert (collector.dones["running"].level, collector.dones["queued"].level) == (3, 1)
    assert collector.levels == {"running": [3], "queued": [1]}, "told once, with the first chunk"


def test_text_split_over_tokens_never_shows_half_a_character(
    new_runner: NewRunner, decoder: LoadedModel, collector: Any
) -> None:
    """Random weights write mostly invalid UTF-8: the pieces must add up to what decoding at once gives."""
    runner = new_runner()
    for seed in range(6):
        submit(runner, collector, request(str(seed), tokens(6, seed), temperature=1.5, seed=seed, max_tokens=12))
    finish(runner, collector)
    assert any("\N{REPLACEMENT CHARACTER}" in collector.text(str(seed)) for seed in range(6))
    assert all(collector.tokens[str(seed)] == 12 for seed in range(6))
