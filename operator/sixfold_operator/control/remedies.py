"""What might end each kind of waste: candidates, best first, the last of them always advice in words. Pure.

Whether the policy's schema takes a candidate is not asked here: recommendations.py does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sixfold_api.modes import LEVEL_FROM, Mode
from sixfold_api.policy import InferencePolicySpec
from sixfold_api.ticket import Cause
from sixfold_operator.control import steps
from sixfold_operator.control.waste import Facts

EXAMPLE = "classification: {variantRef: {name: YOUR-CLASSIFIER}, earlyExit: {rule: Calibrated}}"
"""Of a classification block; a ModelVariant with task: Classification has to be there first."""


@dataclass(frozen=True)
class Candidate:
    """Something to recommend. With `path` and `value` it can be tuned; with `patch` it is the user's to apply."""

    summary: str
    path: str | None = None
    value: str | None = None
    patch: dict[str, Any] | None = None


@dataclass(frozen=True)
class Situation:
    """`now` is the spec with the tuned values that hold; `spec` what the user wrote."""

    spec: InferencePolicySpec
    now: InferencePolicySpec
    facts: Facts
    variant: str | None


def _turn_on(s: Situation, mode: Mode, is_there: bool, patch: dict[str, Any], what: str) -> Iterator[Candidate]:
    """What keeps a mode from running, if anything does: its block is absent, the ceiling is too low, the operator
    turned it off, or the level was rolled back."""
    level = LEVEL_FROM[mode]
    raised: dict[str, Any] = {"rollbackLevel": level} if s.spec.rollback_level < level else {}
    also = f" {mode.value} runs from level {level}, so rollbackLevel goes up to it." if raised else ""
    if not is_there:
        yield Candidate(f"{what}{also}", patch={**patch, **raised})
    elif raised:
        yield Candidate(
            f"{mode.value} is in the spec, but runs from level {level} and rollbackLevel is"
            f" {s.spec.rollback_level}: raise it. Other modes of level {level} start too.",
            patch=raised,
        )
    elif mode in s.facts.suspended:
        yield Candidate(
            f"{mode.value} would avoid it, but the operator suspended it: `kubectl sixfold explain policy"
            f" {s.facts.policy}` says why. Another retryToken lets it try again."
        )
    elif s.facts.target < level:
        yield Candidate(
            f"{mode.value} would avoid it and runs from level {level}, but the operator holds level {s.facts.target}:"
            f" `kubectl sixfold explain policy {s.facts.policy}` says why. It goes back up by itself."
        )


def _padding(s: Situation) -> Iterator[Candidate]:
    on = {"batching": {"maxBatchTokens": 1024}}
    what = "Requests of different lengths are padded to the longest of their batch. Batch them by length."
    yield from _turn_on(s, Mode.DYNAMIC_BATCHING, s.spec.batching is not None, on, what)
    if (batching := s.now.batching) is not None:
        fewer = steps.fewer_batch_tokens(batching.max_batch_tokens)
        if fewer < batching.max_batch_tokens:
            yield Candidate(
                "Batches still mix lengths, and smaller ones mix less: maxBatchTokens from"
                f" {batching.max_batch_tokens} to {fewer}.",
                "/batching/maxBatchTokens",
                str(fewer),
            )
        longer = steps.longer_wait(batching.short_wait, batching.max_wait)
        yield Candidate(
            "Short requests that wait a little longer find more of their own length: shortWait from"
            f" {batching.short_wait} to {longer}.",
            "/batching/shortWait",
            longer,
        )
    yield Candidate("Batches can't get much smaller: give short and long requests policies of their own.")


