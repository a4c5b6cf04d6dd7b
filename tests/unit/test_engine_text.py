"""From tokens to the text that a client sees: detokenising, stop strings, ends."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sixfold_runtime.engine.detokenize import Detokenizer
from sixfold_runtime.engine.protocol import FinishReason
from sixfold_runtime.engine.stops import StopMatcher
from sixfold_runtime.engine.stream import OutputStream

EOS = 256
TEXT = "Grüße, 你好 😀👩‍👩‍👧 naïve Ω\n\nend"


def byte_tokenizer() -> Tokenizer:
    """Token i is byte i: every character outside ASCII spans several tokens."""
    alphabet = _byte_characters()
    vocabulary = {character: byte for byte, character in enumerate(alphabet)} | {"</s>": EOS}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def _byte_characters() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


TOKENIZER = byte_tokenizer()


def detokenized(tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(TOKENIZER)
    return [*map(detokenizer.push, tokens), detokenizer.flush()]


@pytest.mark.parametrize("character", ["é", "你", "😀"])
def test_a_character_appears_once_complete(character: str) -> None:
    pieces = detokenized(list(character.encode()))
    assert pieces == [""] * (len(character.encode()) - 1) + [character, ""]


def test_an_unfinished_character_is_flushed_at_the_end() -> None:
    assert detokenized([*b"ok", *"你".encode()[:2]]) == ["o", "k", "", "", "\N{REPLACEMENT CHARACTER}"]


def test_endless_invalid_bytes_neither_stall_nor_grow() -> None:
    pieces = detokenized([0xFF] * 100)
    assert "".join(pieces) == "\N{REPLACEMENT CHARACTER}" * 100
    assert max(map(len, pieces)) <= 4


@given(st.text(max_size=40))
@settings(deadline=None)
def test_pieces_add_up_to_the_text(text: str) -> None:
    pieces = detokenized(list(text.encode()))
    assert "".join(pieces) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces if "\N{REPLACEMENT CHARACTER}" not in text)


@given(st.lists(st.integers(0, 255), max_size=14))
@settings(deadline=None)
def test_pieces_of_invalid_bytes_add_up_too(tokens: list[int]) -> None:
    assert "".join(detokenized(tokens)) == bytes(tokens).decode(errors="replace")


def shown(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    matcher, output = StopMatcher(stops), []
    for piece in pieces:
        text, stopped = matcher.push(piece)
        output.append(text)
        if stopped:
            return output, True
    return [*output, matcher.flush()], False


def test_no_part_of_a_stop_string_leaks() -> None:
    assert shown(["\nUser:"], ["Hi", "\n", "Us", "er", ":", "x"]) == (["Hi", "", "", "", ""], True)


def test_what_only_looked_like_a_stop_string_comes_out() -> None:
    assert shown(["\nUser:"], ["a\n", "Use", "ful"]) == (["a", "", "\nUseful", ""], False)


def test_empty_stop_strings_stop_nothing() -> None:
    assert shown([""], ["abc"]) == (["abc", ""], False)


ALPHABET = st.text(alphabet="ab\n", max_size=12)


@given(text=ALPHABET, stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=3), max_size=3), data=st.data())
def test_stopping_does_not_depend_on_the_pieces(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    output, stopped = shown(stops, pieces)
    assert ("".join(output), stopped) == expected(text, stops)


def expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """Read character by character; the stop string that is complete first ends the text."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


def streamed(tokens: list[int], stops: tuple[str, ...] = (), max_tokens: int = 1000) -> tuple[list[str], object, int]:
    stream, pieces = OutputStream(TOKENIZER, stops, frozenset([EOS]), max_tokens), []
    for token in tokens:
        text, reason = stream.push(token)
        pieces.append(text)
        if reason is not None:
            return pieces, reason, stream.tokens
    return pieces, None, stream.tokens


def test_the_end_of_sequence_token_counts_and_shows_nothing() -> None:
    assert streamed([*b"ab", EOS, *b"c"]) == (["a", "b", ""], FinishReason.STOP, 3)


def test_the_limit_flushes_what_was_held_back() -> None:
    assert streamed([*b"ab", *b"\n"], ("\n\n",), 3) == (["a", "b", "\n"], FinishReason.LENGTH, 3)


def test_a_stop_string_at_the_limit_is_a_stop() -> None:
    assert streamed([*b"ab", *b"\n\n"], ("\n\n",), 4) == (["a", "b", "", ""], FinishReason.STOP, 4)


def test_the_end_flushes_half_a_character() -> None:
    pieces, reason, _ = streamed(["你".encode()[0], EOS])
    assert (pieces, reason) == (["", "\N{REPLACEMENT CHARACTER}"], FinishReason.STOP)


@given(limit=st.integers(1, 60), stop=st.sampled_from(["", "\n\n", "你", "e", "👧 n", "zzz"]))
@settings(deadline=None)
def test_any_end_shows_the_text_before_it(limit: int, stop: str) -> None:
    tokens = list(TEXT.encode())
    pieces, _, count = streamed([*tokens, EOS], (stop,), limit)
    whole = bytes(tokens[:count]).decode(errors="replace")
    assert "".join(pieces) == (whole.split(stop)[0] if stop else whole)
