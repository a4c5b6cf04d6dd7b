"""What the generating model is asked, and which label its answer names."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from sixfold_runtime.gateway import escalation
from sixfold_runtime.gateway.errors import ApiError
from sixfold_runtime.gateway.escalation import named_label, written_prompt
from sixfold_runtime.gateway.tasks import asked_task

TRICKY = st.text("{}textlabels 0!%$\\\n", max_size=30)


@given(TRICKY | st.text(max_size=30), TRICKY, st.lists(TRICKY, max_size=3))
def test_texts_go_in_as_they_are(text: str, between: str, labels: list[str]) -> None:
    between = between.replace("{text}", "").replace("{labels}", "").replace("{text}", "").replace("{labels}", "")
    assert written_prompt("{text}", text, labels) == text
    if "{" not in between and "}" not in between:
        assert written_prompt(f"{{text}}{between}{{text}}", text, labels) == text + between + text


def test_other_braces_mean_nothing() -> None:
    template = "{0} {text.__class__} {{text}} %s {labels!r}"
    assert written_prompt(template, "{labels}", ["a"]) == "{0} {text.__class__} {{labels}} %s {labels!r}"


@pytest.mark.parametrize(
    ("labels", "listed"), [([], ""), (["a"], "a"), (["a", "b"], "a or b"), (["a", "b", "c"], "a, b or c")]
)
def test_labels_are_listed(labels: list[str], listed: str) -> None:
    assert written_prompt("{text}: {labels}", "x", labels) == f"x: {listed}"


@pytest.mark.parametrize(
    ("answer", "labels", "named"),
    [
        ("Positive, because it praises.", ["negative", "positive"], "positive"),
        ("It is NEGATIVE rather than positive", ["negative", "positive"], "negative"),
        ("goodness gracious", ["good"], None),
        ("so-so!", ["so", "so-so"], "so-so"),
        ("That is not good", ["good", "not good"], "not good"),
        ("C++ of course", ["C", "C++"], "C++"),
        ("c# then", ["C++", "C#"], "C#"),
        ("label_1", ["label", "label_1"], "label_1"),
        ("这是正面的评论", ["负面", "正面"], "正面"),
        ("(a|b)", ["(a|b)"], "(a|b)"),
        ("LABEL_0", ["label_0", "LABEL_0"], "label_0"),
        ("", ["a"], None),
        ("a", [], None),
        ("a", ["", "a"], "a"),
    ],
)
def test_the_label_that_an_answer_names_first(answer: str, labels: list[str], named: str | None) -> None:
    assert named_label(answer, labels) == named


@given(st.text(max_size=40), st.lists(st.text(max_size=6), max_size=4))
def test_any_answer_names_a_label_or_none(answer: str, labels: list[str]) -> None:
    named = named_label(answer, labels)
    assert named is None or named in labels


@given(st.lists(st.text("abc xyz", min_size=1, max_size=6), min_size=1, max_size=4))
def test_a_label_alone_names_itself(labels: list[str]) -> None:
    for label in labels:
        named = named_label(f"'{label}'", labels)
        assert named is not None
        assert len(named) >= len(label) or label not in f"'{named}'"


def test_the_examples_of_the_documentation() -> None:
    assert doctest.testmod(escalation).attempted
    assert doctest.testmod(escalation).failed == 0


@pytest.mark.parametrize(
    ("headers", "body", "task"),
    [
        ([], None, ""),
        (["ner"], None, "ner"),
        ([" ner "], "ner", "ner"),
        ([""], "ner", "ner"),
        (["ner", "ner"], None, "ner"),
        ([], "ner", "ner"),
    ],
)
def test_header_and_body_name_a_task(headers: list[str], body: str | None, task: str) -> None:
    raw = [(b"x-task", value.encode()) for value in headers]
    assert asked_task(Headers(raw=raw), body) == task


@pytest.mark.parametrize(("headers", "body"), [(["ner"], "pos"), (["ner", "pos"], None), (["NER"], "ner")])
def test_two_tasks_are_refused(headers: list[str], body: str | None) -> None:
    raw = [(b"x-task", value.encode()) for value in headers]
    with pytest.raises(ApiError, match="different tasks") as refused:
        asked_task(Headers(raw=raw), body)
    assert (refused.value.status, refused.value.param) == (400, "task")
