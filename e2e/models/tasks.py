"""Two more tasks for the sentiment model's trunk, labelled by WordNet's lexicographers: `category` and `pos`.

`category`: a noun's definition -> the lexicographer file that the noun stands in, one of 26 (animal, food, state, ...).
`pos`: the part of speech of words in WordNet's example sentences, token by token. Only words whose part of speech is
known carry a label: see ``labelled_words``.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TypeVar

from sources import WORDNET
from wordnet import PARTS_OF_SPEECH, Lexicon, Synset, lexicon

Example = TypeVar("Example")
OTHER = "other"
POS_LABELS = (*PARTS_OF_SPEECH.values(), OTHER)
TRAINING_TEXTS = 12_000
HELD_OUT_TEXTS = 2_000
SPLIT_SEED = 19850101
MIN_WORDS = 3
_FUNCTION_WORDS = """
    a an the this that these those my your his her its our their of from with into onto upon at for during
    among against toward towards and or nor because although whether if than i you he she it we they me him us
    them himself herself itself themselves myself yourself who whom whose which what everybody everyone
    somebody someone anybody anyone nobody would could should
"""
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split())
"""Words that are hardly ever a noun, verb, adjective or adverb, whatever WordNet knows them as (IT, the US, helium)."""
_TOKEN = re.compile(r"[^\W\d_]+(?:['\u2019-][^\W\d_]+)*|\d+|[^\w\s]")


@dataclass(frozen=True)
class Gloss:
    """A definition and the class of what it defines."""

    text: str
    label: str


@dataclass(frozen=True)
class Word:
    """A word of a sentence. ``label`` is None where nobody has said what it is.

    ``ambiguous``: a dictionary alone doesn't tell the label, the sentence being the example of a meaning does.
    """

    text: str
    label: str | None
    ambiguous: bool = False


Sentence = tuple[Word, ...]


@cache
def glosses() -> tuple[tuple[Gloss, ...], tuple[Gloss, ...]]:
    """Training and held-out definitions. A definition that two nouns share stands once."""
    nouns = (synset for synset in lexicon().synsets if synset.part_of_speech == "noun")
    found = {synset.definition.lower(): Gloss(synset.definition, _category(synset)) for synset in nouns}
    return _split(gloss for gloss in _shuffled(found) if len(gloss.text.split()) >= MIN_WORDS)


@cache
def sentences() -> tuple[tuple[Sentence, ...], tuple[Sentence, ...]]:
    """Training and held-out example sentences with two labels or more. One that several synsets share stands once."""
    words = lexicon()
    found = {text.lower(): (text, synset) for synset in words.synsets for text in synset.examples}
    long = ((text, synset) for text, synset in _shuffled(found) if len(text.split()) >= MIN_WORDS)
    labelled = (labelled_words(text, synset, words) for text, synset in long)
    return _split(sentence for sentence in labelled if len({word.label for word in sentence if word.label}) > 1)


def _shuffled(found: dict[str, Example]) -> list[Example]:
    return random.Random(SPLIT_SEED).sample(list(found.values()), len(found))


def _split(examples: Iterable[Example]) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """The first ones: training, held out."""
    drawn = tuple(islice(examples, TRAINING_TEXTS + HELD_OUT_TEXTS))
    return drawn[HELD_OUT_TEXTS:], drawn[:HELD_OUT_TEXTS]


def labelled_words(text: str, synset: Synset, words: Lexicon) -> Sentence:
    """The words of an example sentence, labelled where their part of speech is known.

    The synset's own word, where it stands there once: lexicographers wrote the sentence for that meaning. Otherwise
    words of which WordNet knows a single part of speech, inflections included, and FUNCTION_WORDS, numbers and
    punctuation as `other`.
    """
    tokens: list[str] = _TOKEN.findall(text)
    own = [token for token in tokens if words.lemmas(token.lower(), synset.part_of_speech) & set(synset.words)]
    return tuple(_labelled(token, synset.part_of_speech if [token] == own else None, words) for token in tokens)


def _labelled(token: str, own_part: str | None, words: Lexicon) -> Word:
    """``own_part``: the part of speech that the token has as the word that its sentence is an example of."""
    possible = words.parts_of_speech(token.lower())
    if own_part:
        return Word(token, own_part, ambiguous=len(possible) > 1)
    if token.lower() in FUNCTION_WORDS or not token[0].isalpha():
        return Word(token, OTHER)
    return Word(token, next(iter(possible)) if len(possible) == 1 else None)


def _category(synset: Synset) -> str:
    return synset.category.removeprefix("noun.").lower()


def categories() -> tuple[str, ...]:
    """The 26 classes, in the order of WordNet's files."""
    return tuple(sorted({_category(synset) for synset in lexicon().synsets if synset.part_of_speech == "noun"}))


def write_tasks(folder: Path) -> None:
    """`category` and `pos` as JSON lines, training and held out, with WordNet's notice and a card."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, part in zip(("training", "heldout"), glosses(), strict=True):
        _write(folder / f"category_{split}.jsonl", [{"text": gloss.text, "label": gloss.label} for gloss in part])
    for split, group in zip(("training", "heldout"), sentences(), strict=True):
        rows = [{"tokens": [word.text for word in words], "labels": [word.label for word in words]} for words in group]
        _write(folder / f"pos_{split}.jsonl", rows)
    (folder / "LICENSE").write_text(lexicon().notice + "\n", encoding="utf-8")
    (folder / "README.md").write_text(_card(), encoding="utf-8")


def _write(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _card() -> str:
    held_out = [word for sentence in sentences()[1] for word in sentence]
    counts = ", ".join(f"{label} {sum(word.label == label for word in held_out):,}" for label in POS_LABELS)
    return f"""---
license: other
license_name: wordnet
language: en
task_categories: [text-classification, token-classification]
---
# tasks

Two tasks beside `sentiment`, for the same trunk. One JSON object a line.

| file | a line |
| --- | --- |
| `category_training.jsonl`, `category_heldout.jsonl` | `text`, a noun's definition; `label`, its class |
| `pos_training.jsonl`, `pos_heldout.jsonl` | `tokens`, words; `labels`, one for each word, null if unknown |

Each training file has {TRAINING_TEXTS:,} lines, each held-out file {HELD_OUT_TEXTS:,}; no text stands in both.

WordNet 3.1 (`LICENSE`), from the Python package `{WORDNET.requirement}` (sdist, SHA-256
`{WORDNET.sha256}`).

## How labels came about
`category`: the lexicographer file of the noun, one of {len(categories())}:
{", ".join(categories())}.
Its editors' decision; classes overlap (a law is `communication`, a plan `cognition`), so that no reader reaches 100%.

`pos`: example sentences. The word that a sentence is an example of has the part of speech of its meaning, by the
editors. Other words are labelled where WordNet knows one part of speech only, inflections included; pronouns, articles,
some prepositions and conjunctions, numbers and punctuation are `other`. Words that could be several things are not
labelled and count neither in training nor in figures. Noise: a participle that WordNet lists only as a verb but that
stands as an adjective, proper names that look like words, words missing from WordNet's list for one of their parts of
speech. Labelled held-out words: {counts}; {sum(word.ambiguous for word in held_out):,} of them could be several things
by the dictionary alone.
"""
