"""Classifiers in this process: labels, exits, tasks, and what can't be asked."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sixfold_api.classification import ExitRule
from sixfold_runtime.sdk import InferenceEngine, ModelLoadError, RequestError

CHAT = Path(__file__).parents[2] / "examples" / "models" / "chat"
TEXTS = ["hello there", "say", "a film to remember, and then some", "x y z", "one two three", "no"]
LAYERS = 4


@pytest.fixture(scope="module")
def engine(classifiers: Path) -> Iterator[InferenceEngine]:
    with InferenceEngine(classifiers / "intent", rule=ExitRule.FIXED, threshold=0.9, length_relaxation=0) as engine:
        yield engine


@pytest.fixture(autouse=True)
def all_modes(engine: InferenceEngine) -> None:
    engine.level = 3


@pytest.fixture
def copy_of(tmp_path: Path, classifiers: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(classifiers / name, tmp_path / name))


def test_one_text_and_several(engine: InferenceEngine) -> None:
    many = engine.classify(TEXTS)
    for text, together in zip(TEXTS, many, strict=True):
        alone = engine.classify(text)
        assert alone.label == together.label == alone.scores[0].label
        assert alone.score == alone.scores[0].score == pytest.approx(together.score, abs=1e-5)
        assert (alone.layers, alone.exited, alone.task, alone.tokens, alone.level) == (LAYERS, False, "", (), 3)
        assert len(alone.scores) == 3
    assert engine.classify([]) == []
    assert [len(result.scores) for result in engine.classify(TEXTS, top_k=2)] == [2] * len(TEXTS)


def test_more_texts_than_the_engine_queues(engine: InferenceEngine) -> None:
    results = engine.classify(TEXTS * 100)
    assert [result.label for result in results] == [result.label for result in engine.classify(TEXTS)] * 100


def test_sure_texts_leave_early(engine: InferenceEngine) -> None:
    early, full = engine.early_exit(TEXTS), engine.classify(TEXTS)
    assert {result.layers for result in early} > {LAYERS}
    for result, through in zip(early, full, strict=True):
        assert result.exited == (result.layers != LAYERS)
        assert result.score >= 0.9 if result.exited else result.score == pytest.approx(through.score, abs=1e-5)
    assert [score.label for score in engine.early_exit(TEXTS[0], top_k=1).scores] == [early[0].label]


def test_tasks(engine: InferenceEngine) -> None:
    topic = engine.classify(TEXTS, task="topic")
    assert {score.label for score in topic[0].scores} == {"sport", "music", "war", "food"}
    assert topic[0].task == "topic"
    text = "The  old dog ran,\nhome 你好"
    words = engine.classify(text, task="pos").tokens
    assert [text[word.start : word.end] for word in words] == [word.text for word in words]
    assert [word.text for word in words][:4] == ["The", "old", "dog", "ran"]
    assert {word.label for word in words} <= {"NOUN", "OTHER"}
    with pytest.raises(RequestError, match="topic") as refused:
        engine.classify("hello", task="poetry")
    assert (refused.value.status, refused.value.code) == (404, "task_not_found")


def test_tasks_can_be_chosen_and_kept(classifiers: Path) -> None:
    with InferenceEngine(classifiers / "intent", tasks=["topic"], pinned=["topic"], cache_bytes=10**6) as engine:
        assert engine.classify("hello", task="topic").label
        with pytest.raises(RequestError, match="topic"):
            engine.classify("hello", task="pos")


def test_a_trunk_without_a_head_has_tasks_only(classifiers: Path) -> None:
    with InferenceEngine(classifiers / "trunk") as engine:
        assert engine.classify("hello", task="topic").label
        with pytest.raises(RequestError) as refused:
            engine.classify("hello")
        assert (refused.value.status, refused.value.code) == (400, "task_required")


def test_a_model_that_labels_tokens(classifiers: Path) -> None:
    with InferenceEngine(classifiers / "tagger") as tagger:
        result = tagger.classify("an old dog")
        assert [word.text for word in result.tokens] == ["an", "old", "dog"]
        assert (result.label, result.scores, result.layers) == ("", (), LAYERS)
        with pytest.raises(ValueError, match="has none"):
            tagger.early_exit("an old dog")


def test_threads_share_the_engine(engine: InferenceEngine) -> None:
    alone = [engine.early_exit(text) for text in TEXTS]
    with ThreadPoolExecutor(len(TEXTS)) as pool:
        together = list(pool.map(lambda text: engine.early_exit(text), TEXTS))
    assert [(result.label, result.layers) for result in together] == [(result.label, result.layers) for result in alone]


def test_one_text_that_cant_be_served_fails_the_call_and_nothing_else(engine: InferenceEngine) -> None:
    with pytest.raises(RequestError, match="tokens") as refused:
        engine.classify([*TEXTS, "word " * 500])
    assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
    assert engine.classify("hello").label


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda engine: engine.generate("x"), "use classify"),
        (lambda engine: engine.speculate("x"), "use classify"),
        (lambda engine: engine.classify("x", task="pos", top_k=1), "top_k"),
        (lambda engine: engine.classify([b"x"]), "a list of strings"),
    ],
)
def test_what_cannot_be_asked(engine: InferenceEngine, call: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call(engine)


def test_exits_need_heads_and_a_level(engine: InferenceEngine, classifiers: Path) -> None:
    engine.level = 2
    with pytest.raises(ValueError, match="the level is 2, and early exit is on from level 3"):
        engine.early_exit("x")
    with InferenceEngine(classifiers / "trunk") as without, pytest.raises(ValueError, match="has none"):
        without.early_exit("x")


def test_exits_that_cant_be_used(copy_of: Callable[[str], Path], classifiers: Path) -> None:
    folder = copy_of("intent")
    (folder / "exits.safetensors").write_bytes((classifiers / "intent" / "exits.safetensors").read_bytes()[:500])
    with InferenceEngine(folder) as engine:
        assert engine.classify("hello").label, "the full model serves"
        with pytest.raises(ModelLoadError, match=r"exits\.safetensors"):
            engine.early_exit("hello")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("intent", {"draft": CHAT}, "classifies: draft"),
        ("intent", {"quantized": CHAT, "num_tokens": 3}, "classifies: num_tokens, quantized"),
        ("intent", {"threshold": 0.9}, "threshold is needed for rule: Fixed, and only there"),
        ("intent", {"rule": ExitRule.FIXED}, "threshold is needed"),
        ("intent", {"rule": ExitRule.FIXED, "threshold": 1.5}, "threshold is 1.5, must be 0 to 1"),
        ("intent", {"rule": ExitRule.QUANTILE, "max_disagreement": 0.1}, "maxDisagreement is for rule: Calibrated"),
        ("intent", {"pinned": ["poetry"]}, "poetry is none of the tasks; there are: pos, topic"),
        ("intent", {"level": 4}, "must be 0 to 3"),
        ("intent", {"heat": 1}, "unknown options: heat"),
    ],
)
def test_options_that_dont_fit(classifiers: Path, name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        InferenceEngine(classifiers / name, **options)


def test_options_of_classifiers_are_not_for_models_that_generate() -> None:
    with pytest.raises(ValueError, match="generates: rule"):
        InferenceEngine(CHAT, rule=ExitRule.QUANTILE)
    with InferenceEngine(CHAT) as engine:
        for call in (engine.classify, engine.early_exit):
            with pytest.raises(ValueError, match="use generate"):
                call("x")
        with pytest.raises(RequestError, match="task") as refused:
            engine.generate("x", task="verse", max_tokens=1)
        assert refused.value.status == 404


def test_a_folder_that_is_none_of_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json is missing"):
        InferenceEngine(tmp_path)
