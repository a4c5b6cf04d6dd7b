"""The Prometheus series of answers that are computed again at level 0. Label values come from configured names."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter

_VARIANT = ("namespace", "policy", "variant")
AGREE, DIFFER, SKIPPED = "agree", "differ", "skipped"


class ShadowSeries:
    """What came of the comparisons. None of this work is counted as a request, or as the engine's busy seconds."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.answers = Counter(
            "sixfold_shadow",
            "Answers that were to be compared with level 0's: the same label, or every greedy token the one that "
            "level 0 picks after the same beginning; skipped where that was given up.",
            (*_VARIANT, "task", "level", "arm", "result"),
            registry=registry,
        )
        self.tokens = Counter(
            "sixfold_shadow_tokens",
            "Tokens of generated answers for which level 0's likeliest token was compared with that of the weights "
            "that answered.",
            (*_VARIANT, "level", "arm", "result"),
            registry=registry,
        )
        self.kl_nats = Counter(
            "sixfold_shadow_kl_nats",
            "KL(level 0 || the weights that answered), summed over the compared tokens, teacher forced.",
            (*_VARIANT, "level", "arm"),
            registry=registry,
        )
        self.seconds = Counter("sixfold_shadow_seconds", "Seconds of comparing.", _VARIANT, registry=registry)


class ShadowMetrics:
    """The series of the weights that answered."""

    def __init__(self, series: ShadowSeries, labels: Mapping[str, str]) -> None:
        """`labels`: namespace, policy and variant."""
        self._series = series
        self._labels = dict(labels)

    def answer(self, task: str, level: int, arm: str, result: str) -> None:
        """An answer was compared, or won't be."""
        at = {**self._labels, "task": task, "level": str(level), "arm": arm}
        # All of them exist from the first answer on: Prometheus doesn't see a series rise from nothing to 1.
        children = {each: self._series.answers.labels(**at, result=each) for each in (AGREE, DIFFER, SKIPPED)}
        children[result].inc()

    def tokens(self, level: int, arm: str, agree: int, differ: int, kl_nats: float) -> None:
        """The tokens of an answer were compared; `kl_nats` is summed over them."""
        at = {**self._labels, "level": str(level), "arm": arm}
        self._series.tokens.labels(**at, result=AGREE).inc(agree)
        self._series.tokens.labels(**at, result=DIFFER).inc(differ)
        self._series.kl_nats.labels(**at).inc(max(0.0, kl_nats))  # rounding may leave it just below 0

    def computed(self, seconds: float) -> None:
        self._series.seconds.labels(**self._labels).inc(seconds)
