"""`sixfold report`: figures from what was counted, logs with foreign lines, a page without anything from outside."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import escape
from typer.testing import CliRunner

from sixfold_runtime.cli import app
from sixfold_runtime.report import log_source
from sixfold_runtime.report.analysis import figures, quantile
from sixfold_runtime.report.model import Counted, ReportError
from sixfold_runtime.report.page import page

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def counted(**changes: Any) -> Counted:
    given_ = {
        "source": "http://prometheus",
        "start": "a",
        "end": "b",
        "hours": 1.0,
        "requests": {(9, "0-100", "chat"): 60.0, (10, "500-2000", "chat"): 40.0},
        "by_level": {("chat", "0"): 50.0, ("chat", "3"): 50.0},
        "engine_seconds": {("chat", "0"): 20.0, ("chat", "3"): 5.0},
        "by_length": {("0-100", "chat"): (60.0, 5.0), ("500-2000", "chat"): (40.0, 20.0)},
        "failed": 2.0,
        "flops": {"": 30.0, "recomputed_prefix": 60.0, "padding": 10.0},
        "spread": [(0.1, 50.0), (1.0, 100.0), (math.inf, 100.0)],
        "modes": {"accepted": 30.0, "drafted": 60.0},
        "pod_hours": 2.0,
        "busy_hours": 0.5,
        "loads": {"chat": 1.5},
        "cost_per_hour": {"engine": 3.6},
    }
    return Counted(**{**given_, **changes})


def test_the_figures_follow_from_what_was_counted() -> None:
    found = figures(counted())
    assert (found.requests, found.failed_share) == (100.0, 0.02)
    assert found.cost == pytest.approx(25 / 3600 * 3.6)
    assert found.cost_per_request == pytest.approx(25 / 3600 * 3.6 / 100)
    assert found.wasted_share == pytest.approx(0.7)
    assert found.wasted_by_cause == (("recomputed_prefix", 0.6), ("padding", 0.1))
    plain, top = found.levels
    assert (plain.engine_ms, plain.saved_against_level_0) == (400.0, None)
    assert (top.engine_ms, top.saved_against_level_0) == (100.0, pytest.approx(0.75))
    assert (found.utilisation, found.idle_hours, found.idle_cost) == (0.25, 1.5, pytest.approx(5.4))
    assert [(entry.share, entry.cost_share) for entry in found.quadrants] == [(0.6, 0.2), (0.4, 0.8)]
    assert dict(found.spread_ms) == pytest.approx({"median": 100.0, "P90": 820.0, "P99": 982.0})
    assert [mode.name for mode in found.modes] == ["Speculative decoding"]
    assert "recomputed" not in found.advice[0] and "kvCacheReuse" in found.advice[0]
    assert found.missing == ()


def test_what_is_not_known_is_said_and_never_zero() -> None:
    bare = figures(Counted(source="x", requests={(1, "unknown", "chat"): 3.0}))
    assert (bare.cost, bare.wasted_share, bare.utilisation, bare.idle_hours) == (None, None, None, None)
    assert len(bare.missing) == 4
    text = page(bare, "all policies")
    for line in bare.missing:
        assert str(escape(line)) in text
    with pytest.raises(ReportError, match="no requests were found"):
        figures(Counted(source="x"))


@pytest.mark.parametrize("name", ["chat", "<script>alert(1)</script>"])
def test_the_page_needs_nothing_from_outside(name: str) -> None:
    text = page(figures(counted(requests={(9, "0-100", name): 5.0})), name)
    assert "<script" not in text
    assert "http" not in text.replace("http://prometheus", "").replace('xmlns="http://www.w3.org/2000/svg"', "")


def line(**fields: Any) -> str:
    request = {
        "message": "request",
        "X-Request-ID": "r",
        "model_name": "chat",
        "level": 3,
        "input_length": 120,
        "status": 200,
        "start_time": "2026-01-01T09:30:00Z",
        "engine_seconds": 0.2,
    }
    return json.dumps(request | fields)


def test_a_log_is_read_among_foreign_lines(tmp_path: Path) -> None:
    lines = [
        line(),
        "nonsense",
        "pod-1 " + line(level=0, engine_seconds=0.4),
        '{"message": "started"}',
        line()[:40],
        "",
        line(status=503, engine_seconds=None),
        line(start_time="2025-12-01T09:30:00Z"),
    ]
    (tmp_path / "log").write_text("\n".join(lines))
    found = log_source.read([tmp_path / "log"], timedelta(days=1), NOW)
    assert found.requests == {(9, "100-500", "chat"): 3.0}
    assert (found.failed, found.skipped_lines) == (1.0, 3)
    assert found.engine_seconds == {("chat", "3"): 0.2, ("chat", "0"): 0.4}
    assert figures(found).levels[1].saved_against_level_0 == pytest.approx(0.5)


@given(st.lists(st.text(max_size=60) | st.dictionaries(st.text(max_size=5), st.integers()).map(json.dumps), max_size=5))
def test_no_line_ends_the_reading(lines: list[str]) -> None:
    for text in lines:
        log_source._request(text)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20), st.floats(0, 1))
def test_a_quantile_lies_within_its_histogram(values: list[float], share: float) -> None:
    bounds = sorted({*values, math.inf})
    spread = [(bound, float(sum(value <= bound for value in values))) for bound in bounds]
    found = quantile(spread, share)
    assert found is not None
    assert 0 <= found <= max(values)


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(line() + "\n")
    html, numbers = tmp_path / "r.html", tmp_path / "r.json"
    arguments = ["report", "--log", str(tmp_path / "log"), "-o", str(html), "--json", str(numbers)]
    answer = CliRunner().invoke(app, [*arguments, "--cost-per-hour", "3.6"])
    assert answer.exit_code == 0, answer.output
    assert json.loads(numbers.read_text())["schema_version"] == 1
    assert "What inference costs" in html.read_text()
    assert "a thousand requests" in answer.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "either --prometheus URL or --log FILE"),
        (["--log", "/nowhere/log"], "/nowhere/log can't be read"),
        (["--prometheus", "http://127.0.0.1:9"], "can't be asked"),
        (["--log", "/dev/null"], "is a request"),
        (["--log", "/dev/null", "--since", "1s"], "between 1m and 8784h"),
    ],
)
def test_mistakes_are_told(arguments: list[str], words: str) -> None:
    answer = CliRunner().invoke(app, ["report", *arguments])
    assert answer.exit_code == 1
    assert words in answer.output
