"""Labels of words -> labels of tokens."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from sixfold_runtime.prepare.slice_data import IGNORED, token_labels

WORDS = st.lists(st.text(alphabet="abcé你", min_size=1, max_size=6), min_size=1, max_size=8)


def offsets(words: list[str], cuts: list[int], with_spaces: bool) -> list[tuple[int, int]]:
    """Tokens of the words with a space between each: every word is cut after each of `cuts` characters."""
    found, start = [(0, 0)], 0
    for index, word in enumerate(words):
        bounds = sorted({0, len(word), *(cut for cut in cuts if cut < len(word))})
        for begin, end in pairwise(bounds):
            early = with_spaces and begin == 0 and index > 0
            found.append((start + begin - early, start + end))
        start += len(word) + 1
    return [*found, (0, 0)]


@given(words=WORDS, cuts=st.lists(st.integers(1, 5), max_size=3), with_spaces=st.booleans())
def test_the_first_token_of_each_word_carries_its_label(words: list[str], cuts: list[int], with_spaces: bool) -> None:
    tokens = offsets(words, cuts, with_spaces)
    labels = list(range(len(words)))
    found = token_labels(words, labels, tokens)
    assert len(found) == len(tokens)
    assert [label for label in found if label != IGNORED] == labels
    starts = [sum(len(word) + 1 for word in words[:index]) for index in labels]
    for label, (begin, end) in zip(found, tokens, strict=True):
        assert label == IGNORED or begin <= starts[label] < end


def test_special_tokens_and_words_without_tokens_carry_none() -> None:
    # The second word has vanished, as control characters do.
    assert token_labels(["ab", "\x00", "cd"], [7, 8, 9], [(0, 0), (0, 1), (1, 2), (5, 7), (0, 0)]) == [
        IGNORED, 7, IGNORED, 9, IGNORED,
    ]  # fmt: skip