def _rejected_draft(s: Situation) -> Iterator[Candidate]:
    speculative = s.now.generation and s.now.generation.speculative
    if speculative:
        path, tokens = "/generation/speculative/numTokens", speculative.num_tokens
        fewer = steps.supported_draft_tokens(tokens, s.facts.acceptance)
        measured = "" if s.facts.acceptance is None else f" ({s.facts.acceptance:.0%} are accepted)"
        one_by_one = speculative.threshold is not None and speculative.threshold.guard.value == "SingleToken"
        if not one_by_one:
            yield Candidate(
                f"Most drafted tokens are computed for nothing{measured}: draft fewer at a time, numTokens from"
                f" {tokens} to {fewer}.",
                path,
                str(fewer),
            )
        yield Candidate(
            "Let the draft's length follow measured times and acceptance: it drafts none where none pays.",
            patch={"generation": {"speculative": {"length": "CostModel"}}},
        )
        yield Candidate(
            f"This draft isn't worth its time{measured}: remove speculative, or name a draft that is closer to the"
            " model.",
            patch={"generation": {"speculative": None}},
        )
    yield Candidate("Drafted tokens are rejected, but the spec has no generation.speculative: nothing to change.")


def _recomputed_prefix(s: Situation) -> Iterator[Candidate]:
    generation = s.now.generation
    if generation is not None:
        on = {"generation": {"kvCacheReuse": {"store": "Memory"}}}
        what = "Prompts begin with what was computed before. Keep keys and values and compute it once."
        yield from _turn_on(s, Mode.KV_CACHE_REUSE, generation.kv_cache_reuse is not None, on, what)
        yield from _more_blocks(s)
    yield Candidate(
        "Beginnings of prompts are computed again although they are kept as far as memory goes: put what all prompts"
        " share at their beginning and what changes at their end."
    )


def _low_hit_rate(s: Situation) -> Iterator[Candidate]:
    """Prompts that never repeat hit nothing however much is kept, so the words say so."""
    reuse = s.now.generation and s.now.generation.kv_cache_reuse
    if reuse:
        yield from _more_blocks(s)
        longer = steps.longer_ttl(reuse.ttl)
        yield Candidate(
            f"Blocks may be gone before they are asked for again: keep them for {longer} instead of {reuse.ttl}.",
            patch={"generation": {"kvCacheReuse": {"ttl": longer}}},
        )
    yield Candidate(
        "Kept blocks are hardly found again: these prompts have little in common. Put what they share at their"
        " beginning, or remove generation.kvCacheReuse."
    )


def _more_blocks(s: Situation) -> Iterator[Candidate]:
    reuse = s.now.generation and s.now.generation.kv_cache_reuse
    if not reuse:
        return
    base = "/generation/kvCacheReuse/"
    if reuse.store.value == "Redis":
        yield from _double(base + "maxSize", reuse.max_size, "Blocks leave Redis before they are asked for again")
    yield from _double(base + "memorySize", reuse.memory_size, "Blocks leave memory before they are asked for again")


def _double(path: str, size: str, why: str) -> Iterator[Candidate]:
    twice = steps.doubled_size(size)
    yield Candidate(f"{why}: {path.rsplit('/', 1)[-1]} from {size} to {twice}.", path, twice)


def _unneeded_layers(s: Situation) -> Iterator[Candidate]:
    classification = s.now.classification
    if classification is not None:
        name = classification.variant_ref.name
        exits = classification.early_exit
        if exits is None and name not in s.facts.exit_variants:
            yield Candidate(
                f"Layers are computed that change no label, but variant {name} has no exit heads that let texts exit:"
                " make a variant from it with exitHeads: {training: …} and set classification.earlyExit on it."
            )
        on = {"classification": {"earlyExit": {"rule": "Calibrated"}}}
        what = f"Layers are computed that change no label. Let texts leave variant {name} as soon as it is sure."
        yield from _turn_on(s, Mode.EARLY_EXIT, exits is not None, on, what)
        if exits is not None and exits.threshold is not None:
            lower = steps.lower_threshold(exits.threshold)
            yield Candidate(
                f"Texts could leave earlier: threshold from {exits.threshold} to {lower}.",
                "/classification/earlyExit/threshold",
                lower,
            )
        if exits is not None and exits.max_disagreement is not None:
            more = steps.more_disagreement(exits.max_disagreement)
            yield Candidate(
                f"Texts could leave earlier if {float(more):.2%} of the labels may differ instead of"
                f" {float(exits.max_disagreement):.2%}.",
                "/classification/earlyExit/maxDisagreement",
                more,
            )
    yield Candidate(
        "Texts leave as early as the thresholds allow: exit heads that are trained on text like yours let them leave"
        " earlier at the same disagreement."
    )


