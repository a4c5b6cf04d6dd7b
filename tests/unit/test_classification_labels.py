"""The labels that an answer holds: as many as were asked for, best first."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sixfold_runtime.engine.classification_labels import ranked, token_labels
from sixfold_runtime.engine.protocol import LabelScore


@given(st.data(), st.integers(1, 6), st.integers(2, 9))
def test_each_text_gets_as_many_as_it_asked_for(data: st.DataObject, texts: int, width: int) -> None:
    scores = torch.rand(texts, width, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    counts = data.draw(st.lists(st.integers(1, width), min_size=texts, max_size=texts))
    labels = [f"l{index}" for index in range(width)]
    for row, (found, count) in enumerate(zip(ranked(scores, labels, counts), counts, strict=True)):
        by_score = sorted(zip(scores[row].tolist(), labels, strict=True), reverse=True)
        assert found == [LabelScore(label, score) for score, label in by_score[:count]]


def test_equal_scores_keep_the_labels_order() -> None:
    (found,) = ranked(torch.full((1, 40), 1 / 40), [str(index) for index in range(40)], [40])
    assert [entry.label for entry in found] == [str(index) for index in range(40)]


def test_a_few_of_very_many_labels() -> None:
    labels = [str(index) for index in range(100_000)]
    scores = torch.softmax(torch.randn(4, 100_000, generator=torch.Generator().manual_seed(1)), -1)
    for row, found in enumerate(ranked(scores, labels, [50] * 4)):
        best = scores[row].sort(descending=True)
        assert [int(entry.label) for entry in found] == best.indices[:50].tolist()
        assert [entry.score for entry in found] == best.values[:50].tolist()


def test_tokens_go_back_to_their_texts() -> None:
    scores = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.3, 0.7]])
    short, long = token_labels(scores, ["O", "PER"], [1, 2])
    assert [entry.label for entry in short] == ["O"]
    assert [entry.label for entry in long] == ["PER", "PER"]
    assert [round(entry.score, 6) for entry in long] == [0.8, 0.7]
