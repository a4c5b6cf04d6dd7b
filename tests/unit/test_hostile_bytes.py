"""Parsers take whatever comes: each input is a value or the parser's own error, and that soon."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from sixfold_api.policy import InferencePolicySpec
from sixfold_api.runtime_config import PodState
from sixfold_api.ticket import OptimizationTicketSpec
from sixfold_api.variant import ModelVariantSpec
from sixfold_runtime.config import parse_config
from sixfold_runtime.engine.protocol import (
    Cancel,
    Chunk,
    Classify,
    Done,
    Erase,
    Failure,
    FinishReason,
    Generate,
    ModelInfo,
    Prefetch,
    Sampling,
    State,
    Step,
    Submit,
    TokenLogprob,
    decode_to_engine,
    decode_to_gateway,
    encode,
)
from sixfold_runtime.stream_client import SseZstdDecoder, StreamDecodeError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def names_of(model: Any) -> set[str]:
    """Every field's name as it is written, however deep it is nested."""
    return set(_names(json.loads(json.dumps(model.model_json_schema(by_alias=True)))))


def _names(node: Any) -> list[str]:
    if isinstance(node, list):
        return [name for item in node for name in _names(item)]
    if not isinstance(node, dict):
        return []
    own = list(node["properties"]) if isinstance(node.get("properties"), dict) else []
    return own + [name for item in node.values() for name in _names(item)]


def documents(model: Any) -> st.SearchStrategy[Any]:
    """Objects of the model's own words in any place, with any values."""
    words = st.sampled_from(sorted(names_of(model)))
    return st.recursive(
        JSON,
        lambda inner: st.dictionaries(words, inner, max_size=5) | st.lists(inner, max_size=3),
        max_leaves=25,
    )


SPECS = [InferencePolicySpec, ModelVariantSpec, OptimizationTicketSpec, PodState]


@pytest.mark.parametrize("model", SPECS, ids=lambda model: model.__name__)
def test_any_document_is_a_spec_or_a_validation_error(model: Any) -> None:
    @settings(max_examples=60, deadline=None)
    @given(documents(model))
    def check(document: Any) -> None:
        try:
            found = model.model_validate(document)
        except ValidationError as error:
            assert error.errors()
        else:
            assert model.model_validate(found.to_dict()) == found

    check()


VALID = {"sequence": 1, "stable": {"level": 3, "activeModes": ["CompressedStreaming"]}}


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(st.sampled_from(["sequence", "stable", "canary", "provenance", "x"]), JSON, max_size=4))
def test_any_configuration_is_one_or_an_error_that_the_store_reports(fields: dict[str, Any]) -> None:
    try:
        config = parse_config(json.dumps(VALID | fields).encode())
    except ValueError as error:
        assert str(error)
    else:
        assert config.sequence >= 0


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"stable":'])
def test_a_deep_configuration_is_refused(opening: bytes) -> None:
    with pytest.raises(ValueError):
        parse_config(opening * 100_000)


MESSAGES: list[Any] = [
    Submit([Generate("a", "chat", [5, 6, 2**40], Sampling(5, stop=("a",)), "alice")], ["chat"]),
    Submit([Classify("a", "intent", [1], top_k=2)]),
    Cancel(["a", "b"]),
    Prefetch("chat", "alice", "c"),
    Erase("1", "alice"),
    Step([Chunk("a", "text", 1, 3, [TokenLogprob(1, -0.5, b"x", [TokenLogprob(2, -1.5)])])]),
    Done("a", FinishReason.ERROR, 3, failure=Failure(400, "code", "message")),
    State("pod-0", [ModelInfo("chat", "Generation", 4096, "00")], 7, 3),
]
DECODERS: list[Callable[[bytes], Any]] = [decode_to_engine, decode_to_gateway]


def decoded(frame: bytes) -> list[Any]:
    found = []
    for decode in DECODERS:
        try:
            found.append(decode(frame))
        except msgspec.DecodeError as error:
            assert str(error)
    return found


@given(st.binary(max_size=200))
def test_any_frame_is_a_message_or_a_decode_error(frame: bytes) -> None:
    decoded(frame)


@settings(max_examples=300)
@given(
    st.sampled_from(MESSAGES).map(encode),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255), st.sampled_from("=+-")), min_size=1, max_size=5),
)
def test_damaged_frames(frame: bytes, damages: list[tuple[int, int, str]]) -> None:
    damaged = bytearray(frame)
    for place, value, kind in damages:
        place %= len(damaged) + 1
        if kind == "+":
            damaged.insert(place, value)
        else:
            damaged[place : place + 1] = bytes([value]) if kind == "=" else b""
    for message in decoded(bytes(damaged)):
        assert decoded(encode(message))


@pytest.mark.parametrize("bomb", [b"\x91", b"\x81\xa1a", b"\x81", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"])
@pytest.mark.parametrize("before", [b"", b"\x82\xa4type\xa6submit\xa1x", b"\x82\xa4type\xa4step\xa6chunks"])
def test_frames_that_would_be_large(before: bytes, bomb: bytes) -> None:
    for decode in DECODERS:
        with pytest.raises(msgspec.DecodeError):
            decode(before + bomb * 100_000)


def sse_zstd(text: bytes) -> bytes:
    """A whole stream of one event."""
    return b"data: " + base64.b64encode(zstandard.compress(text)) + b"\n\n"


@given(st.binary(max_size=300), st.integers(1, 50))
def test_any_stream_is_text_or_a_stream_error(data: bytes, piece_bytes: int) -> None:
    for stream in (data, b"data: " + data + b"\n", b"data: " + base64.b64encode(data) + b"\n\n"):
        decoder = SseZstdDecoder()
        try:
            for place in range(0, len(stream), piece_bytes):
                decoder.decode(stream[place : place + piece_bytes])
            decoder.end()
        except StreamDecodeError as error:
            assert str(error)


@given(st.binary(max_size=200), st.integers(1, 60), st.integers(0, 400))
def test_a_stream_that_is_cut_never_passes_for_a_whole_one(text: bytes, piece_bytes: int, place: int) -> None:
    stream = sse_zstd(text)
    stream = stream[: place % len(stream)]
    decoder = SseZstdDecoder()
    try:
        received = b"".join(decoder.decode(stream[at : at + piece_bytes]) for at in range(0, len(stream), piece_bytes))
        decoder.end()
    except StreamDecodeError:
        return
    assert received == text, "the end of the last line may be missing, nothing of the text"


@given(st.text(alphabet="dat: \r\nevid", max_size=80))
def test_lines_that_are_no_events_are_passed_over(lines: str) -> None:
    decoder = SseZstdDecoder()
    try:
        assert decoder.decode(lines.encode()) == b""
    except StreamDecodeError as error:
        assert "doesn't decode" in str(error)