def _cancelled(s: Situation) -> Iterator[Candidate]:
    yield Candidate(
        "Clients leave before their answer is done, after an engine has worked on it. Give them a timeout that fits the"
        " answers they ask for, let them stream, or let them send X-Request-Timeout: what can't be done in time is then"
        f" refused before it costs anything. spec.gateway.requestTimeout is {s.now.gateway.request_timeout}."
    )


def _mis_hot_task(s: Situation) -> Iterator[Candidate]:
    for part, block in (("classification", s.now.classification), ("generation", s.now.generation)):
        subgraphs = block.subgraphs if block is not None else None
        if subgraphs is None or s.variant not in {task.name for task in subgraphs.tasks}:
            continue
        path = f"/{part}/subgraphs"
        yield Candidate(
            f"The slice of task {s.variant} is loaded over and over: pin it.",
            f"{path}/tasks/{s.variant}/pinned",
            "true",
        )
        if subgraphs.cache_size is not None:
            yield from _double(f"{path}/cacheSize", subgraphs.cache_size, "Slices of tasks push each other out")
    yield Candidate("Slices of tasks are loaded over and over: offer fewer tasks, or give some a policy of their own.")


def _idle_accelerator(s: Situation) -> Iterator[Candidate]:
    own = s.spec.classification.engine if s.spec.classification is not None else None
    is_classifier = (
        own is not None and s.spec.classification is not None and (s.variant == s.spec.classification.variant_ref.name)
    )
    engine = own if own is not None and is_classifier else s.spec.engine
    fewer = {"engine": {"replicas": (engine.replicas or 1) - 1}}
    if (engine.replicas or 1) > 1:
        yield Candidate(
            f"Engine pods are idle most of the time: {engine.replicas} replicas are more than the traffic needs.",
            patch={"classification": fewer} if is_classifier else fewer,
        )
    yield Candidate(
        "The only engine pod is idle most of the time: share its accelerator (a MIG slice or a smaller device by"
        " engine.accelerator.resourceName, or CPU for small models), serve more from this policy, or let an autoscaler"
        " take it to 0 at idle hours."
    )


def _generated_labels(s: Situation) -> Iterator[Candidate]:
    if s.spec.classification is not None:
        yield Candidate(
            "Most generated answers are a word or two, as labels are. This policy classifies too: let those clients"
            " call /v1/classify, which takes one forward pass."
        )
    yield Candidate(
        "Most generated answers are a word or two, as labels are: a classifier makes them in one forward pass. Prepare"
        f" a ModelVariant with task: Classification, add it to the spec ({EXAMPLE}) and call /v1/classify."
    )


REMEDIES: dict[Cause, Callable[[Situation], Iterator[Candidate]]] = {
    Cause.PADDING: _padding,
    Cause.REJECTED_DRAFT: _rejected_draft,
    Cause.RECOMPUTED_PREFIX: _recomputed_prefix,
    Cause.UNNEEDED_LAYERS: _unneeded_layers,
    Cause.CANCELLED: _cancelled,
    Cause.LOW_HIT_RATE: _low_hit_rate,
    Cause.MIS_HOT_TASK: _mis_hot_task,
    Cause.IDLE_ACCELERATOR: _idle_accelerator,
    Cause.GENERATED_LABELS: _generated_labels,
}
