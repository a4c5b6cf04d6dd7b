"""Classification: one forward a batch, and the same scores in any company."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sixfold_api.modes import Mode
from sixfold_api.runtime_config import EarlyExitConfig, ServedModel
from sixfold_api.scalars import Task
from sixfold_runtime.engine.classification import ClassificationRunner
from sixfold_runtime.engine.errors import RequestError
from sixfold_runtime.engine.loader import LoadedModel, load
from sixfold_runtime.engine.protocol import Classify, FinishReason

NewRunner = Callable[..., ClassificationRunner]


def tokens(length: int, seed: int = 0) -> list[int]:
    return torch.randint(2, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def submit(runner: ClassificationRunner, sink: Any, **texts: list[int]) -> None:
    for name, token_ids in texts.items():
        runner.submit((sink, name), Classify(name, "intent", token_ids))


def finish(runner: ClassificationRunner, sink: Any) -> int:
    steps = 0
    while runner.can_step:
        sink.take(runner.step())
        steps += 1
    return steps


@pytest.fixture(scope="module")
def electra(tmp_path_factory: pytest.TempPathFactory, classifier_folder: Path) -> LoadedModel:
    """An encoder that the engine has not itself: transformers computes it."""
    import transformers

    folder = tmp_path_factory.mktemp("electra")
    torch.manual_seed(8)
    config = transformers.ElectraConfig(
        vocab_size=320,
        embedding_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.3,
        num_labels=3,
    )
    transformers.ElectraForSequenceClassification(config).save_pretrained(folder)
    shutil.copy(classifier_folder / "tokenizer.json", folder)
    model = load(ServedModel(name="intent", task=Task.CLASSIFICATION, path=str(folder)), torch.device("cpu"))
    assert model.trunk is None
    return model


@pytest.fixture(params=["own trunk", "transformers module"])
def model(request: pytest.FixtureRequest, classifier: LoadedModel, electra: LoadedModel) -> LoadedModel:
    return classifier if request.param == "own trunk" else electra


@pytest.fixture
def shapes(electra: LoadedModel) -> Iterator[list[tuple[int, int]]]:
    """Of the module's forwards."""
    found: list[tuple[int, int]] = []
    hook = electra.module.register_forward_pre_hook(
        lambda _module, _args, kwargs: found.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    yield found
    hook.remove()


@torch.inference_mode()
def alone(model: LoadedModel, token_ids: list[int]) -> dict[str, float]:
    import transformers

    module = transformers.AutoModelForSequenceClassification.from_pretrained(model.served.path).eval()
    scores = module(torch.tensor([token_ids])).logits[0].softmax(-1)
    return dict(zip(model.labels, scores.tolist(), strict=True))


TEXTS = {"a": tokens(3), "b": tokens(60, 1), "c": tokens(17, 2), "d": tokens(1, 3)}


def check(runner: ClassificationRunner, model: LoadedModel, collector: Any) -> None:
    submit(runner, collector, **TEXTS)
    finish(runner, collector)
    for name, token_ids in TEXTS.items():
        done = collector.dones[name]
        assert done.finish_reason == FinishReason.STOP
        assert (done.prompt_tokens, done.completion_tokens) == (len(token_ids), 0)
        assert {score.label: score.score for score in done.scores} == pytest.approx(alone(model, token_ids), abs=1e-5)
        assert [score.score for score in done.scores] == sorted((score.score for score in done.scores), reverse=True)
    assert not collector.pieces, "a classification streams nothing"


def test_batch_and_alone_agree(new_classifier: NewRunner, model: LoadedModel, collector: Any) -> None:
    check(new_classifier(model, prefill_tokens=1000), model, collector)


def test_a_batch_of_a_module_is_one_padded_forward(
    new_classifier: NewRunner, electra: LoadedModel, shapes: list[tuple[int, int]], collector: Any
) -> None:
    runner = new_classifier(electra, prefill_tokens=1000)
    submit(runner, collector, **TEXTS)
    assert finish(runner, collector) == 1
    assert shapes == [(4, 60)]


@pytest.mark.parametrize(
    ("kind", "step_tokens", "first"), [("own trunk", 20, "abc"), ("transformers module", 100, "a")]
)
def test_batches_are_bounded_and_first_come_first_served(
    kind: str,
    step_tokens: int,
    first: str,
    new_classifier: NewRunner,
    classifier: LoadedModel,
    electra: LoadedModel,
    collector: Any,
) -> None:
    """A batch of a trunk's may take four steps, 80 tokens here; that of a module is one, and two padded texts too much
    for it."""
    runner = new_classifier(classifier if kind == "own trunk" else electra, prefill_tokens=step_tokens)
    submit(runner, collector, **TEXTS)
    while not collector.dones:
        collector.take(runner.step())
    assert sorted(collector.dones) == list(first)
    finish(runner, collector)
    assert sorted(collector.dones) == list("abcd")


SMALL = {
    "Llama": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
}


@pytest.mark.parametrize("pad_token_id", [0, None])
@pytest.mark.parametrize(("architecture", "is_own"), [("Llama", True), ("GPT2", False)])
def test_a_decoder_with_a_head_classifies_too(
    architecture: str,
    is_own: bool,
    pad_token_id: int | None,
    new_classifier: NewRunner,
    tmp_path: Path,
    classifier_folder: Path,
    collector: Any,
) -> None:
    import transformers

    torch.manual_seed(3)
    settings = getattr(transformers, f"{architecture}Config")(
        vocab_size=320, num_labels=2, pad_token_id=pad_token_id, bos_token_id=1, eos_token_id=1, **SMALL[architecture]
    )
    getattr(transformers, f"{architecture}ForSequenceClassification")(settings).save_pretrained(tmp_path)
    shutil.copy(classifier_folder / "tokenizer.json", tmp_path)
    model = load(ServedModel(name="m", task=Task.CLASSIFICATION, path=str(tmp_path)), torch.device("cpu"))
    assert (model.trunk is not None) == is_own
    check(new_classifier(model, prefill_tokens=1000), model, collector)


@pytest.mark.parametrize(
    ("token_ids", "code"),
    [([], "empty_prompt"), ([320], "invalid_token_ids"), ([5] * 65, "context_length_exceeded")],
)
def test_bad_requests_are_refused(token_ids: list[int], code: str, new_classifier: NewRunner, collector: Any) -> None:
    runner = new_classifier()
    with pytest.raises(RequestError) as caught:
        submit(runner, collector, bad=token_ids)
    assert (caught.value.status, caught.value.code) == (400, code)
    submit(runner, collector, good=[5] * 64)
    assert finish(runner, collector) == 1


def test_a_full_queue_refuses_and_cancelled_texts_are_not_computed(
    new_classifier: NewRunner, electra: LoadedModel, shapes: list[tuple[int, int]], collector: Any
) -> None:
    runner = new_classifier(electra, max_waiting=2)
    submit(runner, collector, a=[5], b=[6])
    with pytest.raises(RequestError) as caught:
        submit(runner, collector, c=[7])
    assert (caught.value.status, caught.value.code) == (503, "engine_overloaded")
    runner.cancel((collector, "a"))
    runner.cancel((collector, "never"))
    finish(runner, collector)
    assert list(collector.dones) == ["b"] and shapes == [(1, 1)]


def test_non_finite_logits_fail_only_their_request(
    new_classifier: NewRunner, electra: LoadedModel, collector: Any
) -> None:
    embedding = electra.module.electra.embeddings.word_embeddings.weight
    clean = embedding[300].clone()
    try:
        embedding[300] = float("nan")
        submit(runner := new_classifier(electra), collector, a=[5, 6], poisoned=[5, 300], b=[7])
        finish(runner, collector)
    finally:
        embedding[300] = clean
    failure = collector.dones["poisoned"].failure
    assert failure is not None and (failure.status, failure.code) == (500, "non_finite_logits")
    assert all(collector.dones[name].scores and collector.dones[name].failure is None for name in "ab")


def test_a_forward_that_raises_fails_its_batch_and_nothing_later(
    new_classifier: NewRunner, electra: LoadedModel, collector: Any
) -> None:
    runner = new_classifier(electra)

    def explode(*_: Any) -> None:
        raise RuntimeError("broken")

    hook = electra.module.register_forward_pre_hook(explode)
    submit(runner, collector, a=[5])
    finish(runner, collector)
    hook.remove()
    submit(runner, collector, b=[5])
    finish(runner, collector)
    assert collector.dones["a"].failure.code == "engine_error"
    assert collector.dones["b"].scores


def test_a_module_has_neither_exits_nor_tasks(
    new_classifier: NewRunner, electra: LoadedModel, config: Any, collector: Any
) -> None:
    stable = config().stable.model_copy(update={"early_exit": EarlyExitConfig()})
    config.value = config().model_copy(update={"stable": stable})
    runner = new_classifier(electra)
    assert "transformers computes" in runner.unsupported[Mode.EARLY_EXIT]
    with pytest.raises(RequestError) as caught:
        runner.submit((collector, "a"), Classify("a", "intent", [5], task="ner"))
    assert (caught.value.status, caught.value.code) == (400, "tasks_unsupported")
    submit(runner, collector, b=[5])
    finish(runner, collector)
    assert (collector.dones["b"].layers, collector.dones["b"].exited) == (None, False)


def test_the_level_is_the_one_at_the_forward(new_classifier: NewRunner, config: Any, collector: Any) -> None:
    runner = new_classifier(prefill_tokens=1)
    submit(runner, collector, a=[5] * 4, b=[6])
    collector.take(runner.step())
    config.set_level(0)
    finish(runner, collector)
    assert (collector.dones["a"].level, collector.dones["b"].level) == (3, 0)
