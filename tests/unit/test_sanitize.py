"""The sanitiser keeps what it should, and never empties a text."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sixfold_api.classification import DEFAULT_KEPT_CHARACTERS, OtherScripts
from sixfold_runtime.modes import sanitize
from sixfold_runtime.modes.sanitize import Sanitizer, SanitizeResult

KEEP = Sanitizer(DEFAULT_KEPT_CHARACTERS)
REMOVE = Sanitizer(DEFAULT_KEPT_CHARACTERS, OtherScripts.REMOVE)
TEXTS = st.text(max_size=60) | st.text("ab zé你я🎉!?<>\t", max_size=20)


def is_kept(character: str) -> bool:
    ascii_letter_or_digit = character.isascii() and character.isalnum()
    return ascii_letter_or_digit or "\u4e00" <= character <= "\u9fff" or character.isspace() or character in ".,!?;"


@given(TEXTS)
def test_a_text_is_never_emptied(text: str) -> None:
    for sanitizer in (KEEP, REMOVE):
        cleaned = sanitizer(text)
        assert bool(cleaned.text) == bool(text)
        if any(character.isalnum() for character in text):
            assert any(character.isalnum() for character in cleaned.text)
        assert sanitizer(cleaned.text).text == cleaned.text, "a second pass changes nothing"
        assert (cleaned.text != text) == (cleaned.result is SanitizeResult.CHANGED)


@given(TEXTS)
def test_only_characters_of_the_class_stay_in_their_order(text: str) -> None:
    kept = "".join(filter(is_kept, text))
    assert REMOVE(text).text in (kept, text)
    if REMOVE(text).result is SanitizeResult.CHANGED:
        assert REMOVE(text).text == kept
    if KEEP(text).result is SanitizeResult.CHANGED:
        assert KEEP(text).text == kept


@given(TEXTS)
def test_no_letter_is_lost_unless_the_policy_says_so(text: str) -> None:
    letters = [character for character in text if character.isalpha()]
    assert [character for character in KEEP(text).text if character.isalpha()] == letters


@pytest.mark.parametrize(
    ("text", "result", "cleaned"),
    [
        ("Great film, really!", "unchanged", ""),
        ("这部电影很好看!", "unchanged", ""),
        ("so <b>good</b> 👍", "changed", "so bgoodb "),
        ("a\u200bb\x00c", "changed", "abc"),
        ("naïve", "other_script", ""),
        ("хороший фильм", "other_script", ""),
        ("فيلم رائع", "other_script", ""),
        ("素晴らしい!", "other_script", ""),
        ("👍👍👍", "would_be_empty", ""),
        ("👍 !", "would_be_empty", ""),
        ("(:-)", "would_be_empty", ""),
        ("", "unchanged", ""),
    ],
)
def test_texts(text: str, result: str, cleaned: str) -> None:
    assert (KEEP(text).result, KEEP(text).text) == (result, cleaned or text)


def test_other_scripts_go_where_the_policy_says_so() -> None:
    assert REMOVE("naïve").text == "nave"
    assert REMOVE("хороший film").text == " film"
    assert REMOVE("хороший фильм").result is SanitizeResult.WOULD_BE_EMPTY


@pytest.mark.parametrize("keep", ["z-a", "a\\", "\\u12", "\\d-z"])
def test_a_class_that_is_none(keep: str) -> None:
    with pytest.raises(ValueError, match="is no class of characters"):
        Sanitizer(keep)


def test_the_example_of_the_documentation() -> None:
    assert doctest.testmod(sanitize).attempted
    assert doctest.testmod(sanitize).failed == 0
