"""`sixfold gate`, from files to a verdict."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sixfold_api.effective import Effective, effective
from sixfold_api.kv_reuse import KVStore
from sixfold_api.modes import Mode, ModeState
from sixfold_api.policy import InferencePolicySpec
from sixfold_api.runtime_config import RuntimeConfig
from sixfold_runtime import local, local_models, manifests
from sixfold_runtime.gate import record
from sixfold_runtime.gate.compare import Comparison, compare
from sixfold_runtime.gate.measure import Bench, Repeat
from sixfold_runtime.gate.record import Figure, GateError, Metric, Record, Workload
from sixfold_runtime.gate.workload import Load, digest, workload
from sixfold_runtime.settings import RuntimeSettings

REQUESTS = 24
REPEATS = 5
"""After one that warms up and isn't counted."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Candidate:
    """Files as `sixfold serve -f` takes them, and the level at which they are measured; None is the policy's own."""

    files: Sequence[Path]
    claims: Mapping[str, Path]
    policy: str | None = None
    level: int | None = None


@dataclass(frozen=True)
class Outcome:
    record: Record
    comparison: Comparison | None
    """None where there was no baseline to compare with, and one was made."""
    warnings: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return self.comparison is None or not self.comparison.failures


def run(
    candidate: Candidate,
    baseline_file: Path,
    settings: RuntimeSettings,
    *,
    limit: float,
    requests: int | None,
    update: bool,
    say: Say,
) -> Outcome:
    """Measure, compare, and keep as the baseline if asked to.

    Args:
        limit: how much worse a figure may be, as a share.
        requests: of each kind; None is what the baseline was made with.
        say: told what is being done.

    Raises:
        ManifestError: files that `sixfold serve` refuses too.
        GateError: no baseline, one that can't be compared, or a candidate that can't be served.
    """
    baseline = None if update and not baseline_file.exists() else record.read(baseline_file)
    kept = REQUESTS if baseline is None else baseline.workload.requests
    found, warnings = measure(candidate, settings, requests or kept, say)
    if baseline is not None and baseline.workload.digest != found.workload.digest:
        if not update:
            raise GateError(_other_workload(baseline_file, baseline, found))
        baseline = None
    comparison = None if baseline is None else compare(baseline, found, limit)
    if update:
        record.write(baseline_file, found)
    return Outcome(found, comparison, tuple(warnings) + (comparison.warnings if comparison else ()))


def measure(candidate: Candidate, settings: RuntimeSettings, requests: int, say: Say) -> tuple[Record, tuple[str, ...]]:
    """The candidate's figures, and what of its policy can't be had here. Raises as `run`."""
    setup = local.load(candidate.files, candidate.claims, candidate.policy, settings)
    found = manifests.read(candidate.files)
    policy = found.policy(candidate.policy)
    unsupported = local_models.resolve(policy, found.variants, candidate.claims).unsupported
    result = _effective(policy.spec, candidate.level, unsupported)
    say(f"loading {', '.join(model.name for model in setup.settings.models)}")
    with Bench(setup.settings, RuntimeConfig(sequence=0, stable=result.config)) as bench:
        loads = workload(bench.served, requests)
        say("warming up")
        bench.run(loads)
        repeats = []
        for number in range(1, REPEATS + 1):
            say(f"measuring, {number} of {REPEATS}")
            repeats.append(bench.run(loads))
        here = bench.machine
    return Record(
        made=record.today(),
        policy=policy.name,
        level=result.config.level,
        modes=[str(mode.name) for mode in result.modes if mode.state is ModeState.ACTIVE],
        machine=here,
        versions=record.versions(),
        workload=Workload(digest(loads), requests, REPEATS),
        figures=[_figure(kind, metric, repeats) for kind, metric in repeats[0].figures],
        answers={
            kind: [sorted(set(given)) for given in zip(*(repeat.answers[kind] for repeat in repeats), strict=True)]
            for kind in repeats[0].answers
        },
        waste={cause: share for cause, share in repeats[-1].waste.items() if share},
        cost_per_hour=_cost_per_hour(policy.spec, loads),
    ), setup.warnings


def _figure(kind: str, metric: Metric, repeats: Sequence[Repeat]) -> Figure:
    values = [repeat.figures[kind, metric] for repeat in repeats]
    return Figure(kind, metric, values, [repeat.paces[kind] for repeat in repeats] if metric.is_time else [])


def _effective(spec: InferencePolicySpec, level: int | None, unsupported: Mapping[Mode, str]) -> Effective:
    """Without shadow answers, which are computed with spare time, and without a Redis, which isn't here."""
    if level is not None and level > spec.rollback_level:
        raise GateError(f"level {level} is above spec.rollbackLevel, which is {spec.rollback_level}")
    generation = spec.generation
    if generation is not None and (reuse := generation.kv_cache_reuse) is not None:
        reuse = reuse.model_copy(update={"store": KVStore.MEMORY, "redis": None})
        generation = generation.model_copy(update={"kv_cache_reuse": reuse})
    return effective(spec.model_copy(update={"shadow": None, "generation": generation}), level, unsupported)


def _cost_per_hour(spec: InferencePolicySpec, loads: Sequence[Load]) -> dict[str, float]:
    classification = spec.classification and spec.classification.engine
    engines = {True: spec.engine, False: classification or spec.engine}
    prices = {load.kind: engines[bool(load.max_tokens)].cost_per_hour for load in loads}
    return {kind: float(price) for kind, price in prices.items() if price is not None}


def _other_workload(file: Path, baseline: Record, found: Record) -> str:
    if baseline.workload.requests != found.workload.requests:
        what = f"{baseline.workload.requests} requests of each kind, this with {found.workload.requests}"
    else:
        what = f"{', '.join(baseline.answers) or 'nothing'}; the candidate is asked {', '.join(found.answers)}"
    return f"{file} was measured with another workload ({what}): make it again with --update-baseline"


def percentage(text: str) -> float:
    """`10%` as 0.1. Raises ValueError."""
    if not (match := re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)\s*%", text.strip())):
        raise ValueError(f"{text!r}: expected a percentage such as 10%")
    return float(match[1]) / 100
