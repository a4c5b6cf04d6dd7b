"""A policy from what requests are like, by the rules of the product's source. Pure.

Texts under 100 tokens that are classified exit early; prompts of 100 to 500 tokens that are continued are drafted for,
five tokens at a time; longer dialogues reuse keys and values and stream compressed. Each proposal says what it rests
on.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from sixfold_api.names import API_VERSION, POLICY_KIND
from sixfold_api.policy import InferencePolicySpec
from sixfold_runtime.report.model import Counted, Figures, ReportError

WORTH_IT = 0.1
"""A mode is proposed where this share of the requests would gain."""
SHORT, MIDDLE, LONG = ("0-100",), ("100-500",), ("500-2000", "2000+")
YOURS = "replace-me"


@dataclass(frozen=True)
class Served:
    """What a policy is to serve: names of ModelVariants, where they are known."""

    generation: str | None = None
    classification: str | None = None
    draft: str | None = None


@dataclass(frozen=True)
class Proposal:
    """One change, why, and the merge patch of the spec that makes it; no patch is advice."""

    what: str
    why: str
    patch: dict[str, Any] | None = None


@dataclass(frozen=True)
class Accelerator:
    """What one kind of device was measured to do: a row of the user's file, never a guess."""

    name: str
    cost_per_hour: float
    requests_per_second: float

    @property
    def cost_per_million(self) -> float:
        return self.cost_per_hour / 3600 / self.requests_per_second * 1e6


def served_by(counted: Counted, draft: str | None = None) -> Served:
    """The variants that most requests went to."""
    totals: dict[str, float] = {}
    for (_, _, variant), number in counted.requests.items():
        totals[variant] = totals.get(variant, 0.0) + number

    def most(is_generation: bool) -> str | None:
        of_task = [name for name in totals if (counted.tasks.get(name, "Generation") == "Generation") is is_generation]
        return max(of_task, key=lambda name: totals[name], default=None)

    return Served(most(is_generation=True), most(is_generation=False), draft)


def accelerators(lines: Iterable[str]) -> tuple[Accelerator, ...]:
    """Rows of a CSV file with the columns name, costPerHour and requestsPerSecond. Raises ReportError."""
    found = []
    for number, row in enumerate(csv.DictReader(lines), 2):
        try:
            entry = Accelerator(row["name"], float(row["costPerHour"]), float(row["requestsPerSecond"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ReportError(
                f"line {number} of the accelerators: it needs name, costPerHour and requestsPerSecond ({error})"
            ) from error
        if not (entry.cost_per_hour >= 0 and entry.requests_per_second > 0):
            raise ReportError(f"line {number} of the accelerators: a cost of at least 0 and a rate above 0 are needed")
        found.append(entry)
    return ranked(found)


def proposals(figures: Figures, served: Served) -> tuple[Proposal, ...]:
    """What the traffic asks for, the largest share of the requests first."""
    return tuple(proposal for _, proposal in sorted(_weighed(figures, served), key=lambda entry: -entry[0]))


def policy(found: Sequence[Proposal], served: Served, name: str) -> dict[str, Any]:
    """A complete InferencePolicy with all of them; names that aren't known are replace-me."""
    spec: dict[str, Any] = {}
    if served.generation is not None:
        spec["generation"] = {"variantRef": {"name": served.generation}}
    if served.classification is not None:
        spec["classification"] = {"variantRef": {"name": served.classification}}
    if not spec:
        spec["generation"] = {"variantRef": {"name": YOURS}}
    for proposal in found:
        if proposal.patch is not None and _is_valid(changed := merged(spec, proposal.patch)):
            spec = changed
    return {"apiVersion": API_VERSION, "kind": POLICY_KIND, "metadata": {"name": name}, "spec": spec}


def ranked(accelerators: Iterable[Accelerator]) -> tuple[Accelerator, ...]:
    """The cheapest for a million requests first."""
    return tuple(sorted(accelerators, key=lambda entry: (entry.cost_per_million, entry.name)))


def merged(document: Any, patch: Any) -> Any:
    """A JSON document with a merge patch applied (RFC 7396)."""
    if not isinstance(patch, dict):
        return patch
    result = dict(document) if isinstance(document, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def _weighed(figures: Figures, served: Served) -> Iterator[tuple[float, Proposal]]:
    share = _shares(figures, served)
    short_texts = share["classification", SHORT]
    if served.classification is not None and short_texts >= WORTH_IT:
        yield (
            short_texts,
            Proposal(
                "early exit for short texts",
                f"{_percent(short_texts)} of the requests are texts of under 100 tokens to classify; the variant needs"
                " exitHeads",
                {"classification": {"earlyExit": {}}},
            ),
        )
    middle, long = share["generation", MIDDLE], share["generation", LONG]
    if served.generation is not None and middle >= WORTH_IT:
        draft = served.draft or YOURS
        yield (
            middle,
            Proposal(
                "speculative decoding, five tokens at a time",
                f"{_percent(middle)} of the requests continue prompts of 100 to 500 tokens"
                + ("" if served.draft else "; name a draft of the same family in place of replace-me"),
                {"generation": {"speculative": {"draftVariantRef": {"name": draft}, "numTokens": 5}}},
            ),
        )
    if served.generation is not None and long >= WORTH_IT:
        yield (
            long,
            Proposal(
                "KV reuse and compressed streaming for dialogues",
                f"{_percent(long)} of the requests continue prompts of over 500 tokens",
                {"generation": {"kvCacheReuse": {}}, "streaming": {"compression": "Auto"}},
            ),
        )
    mixed = sum(part >= WORTH_IT for part in (share["all", SHORT], share["all", MIDDLE], share["all", LONG]))
    if mixed > 1:
        yield (
            WORTH_IT,
            Proposal("batches by length", "prompts of several lengths come together", {"batching": {}}),
        )
    for cause, wasted in figures.wasted_by_cause:
        if cause == "recomputed_prefix" and wasted >= WORTH_IT and long < WORTH_IT and served.generation is not None:
            yield (
                wasted,
                Proposal(
                    "KV reuse",
                    f"{_percent(wasted)} of the operations computed what had been computed before",
                    {"generation": {"kvCacheReuse": {}}},
                ),
            )


def _shares(figures: Figures, served: Served) -> dict[tuple[str, tuple[str, ...]], float]:
    """(what is served, lengths) -> share of the requests."""
    found: dict[tuple[str, tuple[str, ...]], float] = {
        (task, lengths): 0.0 for task in ("generation", "classification", "all") for lengths in (SHORT, MIDDLE, LONG)
    }
    for entry in figures.quadrants:
        task = "classification" if entry.variant == served.classification else "generation"
        for lengths in (SHORT, MIDDLE, LONG):
            if entry.length_bucket in lengths:
                found[task, lengths] += entry.share
                found["all", lengths] += entry.share
    return found


def _is_valid(spec: dict[str, Any]) -> bool:
    try:
        InferencePolicySpec.model_validate(spec)
    except ValidationError:
        return False
    return True


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
