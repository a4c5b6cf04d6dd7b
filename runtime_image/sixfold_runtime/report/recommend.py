"""What would suit the requests there were, by the rules of the product's source. Pure.

Texts under 100 tokens that are classified exit early; prompts of 100 to 500 tokens that are continued are drafted for,
five tokens at a time; longer dialogues reuse keys and values and stream compressed; labels aren't generated; tasks that
are asked for all the time are pinned. Each proposal says what it rests on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sixfold_api.modes import LEVEL_FROM, Mode
from sixfold_api.policy import InferencePolicySpec
from sixfold_api.subgraphs import SubgraphsSpec
from sixfold_api.tuning import merge_patch, with_value
from sixfold_runtime.report.model import Counted
from sixfold_runtime.report.served import (
    ANSWERS,
    LABEL_ANSWERS,
    SLICE_LOADS,
    SLICE_REQUESTS,
    WORTH_IT,
    Served,
    recomputed_share,
    requests_of,
)

SHORT, MIDDLE, LONG = ("0-100",), ("100-500",), ("500-2000", "2000+")
DRAFT_TOKENS = 5
MOSTLY_LABELS = 0.5
"""From this share of answers of at most 4 tokens on, a generator is taken for a classifier; as in the operator."""
HOT_SHARE = 0.25
"""Of the requests for tasks: one that gets as many is worth its memory all the time."""
MIS_HOT_LOADS_PER_HOUR = 30.0
"""Of one task's slice in one pod: it is pushed out and comes back over and over; as in the operator."""


@dataclass(frozen=True)
class Proposal:
    """One change, why, and the merge patch of the spec that makes it.

    Attributes:
        patch: None where something has to be there first; `needs` says what.
        mode: that it turns on.
    """

    what: str
    why: str
    patch: dict[str, Any] | None = None
    needs: str = ""
    mode: Mode | None = None

    @property
    def level(self) -> int:
        """From which it runs."""
        return LEVEL_FROM[self.mode] if self.mode else 0


def proposals(counted: Counted, served: Served, spec: InferencePolicySpec | None = None) -> tuple[Proposal, ...]:
    """What the traffic asks for, the largest share of the requests first.

    Args:
        spec: of the policy that is to be changed; None: a new one.
    """
    found = [*_by_length(counted, served), *_labels(counted, served), *_pins(counted, spec)]
    return tuple(proposal for _, proposal in sorted(found, key=lambda entry: -entry[0]))


def _by_length(counted: Counted, served: Served) -> Iterator[tuple[float, Proposal]]:
    requests = requests_of(counted, served)
    whole = sum(requests.values()) or 1.0

    def share(lengths: tuple[str, ...], *tasks: str) -> float:
        return sum(number for (task, bucket), number in requests.items() if task in tasks and bucket in lengths) / whole

    short_texts = share(SHORT, "classification")
    if short_texts >= WORTH_IT:
        why = f"{_percent(short_texts)} of the requests are texts of under 100 tokens to classify"
        needs_heads = f"; variant {served.classification} needs exitHeads"
        patch: dict[str, Any] = {"classification": {"earlyExit": {}}}
        yield short_texts, Proposal("early exit for short texts", why + needs_heads, patch, mode=Mode.EARLY_EXIT)
    if (middle := share(MIDDLE, "generation")) >= WORTH_IT:
        yield middle, _speculation(middle, served)
    if (long := share(LONG, "generation")) >= WORTH_IT:
        why = f"{_percent(long)} of the requests continue prompts of over 500 tokens"
        patch = {"generation": {"kvCacheReuse": {}}, "streaming": {"compression": "Auto"}}
        what = "KV reuse and compressed streaming for dialogues"
        yield long, Proposal(what, why, patch, mode=Mode.KV_CACHE_REUSE)
    elif (wasted := recomputed_share(counted, served.generation)) >= WORTH_IT:
        why = f"{_percent(wasted)} of the operations computed what had been computed before"
        yield wasted, Proposal("KV reuse", why, {"generation": {"kvCacheReuse": {}}}, mode=Mode.KV_CACHE_REUSE)
    parts = [share(lengths, "generation", "classification") for lengths in (SHORT, MIDDLE, LONG)]
    if sum(part >= WORTH_IT for part in parts) > 1:
        words = (f"{_percent(part)} {name}" for part, name in zip(parts, ("short", "middle", "long"), strict=True))
        why = f"requests of several lengths come together: {', '.join(words)}"
        yield WORTH_IT, Proposal("batches by length", why, {"batching": {}}, mode=Mode.DYNAMIC_BATCHING)


