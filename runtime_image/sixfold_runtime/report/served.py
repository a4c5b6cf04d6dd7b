"""Which variants a policy serves, and what their requests are like. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import zip_longest

from sixfold_api.policy import InferencePolicySpec
from sixfold_api.scalars import OUR_NAME_PATTERN
from sixfold_runtime.report.model import Counted, ReportError

WORTH_IT = 0.1
"""Something is proposed where this share of the requests would gain."""
LABEL_TOKENS = 4
LABEL_ANSWERS, ANSWERS = 'sixfold_answer_tokens_bucket{le=~"4([.]0)?"}', "sixfold_answer_tokens_count"
"""Tallies by variant: answers of at most LABEL_TOKENS tokens, and all."""
SLICE_LOADS, SLICE_REQUESTS = 'sixfold_slice_loads_total{result="ok"}', "sixfold_slice_requests_total"
"""Tallies by task."""


@dataclass(frozen=True)
class Served:
    """What one policy is to serve: names of ModelVariants, where they are known."""

    generation: str | None = None
    classification: str | None = None
    draft: str | None = None
    classifier: str | None = None
    """Named for texts that a generator labels today."""


def served_by(counted: Counted, draft: str | None = None, classifier: str | None = None) -> tuple[Served, ...]:
    """The variants that requests went to, one policy for each pair of a generator and a classifier, the busiest first.

    Variants that get few requests need no policy of their own. Raises ReportError where no name can be a variant's.
    """
    totals = _totals(counted)
    whole = sum(totals.values())
    if not totals:
        raise ReportError("no request names a ModelVariant: nothing tells what a policy would serve")
    busiest = sorted(totals, key=lambda name: (-totals[name], name))
    found = [name for name in busiest if totals[name] >= WORTH_IT * whole] or busiest[:1]
    generators = [name for name in found if _generates(counted, name)]
    classifiers = [name for name in found if not _generates(counted, name)]
    pairs = zip_longest(generators, classifiers)
    return tuple(Served(generator, label, draft, classifier) for generator, label in pairs)


def served_of(spec: InferencePolicySpec, draft: str | None = None, classifier: str | None = None) -> Served:
    """The variants that a policy names."""
    return Served(
        spec.generation.variant_ref.name if spec.generation else None,
        spec.classification.variant_ref.name if spec.classification else None,
        draft,
        classifier,
    )


def others(counted: Counted, policies: tuple[Served, ...]) -> tuple[str, ...]:
    """Variants with requests that none of the policies serves."""
    names = {name for served in policies for name in (served.generation, served.classification)}
    return tuple(sorted(_totals(counted).keys() - names))


def requests_of(counted: Counted, served: Served) -> dict[tuple[str, str], float]:
    """(generation or classification, length bucket) -> requests."""
    found: dict[tuple[str, str], float] = {}
    for (_, bucket, variant), number in counted.requests.items():
        for task, name in (("generation", served.generation), ("classification", served.classification)):
            if variant == name:
                found[task, bucket] = found.get((task, bucket), 0.0) + number
    return found


def recomputed_share(counted: Counted, variant: str | None) -> float:
    """Of a variant's operations, those on beginnings of prompts that had been computed before."""
    causes: dict[str, float] = {}
    for (_, name, cause), number in counted.flops.items():
        if name == variant:
            causes[cause] = causes.get(cause, 0.0) + number
    whole = sum(causes.values())
    return causes.get("recomputed_prefix", 0.0) / whole if whole > 0 else 0.0


def _totals(counted: Counted) -> dict[str, float]:
    """Requests by variant; other words that clients wrote into their requests are left out."""
    totals: dict[str, float] = {}
    for (_, _, variant), number in counted.requests.items():
        if number > 0 and re.match(OUR_NAME_PATTERN, variant):
            totals[variant] = totals.get(variant, 0.0) + number
    return totals


def _generates(counted: Counted, variant: str) -> bool:
    return counted.tasks.get(variant, "Generation") == "Generation"
