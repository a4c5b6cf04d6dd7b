"""The engine's series of speculation and of weights: labels, and figures that people divide by each other."""

from __future__ import annotations

import pytest

from sixfold_runtime.config import default_config
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.settings import RuntimeSettings

WHERE = {"namespace": "ml", "policy": "bot", "variant": "chat-int4"}


@pytest.fixture
def metrics() -> EngineMetrics:
    return EngineMetrics(RuntimeSettings(namespace="ml", policy="bot"))


def test_accepted_tokens_by_position_add_up(metrics: EngineMetrics) -> None:
    model = metrics.of("chat-int4")
    for drafted, accepted in ((5, 5), (5, 2), (4, 0)):
        model.speculated(2, drafted, accepted)

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, {**WHERE, **labels})

    assert value("sixfold_draft_tokens_total", level="2") == 14
    by_position = [value("sixfold_accepted_tokens_total", level="2", position=str(n)) for n in range(1, 6)]
    assert by_position == [2, 2, 1, 1, 1]
    assert value("sixfold_acceptance_rate") == pytest.approx(7 / 14)


def test_the_acceptance_rate_is_that_of_the_last_drafts(metrics: EngineMetrics) -> None:
    model = metrics.of("chat-int4")
    assert metrics.registry.get_sample_value("sixfold_acceptance_rate", WHERE) is None, "nothing was drafted so far"
    for _ in range(300):
        model.speculated(2, 4, 0)
    for _ in range(256):
        model.speculated(2, 4, 4)
    assert metrics.registry.get_sample_value("sixfold_acceptance_rate", WHERE) == 1.0


def test_steps_count_under_the_level_in_use(metrics: EngineMetrics) -> None:
    model = metrics.of("chat-int4")
    for level in (2, 3):
        metrics.config_applied(default_config(level))
        model.draft_seconds(0.001)
        model.verify_seconds(0.004)
        model.buffer_wait(0.0)
        model.draft_length(4)
    for name in ("draft_seconds", "verify_seconds", "buffer_wait_seconds", "draft_length_tokens"):
        for level in ("2", "3"):
            assert metrics.registry.get_sample_value(f"sixfold_{name}_count", {**WHERE, "level": level}) == 1


def test_weights_that_went_hold_nothing(metrics: EngineMetrics) -> None:
    model = metrics.of("chat-int4")
    model.loaded(1.5, 1000)
    model.released()
    assert metrics.registry.get_sample_value("sixfold_memory_bytes", {**WHERE, "kind": "weights"}) == 0
