"""Requests that arrive whether or not those before them were answered, with a heavy tail of lengths."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import count as count_from_zero
from itertools import islice

LEAST_TOKENS, MOST_TOKENS = 5, 2000
_MEDIAN_TOKENS, _SIGMA = 90.0, 1.25
_PARETO_SHAPE = 0.7


@dataclass(frozen=True)
class Request:
    index: int
    tokens: int
    arrived_seconds: float


def lengths(kind: str, count: int, seed: int) -> list[int]:
    """Tokens, between LEAST_TOKENS and MOST_TOKENS; what falls outside is drawn again.

    Args:
        kind: "lognormal" (half below 90 tokens, mean about 175), or "pareto": P(more than n) falls as n^-0.7 (mean 60).
    """
    source = random.Random(f"{kind} {seed}")
    draw = {"lognormal": _lognormal, "pareto": _pareto}[kind]
    drawn = (round(draw(source)) for _ in count_from_zero())
    return list(islice((tokens for tokens in drawn if LEAST_TOKENS <= tokens <= MOST_TOKENS), count))


def _lognormal(source: random.Random) -> float:
    return source.lognormvariate(math.log(_MEDIAN_TOKENS), _SIGMA)


def _pareto(source: random.Random) -> float:
    """Bounded at both ends, by inversion."""
    tail = (LEAST_TOKENS / MOST_TOKENS) ** _PARETO_SHAPE
    return LEAST_TOKENS * math.pow(1 - source.random() * (1 - tail), -1 / _PARETO_SHAPE)


def trace(kind: str, count: int, requests_per_second: float, seed: int) -> list[Request]:
    """Poisson arrivals."""
    source, now, requests = random.Random(f"arrivals {seed}"), 0.0, []
    for index, tokens in enumerate(lengths(kind, count, seed)):
        now += source.expovariate(requests_per_second)
        requests.append(Request(index, tokens, now))
    return requests
