"""Which texts make a batch: first come, first served, within rows and tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sixfold_runtime.engine.classification_queue import BatchSize, Text, TextQueue
from sixfold_runtime.engine.errors import RequestError
from sixfold_runtime.engine.protocol import Chunk, Classify, Done


class Nobody:
    def deliver(self, chunks: list[Chunk], dones: list[Done]) -> None:
        raise AssertionError("a queue answers nothing")


SINK = Nobody()


def queue_of(*lengths: int) -> TextQueue:
    queue = TextQueue(1000, None)
    for number, length in enumerate(lengths):
        queue.add(Text((SINK, str(number)), Classify(str(number), "intent", [5] * length), 0.0))
    return queue


def names(texts: list[Text]) -> list[str]:
    return [text.key[1] for text in texts]


@pytest.mark.parametrize(
    ("lengths", "padded", "packed"),
    [
        ([], 0, 0),
        ([900], 1, 1),
        ([10, 10, 10], 3, 3),
        ([10, 40, 10], 2, 3),
        ([50, 50, 50], 2, 2),
        ([1, 99, 1], 1, 2),
        ([1] * 9, 4, 4),
    ],
)
def test_a_batch_is_bounded_in_rows_and_positions(lengths: list[int], padded: int, packed: int) -> None:
    for is_padded, count in ((True, padded), (False, packed)):
        batch, refused = queue_of(*lengths).form(BatchSize(4, 100, is_padded))
        assert (len(batch), refused) == (count, [])


@given(st.lists(st.integers(1, 300), max_size=40), st.integers(1, 8), st.integers(1, 400), st.booleans())
def test_every_text_is_taken_once_and_in_order(lengths: list[int], rows: int, tokens: int, padded: bool) -> None:
    queue, taken = queue_of(*lengths), []
    while queue.can_form:
        size = BatchSize(rows, tokens, padded)
        batch, _ = queue.form(size)
        taken_tokens = [text.tokens for text in batch]
        positions = len(batch) * max(taken_tokens) if padded else sum(taken_tokens)
        assert (size.rows, size.positions) == (len(batch), positions)
        assert 1 <= len(batch) <= rows
        assert len(batch) == 1 or positions <= tokens
        taken += names(batch)
    assert taken == [str(number) for number in range(len(lengths))]


def test_a_cancelled_text_is_gone() -> None:
    queue = queue_of(3, 4, 5)
    assert queue.cancel((SINK, "1"))
    assert not queue.cancel((SINK, "1"))
    assert not queue.cancel((Nobody(), "0")), "ids are unique within a sink only"
    assert names(queue.form(BatchSize(8, 100, padded=False))[0]) == ["0", "2"]


def test_a_full_queue_refuses() -> None:
    queue = TextQueue(1, None)
    text = Text((SINK, "a"), Classify("a", "intent", [5]), 0.0)
    queue.add(text)
    with pytest.raises(RequestError) as caught:
        queue.add(text)
    assert (caught.value.status, caught.value.code) == (503, "engine_overloaded")
