"""The series of early exit: what people divide by each other, and no figure where there is none."""

from __future__ import annotations

import math

import pytest
from prometheus_client import generate_latest

from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.modes.exit_drift import Drift
from sixfold_runtime.settings import RuntimeSettings

WHERE = {"namespace": "ml", "policy": "bot", "variant": "intent"}


@pytest.fixture
def metrics() -> EngineMetrics:
    return EngineMetrics(RuntimeSettings(namespace="ml", policy="bot"))


def value(metrics: EngineMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, {**WHERE, **labels})


def test_texts_count_by_the_layer_after_which_they_left(metrics: EngineMetrics) -> None:
    exits = metrics.of("intent").exits
    for depth, exited in ((2, True), (2, True), (4, True), (6, False)):
        exits.left(3, depth, exited, seconds=depth / 100)
    counts = {depth: value(metrics, "sixfold_exit_total", level="3", depth=str(depth)) for depth in (2, 3, 4, 6)}
    assert counts == {2: 2, 3: None, 4: 1, 6: 1}
    assert value(metrics, "sixfold_exit_request_seconds_count", level="3", exited="true") == 3
    assert value(metrics, "sixfold_exit_request_seconds_sum", level="3", exited="true") == pytest.approx(0.08)
    assert value(metrics, "sixfold_exit_request_seconds_sum", level="3", exited="false") == pytest.approx(0.06)


def test_a_text_that_ran_through_before_the_mode_was_on_is_no_exit(metrics: EngineMetrics) -> None:
    metrics.of("intent").exits.left(2, 6, False, 0.1)
    assert value(metrics, "sixfold_exit_total", level="2", depth="6") == 1
    assert value(metrics, "sixfold_exit_total", level="3", depth="6") is None


def test_nan_confidences_do_not_spoil_the_histogram(metrics: EngineMetrics) -> None:
    metrics.of("intent").exits.asked(3, [0.5, math.nan, 0.97])
    assert value(metrics, "sixfold_exit_confidence_count", depth="3") == 2
    assert value(metrics, "sixfold_exit_confidence_sum", depth="3") == pytest.approx(1.47)


def test_drift_is_absent_until_there_is_a_figure(metrics: EngineMetrics) -> None:
    current: Drift | None = None
    metrics.of("intent").exits.watch_drift(lambda: current)
    assert value(metrics, "sixfold_exit_length_drift") is None
    current = Drift(length_index=0.3, exit_rate_difference=-0.2)
    assert value(metrics, "sixfold_exit_length_drift") == 0.3
    assert value(metrics, "sixfold_exit_rate_drift") == -0.2
    assert b'sixfold_exit_rate_drift{namespace="ml",policy="bot",variant="intent"} -0.2' in generate_latest(
        metrics.registry
    )
    current = None
    assert value(metrics, "sixfold_exit_rate_drift") is None