def _speculation(share: float, served: Served) -> Proposal:
    what = f"speculative decoding, {DRAFT_TOKENS} tokens at a time"
    why = f"{_percent(share)} of the requests continue prompts of 100 to 500 tokens"
    if served.draft is None:
        needs = "name a small ModelVariant with the same tokenizer that is to draft: --draft NAME"
        return Proposal(what, why, needs=needs, mode=Mode.SPECULATIVE)
    block = {"draftVariantRef": {"name": served.draft}, "numTokens": DRAFT_TOKENS}
    return Proposal(what, why, {"generation": {"speculative": block}}, mode=Mode.SPECULATIVE)


def _labels(counted: Counted, served: Served) -> Iterator[tuple[float, Proposal]]:
    """Classification traffic that goes to a generator."""
    if served.generation is None:
        return
    answers = counted.tallies.get((ANSWERS, served.generation), 0.0)
    share = counted.tallies.get((LABEL_ANSWERS, served.generation), 0.0) / answers if answers > 0 else 0.0
    if share < MOSTLY_LABELS:
        return
    what, why = "a classifier for labels", f"{_percent(share)} of the generated answers have at most 4 tokens"
    if served.classification is not None:
        needs = f"let those clients call /v1/classify with model {served.classification}, which takes one forward pass"
        yield share, Proposal(what, why, needs=needs)
    elif served.classifier is not None:
        patch = {"classification": {"variantRef": {"name": served.classifier}}}
        clients = "; the clients then call /v1/classify"
        yield share, Proposal(what, why + clients, patch)
    else:
        needs = (
            "make a ModelVariant with task: Classification and your labels, and name it: --classifier NAME adds"
            " classification.variantRef; the clients then call /v1/classify, which takes one forward pass"
        )
        yield share, Proposal(what, why, needs=needs)


def _pins(counted: Counted, spec: InferencePolicySpec | None) -> Iterator[tuple[float, Proposal]]:
    """Tasks whose slices had better stay."""
    asked = {task: number for (name, task), number in counted.tallies.items() if name == SLICE_REQUESTS and task}
    loads = {task: number for (name, task), number in counted.tallies.items() if name == SLICE_LOADS and task}
    whole = sum(asked.values()) or 1.0
    pod_hours = sum(held.up_seconds for held in (counted.pods or {}).values()) / 3600
    hours = max(pod_hours, counted.hours) or 1.0
    for part, block in _subgraphs(spec):
        to_pin: list[tuple[str, float, str]] = []
        for task in (task.name for task in block.tasks if not task.pinned):
            share, per_hour = asked.get(task, 0.0) / whole, loads.get(task, 0.0) / hours
            if per_hour >= MIS_HOT_LOADS_PER_HOUR:
                to_pin.append((task, share, f"the slice of {task} is loaded {per_hour:.0f} times an hour in each pod"))
            elif share >= HOT_SHARE:
                to_pin.append((task, share, f"{_percent(share)} of the requests for tasks ask for {task}"))
        if to_pin and spec is not None:
            names = ", ".join(task for task, _, _ in to_pin)
            why = "; ".join(reason for _, _, reason in to_pin)
            patch = _pinned(spec, part, [task for task, _, _ in to_pin])
            yield sum(share for _, share, _ in to_pin), Proposal(f"pin {names}", why, patch, mode=Mode.SUBGRAPHS)
    if spec is None and asked:
        busiest = max(asked, key=lambda task: asked[task])
        why = f"{_percent(asked[busiest] / whole)} of the requests for tasks ask for {busiest}"
        needs = "which variant has which slices, only the policy says: give it with -f FILE, or --policy NAME --fetch"
        yield 0.0, Proposal("tasks on demand, the hot ones pinned", why, needs=needs, mode=Mode.SUBGRAPHS)


def _subgraphs(spec: InferencePolicySpec | None) -> Iterator[tuple[str, SubgraphsSpec]]:
    if spec is not None and spec.generation is not None and spec.generation.subgraphs is not None:
        yield "generation", spec.generation.subgraphs
    if spec is not None and spec.classification is not None and spec.classification.subgraphs is not None:
        yield "classification", spec.classification.subgraphs


def _pinned(spec: InferencePolicySpec, part: str, tasks: list[str]) -> dict[str, Any]:
    """The patch that pins all of them: a merge patch replaces the list as a whole."""
    *first, last = [f"/{part}/subgraphs/tasks/{task}/pinned" for task in tasks]
    for path in first:
        spec = with_value(spec, path, "true")
    patch: dict[str, Any] = merge_patch(spec, last, "true")["spec"]
    return patch


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
