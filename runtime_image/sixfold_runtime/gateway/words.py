"""Words of a tokenised text: what a token classification labels."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Encoding


@dataclass(frozen=True)
class Word:
    """Some neighbouring tokens.

    Attributes:
        token: index of the first of them; its label is the word's.
        start: of the first character in the text.
        end: behind the last character.
    """

    token: int
    start: int
    end: int


def words(text: str, encoding: Encoding) -> list[Word]:
    """The words in `text`, without white space around them, in their order.

    A word is what the tokenizer split off before it looked for sub-words, and never goes across white space: some
    tokenizers don't split at all. Tokens that the tokenizer added, and those of white space alone, belong to no word.
    """
    found: list[Word] = []
    previous: int | None = None
    for token, ((start, end), group, is_special) in enumerate(
        zip(encoding.offsets, encoding.word_ids, encoding.special_tokens_mask, strict=True)
    ):
        piece = text[start:end]
        stripped = piece.strip()
        if is_special or not stripped:
            previous = None
            continue
        start += len(piece) - len(piece.lstrip())
        end = start + len(stripped)
        last = found[-1] if found else None
        if last is not None and group is not None and group == previous and start <= last.end:
            found[-1] = Word(last.token, last.start, max(last.end, end))
        else:
            found.append(Word(token, start, end))
        previous = group
    return found
