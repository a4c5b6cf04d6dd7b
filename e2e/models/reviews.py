"""Short texts with human ratings, as negative or positive examples, split for good.

Source: Hutto and Gilbert, "VADER", ICWSM 2014: each text rated by twenty people from -4 (most negative) to 4. Sentences
of film reviews (Rotten Tomatoes) are divided into training, calibration and held out; sentences of Amazon reviews,
tweets and sentences of New York Times editorials are held out as a whole: they show how a classifier of film reviews
fares elsewhere.
"""

from __future__ import annotations

import json
import random
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sources import VADER, unpacked

LABELS = ("negative", "positive")
HELD_OUT_SHARE = 0.1
CALIBRATION_REVIEWS = 1500
"""Enough that a disagreement of 2% is bounded by 2.8% at 95% confidence."""
SPLIT_SEED = 20140601
MOVIES = "movieReviewSnippets"
OTHER_DOMAINS = {"amazon": "amazonReviewSnippets", "tweets": "tweets", "nyt": "nytEditorialSnippets"}


@dataclass(frozen=True)
class Review:
    """One text. ``rating`` is the mean over its raters, -4 to 4; ``label`` indexes LABELS."""

    text: str
    rating: float

    @property
    def label(self) -> int:
        return int(self.rating > 0)


@cache
def rated_texts() -> dict[str, tuple[Review, ...]]:
    """Every distinct text that its raters call negative or positive, by source, in the files' order.

    A text that repeats counts once, in the first source that has it, so that it cannot sit in two sets; a mean rating
    of exactly 0 is neither label.
    """
    with unpacked(VADER) as folder:
        inner = folder / "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
        with tarfile.open(inner) as tar:
            tables = {source: _read(tar, source) for source in (MOVIES, *OTHER_DOMAINS.values())}
    seen: set[str] = set()
    return {source: _distinct(table, seen) for source, table in tables.items()}


def _read(tar: tarfile.TarFile, source: str) -> list[str]:
    file = tar.extractfile(f"hutto_ICWSM_2014/{source}_GroundTruth.txt")
    assert file is not None
    return file.read().decode("utf-8", "replace").splitlines()


def _distinct(lines: Sequence[str], seen: set[str]) -> tuple[Review, ...]:
    """Rated texts that aren't in ``seen``, which then has them."""
    texts = []
    for line in lines:
        _, rating, text = line.split("\t", 2)
        words = normalized(text)
        if float(rating) != 0 and words not in seen:
            seen.add(words)
            texts.append(Review(text.strip(), float(rating)))
    return tuple(texts)


def normalized(text: str) -> str:
    """What two texts have in common that differ in case and white space alone."""
    return " ".join(text.lower().split())


@cache
def splits() -> dict[str, tuple[Review, ...]]:
    """training, calibration, heldout (film reviews), amazon, tweets, nyt (held out too): shuffled once for good."""
    movies = list(rated_texts()[MOVIES])
    random.Random(SPLIT_SEED).shuffle(movies)
    held_out = int(len(movies) * HELD_OUT_SHARE)
    calibrated = held_out + CALIBRATION_REVIEWS
    divided = {
        "training": tuple(movies[calibrated:]),
        "calibration": tuple(movies[held_out:calibrated]),
        "heldout": tuple(movies[:held_out]),
    }
    for domain, source in OTHER_DOMAINS.items():
        texts = list(rated_texts()[source])
        random.Random(SPLIT_SEED).shuffle(texts)
        divided[domain] = tuple(texts)
    return divided


def write_reviews(folder: Path) -> None:
    """One file a split, one JSON object a line: text and label ("negative" or "positive")."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, texts in splits().items():
        lines = (json.dumps({"text": r.text, "label": LABELS[r.label]}, ensure_ascii=False) for r in texts)
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (folder / "README.md").write_text(_card())


def _card() -> str:
    rows = (
        f"| `{name}.jsonl` | {len(texts):,} | {sum(review.label for review in texts) / len(texts):.0%} |"
        for name, texts in splits().items()
    )
    table = "\n".join(rows)
    return f"""---
license: mit
language: en
task_categories: [text-classification]
---
# reviews

Short English texts that people call `negative` or `positive`. One JSON object a line: `text` and `label`.

| file | texts | positive |
| --- | --- | --- |
{table}

`training`, `calibration` and `heldout` are sentences of film reviews. `amazon` (sentences of product reviews), `tweets`
and `nyt` (sentences of newspaper editorials) are for measuring only: nothing here is trained or calibrated on them.

C.J. Hutto and E. Gilbert, "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social Media Text", ICWSM
2014, from the Python package `{VADER.requirement}` (sdist, SHA-256 `{VADER.sha256}`; {VADER.licence}). The label is the
sign of the mean rating; texts rated 0 are left out, and so is a text that stands in an earlier set. Many sentences are
close to neutral, above all in `nyt`: the label of a rating near 0 says little.
"""
