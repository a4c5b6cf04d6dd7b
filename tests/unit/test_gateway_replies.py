"""Log-probabilities in OpenAI's two shapes, and the usage of drafts."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from sixfold_runtime.engine.protocol import TokenLogprob
from sixfold_runtime.gateway.replies import ChatForm, CompletionForm, Usage

TEXT = "naïve 你好 🎉"


def tokens(pieces: list[bytes]) -> list[TokenLogprob]:
    return [
        TokenLogprob(index, -0.5, piece, [TokenLogprob(index, -0.5, piece), TokenLogprob(99, -math.inf, b"\xff")])
        for index, piece in enumerate(pieces)
    ]


def frame(form: Any, choice: dict[str, Any], kind: str) -> dict[str, Any]:
    return {"id": "x", "created": 1, "model": "m", "object": kind, "choices": [choice]}


def cut(text: bytes, sizes: list[int]) -> list[bytes]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(text[start : start + size])
        start += size
    return [piece for piece in (*pieces, text[start:]) if piece]


@given(st.lists(st.integers(1, 4), max_size=20))
def test_chat_tokens_join_to_the_text(sizes: list[int]) -> None:
    """Characters over several tokens come back from the bytes; the official client's strict models read them."""
    form, pieces = ChatForm(), cut(TEXT.encode(), sizes)
    choice = form.choice(0, TEXT, "stop", tokens(pieces))
    answer = ChatCompletion.model_validate(frame(form, choice, form.whole), strict=True)
    content = answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == TEXT
    assert [len(entry.top_logprobs) for entry in content] == [2] * len(pieces)
    assert content[0].top_logprobs[1].logprob == -9999.0

    part = frame(form, form.delta(0, "", tokens(pieces[:1])), form.part)
    chunk = ChatCompletionChunk.model_validate(part, strict=True)
    assert bytes(chunk.choices[0].logprobs.content[0].bytes) == pieces[0]


@given(st.lists(st.integers(1, 4), max_size=20), st.integers(0, 20))
def test_completion_offsets_are_those_of_the_text(sizes: list[int], split: int) -> None:
    """Streamed or not: each token that begins a character begins at its offset."""
    form, pieces = CompletionForm(), cut(TEXT.encode(), sizes)
    choice = form.choice(0, TEXT, "stop", tokens(pieces))
    whole = Completion.model_validate(frame(form, choice, form.whole), strict=True).choices[0].logprobs
    for token, offset in zip(whole.tokens, whole.text_offset, strict=True):
        if not token.startswith("bytes:"):
            assert TEXT[offset:].startswith(token)
    assert all(token in top for token, top in zip(whole.tokens, whole.top_logprobs, strict=True))

    form = CompletionForm()
    parts = [form.delta(0, "", tokens(part))["logprobs"] for part in (pieces[:split], pieces[split:])]
    assert [offset for part in parts if part for offset in part["text_offset"]] == whole.text_offset


def test_choices_count_their_own_characters() -> None:
    form = CompletionForm()
    for index in (0, 1):
        assert form.delta(index, "", tokens([b"ab", b"c"]))["logprobs"]["text_offset"] == [0, 2]


def test_tokens_that_are_no_text_keep_their_own_names() -> None:
    logprobs = CompletionForm().delta(0, "", tokens([b"\xe4\xbd"]))["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xe4\\xbd"]
    assert set(logprobs["top_logprobs"][0]) == {"bytes:\\xe4\\xbd", "bytes:\\xff"}


def test_unasked_there_are_none() -> None:
    for form in (ChatForm(), CompletionForm()):
        assert form.choice(0, "x", "stop", [])["logprobs"] is None
        assert form.delta(0, "x", [])["logprobs"] is None


def test_usage_tells_what_was_drafted_and_what_was_found() -> None:
    usage = CompletionUsage.model_validate(Usage(3, 10, 8, 6, cached_tokens=2).to_dict(), strict=True)
    assert usage.total_tokens == 13
    assert usage.completion_tokens_details.accepted_prediction_tokens == 6
    assert usage.completion_tokens_details.rejected_prediction_tokens == 2
    assert usage.prompt_tokens_details.cached_tokens == 2
