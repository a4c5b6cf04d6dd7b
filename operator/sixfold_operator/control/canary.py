"""Is the canary worse than the rest? Statistics of two arms that ran side by side. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sixfold_api.control_status import Verdict
from sixfold_operator.control.model import CanaryJudgement

ONE_SIDED_95 = 1.6448536269514722
"""Quantile of the normal distribution."""
ERROR_MARGIN = 0.01
"""A share of errors that much above the rest's is no reason to reject: it is what a single error in a hundred makes."""
LATENCY_RATIO = 1.25
"""A P95 that many times the rest's is."""


@dataclass(frozen=True)
class ArmFigures:
    """What one arm did since the step began.

    Attributes:
        requests: answered or failed; those that were refused, cancelled or limited don't count.
        errors: those among them that failed.
        p95_seconds: of a request from beginning to end; None (or NaN) where Prometheus had no answer.
        shadowed: answers that were computed again at level 0.
        differed: those among them that came out different.
        shadow_tokens: tokens of the answers that were compared by divergence.
        divergence_nats: mean KL(level 0 || served) of such a token; None where nothing was compared.
    """

    requests: float = 0.0
    errors: float = 0.0
    p95_seconds: float | None = None
    shadowed: float = 0.0
    differed: float = 0.0
    shadow_tokens: float = 0.0
    divergence_nats: float | None = None


def judge(
    stable: ArmFigures,
    canary: ArmFigures,
    min_samples: int,
    *,
    max_disagreement: float = 0.05,
    max_divergence_nats: float = 0.05,
) -> CanaryJudgement:
    """The canary beside the rest.

    Breach: its share of errors is higher by more than ERROR_MARGIN at 95 % confidence (one-sided; Newcombe 1998,
    method 10), its P95 is over LATENCY_RATIO times the rest's, or its answers differ from level 0's by more than the
    policy allows.
    Unknown: fewer than min_samples requests in one of the arms, or a figure is missing.

    Args:
        max_disagreement: threshold of ShadowDisagreement for this policy, that the lower 95 % bound must not pass.
        max_divergence_nats: threshold of ShadowDivergence for this policy.
    """
    samples = _count(canary.requests)
    fewest = min(samples, _count(stable.requests))
    worse = _quality(canary, min_samples, max_disagreement, max_divergence_nats)
    if worse is None and fewest >= min_samples:
        worse = _errors(stable, canary) or _latency(stable, canary)
    if worse is not None:
        signal, why = worse
        return CanaryJudgement(Verdict.BREACH, samples, why, signal)
    if fewest < min_samples:
        arm = "the canary" if samples < min_samples else "the rest"
        return CanaryJudgement(Verdict.UNKNOWN, samples, f"{fewest} of {min_samples} requests that {arm} needs")
    if any(_known(value) is None for arm in (stable, canary) for value in (arm.errors, arm.p95_seconds)):
        return CanaryJudgement(Verdict.UNKNOWN, samples, "Prometheus has no errors or no latency of one of the arms")
    return CanaryJudgement(Verdict.OK, samples, f"{samples} requests, no worse than the rest")


def wilson(successes: float, trials: float, z: float = ONE_SIDED_95) -> tuple[float, float]:
    """Lower and upper bound of a proportion (Wilson 1927); (0, 1) where there is no whole trial."""
    if not trials >= 1:
        return 0.0, 1.0
    share = min(max(successes / trials, 0.0), 1.0)
    centre = share + z * z / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return max((centre - spread) / scale, 0.0), min((centre + spread) / scale, 1.0)


def least_difference(first: tuple[float, float], second: tuple[float, float]) -> float:
    """Lower one-sided 95 % bound of the second proportion minus the first, each (successes, trials); trials >= 1."""
    lower, upper = first[0] / first[1], second[0] / second[1]
    return (upper - lower) - math.hypot(upper - wilson(*second)[0], wilson(*first)[1] - lower)


def _errors(stable: ArmFigures, canary: ArmFigures) -> tuple[str, str] | None:
    rest = (min(stable.errors, stable.requests), stable.requests)
    tried = (min(canary.errors, canary.requests), canary.requests)
    if not least_difference(rest, tried) > ERROR_MARGIN:
        return None
    return "ErrorRate", (
        f"{tried[0] / tried[1]:.1%} of {tried[1]:.0f} requests failed, against {rest[0] / rest[1]:.1%} of {rest[1]:.0f}"
    )


def _latency(stable: ArmFigures, canary: ArmFigures) -> tuple[str, str] | None:
    rest, tried = _known(stable.p95_seconds), _known(canary.p95_seconds)
    if rest is None or tried is None or tried <= LATENCY_RATIO * rest:
        return None
    return "RequestP95", f"P95 of {tried:.3g} s, against {rest:.3g} s of the rest"


def _quality(
    canary: ArmFigures, min_samples: int, max_disagreement: float, max_divergence_nats: float
) -> tuple[str, str] | None:
    """Against level 0, not against the rest: a lossy mode may differ, within what was measured for its variant."""
    least = wilson(canary.differed, canary.shadowed)[0]
    if canary.shadowed >= min_samples and least > max_disagreement:
        return "ShadowDisagreement", (
            f"{canary.differed:.0f} of {canary.shadowed:.0f} answers differ from level 0's: at least {least:.1%},"
            f" over {max_disagreement:.1%}"
        )
    nats = _known(canary.divergence_nats)
    if nats is not None and canary.shadow_tokens >= min_samples and nats > max_divergence_nats:
        return "ShadowDivergence", f"{nats:.3g} nats a token away from level 0, over {max_divergence_nats:.3g}"
    return None


def _known(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _count(value: float) -> int:
    return int(value) if math.isfinite(value) and value > 0 else 0
