"""Movie reviews with human ratings, as negative or positive examples, split for good into training and held out.

Source: the movie part of Hutto and Gilbert, "VADER", ICWSM 2014: 10,605 sentences from
Rotten Tomatoes reviews, each rated by people from -4 (most negative) to 4.
"""

from __future__ import annotations

import random
import tarfile
from dataclasses import dataclass
from functools import cache

from sources import VADER, unpacked

LABELS = ("negative", "positive")
HELD_OUT_SHARE = 0.1
SPLIT_SEED = 20140601


@dataclass(frozen=True)
class Review:
    """One snippet. ``rating`` is the mean over its raters, -4 to 4; ``label`` indexes LABELS."""

    text: str
    rating: float

    @property
    def label(self) -> int:
        return int(self.rating > 0)


@cache
def reviews() -> tuple[Review, ...]:
    """Every distinct snippet that its raters call negative or positive, in the file's order.

    A text that repeats counts once, so that it cannot sit in both splits; a mean rating of exactly 0 is neither label.
    """
    with unpacked(VADER) as folder:
        inner = folder / "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
        with tarfile.open(inner) as tar:
            file = tar.extractfile("hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt")
            assert file is not None
            lines = file.read().decode("utf-8", "replace").splitlines()
    distinct: dict[str, Review] = {}
    for line in lines:
        _, rating, text = line.split("\t", 2)
        if float(rating) != 0:
            distinct.setdefault(" ".join(text.lower().split()), Review(text.strip(), float(rating)))
    return tuple(distinct.values())


@cache
def _split() -> tuple[tuple[Review, ...], tuple[Review, ...]]:
    shuffled = list(reviews())
    random.Random(SPLIT_SEED).shuffle(shuffled)
    held_out = int(len(shuffled) * HELD_OUT_SHARE)
    return tuple(shuffled[held_out:]), tuple(shuffled[:held_out])


def load_training_reviews() -> tuple[Review, ...]:
    return _split()[0]


def load_heldout_reviews() -> tuple[Review, ...]:
    """About 1,000 reviews that no training step has seen. For accuracy, calibration and benchmarks."""
    return _split()[1]
