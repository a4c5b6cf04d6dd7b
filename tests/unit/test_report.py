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
from sixfold_runtime.report.analysis import figures
from sixfold_runtime.report.growth import Counters, growth
from sixfold_runtime.report.model import Counted, Held, Loading, Place, ReportError, Room, Spent, Work
from sixfold_runtime.report.page import page
from sixfold_runtime.report.quadrant_plot import LEFT, SIDE, TOP, labels
from sixfold_runtime.report.slots import MOST, Slots
from sixfold_runtime.report.spread import coarse, fine_bound, quantile

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
POLICY = "shop/assistant"
ENGINES, CLASSIFIERS = Place(POLICY, "engine"), Place(POLICY, "classifier")


def counted(**changes: Any) -> Counted:
    """Short prompts mostly at level 0, long ones mostly at level 3."""
    given_ = {
        "source": "http://prometheus",
        "start": "a",
        "end": "b",
        "hours": 1.0,
        "requests": {(9, "0-100", "chat"): 60.0, (10, "500-2000", "chat"): 40.0, (10, "0-100", "intent"): 100.0},
        "spent": {
            Work(POLICY, "chat", "0", "0-100"): Spent(50, 5.0),
            Work(POLICY, "chat", "0", "500-2000"): Spent(10, 10.0),
            Work(POLICY, "chat", "3", "0-100"): Spent(10, 0.5),
            Work(POLICY, "chat", "3", "500-2000"): Spent(30, 15.0),
            Work(POLICY, "intent", "3", "0-100"): Spent(100, 2.0),
        },
        "failed": 2.0,
        "flops": {
            (POLICY, "chat", ""): 30.0,
            (POLICY, "int4", "recomputed_prefix"): 60.0,
            (POLICY, "chat", "padding"): 10,
        },
        "spread": {
            (POLICY, "chat"): {0.1: 50.0, 1.0: 50.0, math.inf: 0.0},
            (POLICY, "intent"): {0.1: 100.0, 1.0: 0.0, math.inf: 0.0},
        },
        "exits": {("intent", 3): 80.0, ("intent", 12): 20.0},
        "tallies": {
            ("sixfold_accepted_tokens_total", ""): 30.0,
            ("sixfold_draft_tokens_total", ""): 60.0,
            ("sixfold_draft_length_tokens_count", ""): 25.0,
            ('sixfold_draft_length_tokens_bucket{le="0.0"}', ""): 10.0,
        },
        "pods": {(ENGINES, 9): Held(3600, 1800), (ENGINES, 10): Held(3600, 0), (CLASSIFIERS, 9): Held(3600, 360)},
        "loads": {"chat": Loading(2, 3.0, 1.6)},
        "rooms": {"chat": Room(4e9, 1e9)},
        "tasks": {"chat": "Generation", "intent": "Classification"},
        "prices": {ENGINES: 3.6, CLASSIFIERS: 0.36},
    }
    return Counted(**{**given_, **changes})


# --- figures


def test_each_pod_is_charged_at_its_own_price() -> None:
    found = figures(counted())
    assert (found.requests, found.failed_share) == (200.0, 0.01)
    assert found.cost == pytest.approx((30.5 * 3.6 + 2.0 * 0.36) / 3600)
    assert found.cost_per_request == pytest.approx(found.cost / 200)
    assert found.bill == pytest.approx(2 * 3.6 + 0.36)
    assert (found.utilisation, found.idle_hours) == (pytest.approx(0.2), pytest.approx(2.4))
    assert found.idle_cost == pytest.approx(1.5 * 3.6 + 0.9 * 0.36)
    assert [(entry.column, entry.idle_hours) for entry in found.capacity_by_column] == [(9, 1.4), (10, 1.0)]
    assert [(spread.price, spread.variants) for spread in found.spread] == [(3.6, ("chat",)), (0.36, ("intent",))]
    assert [one.high_cost for one in found.spread[0].bins] == pytest.approx([0.0001, 0.001])


def test_a_classifier_without_pods_of_its_own_is_charged_as_an_engine() -> None:
    found = figures(counted(prices={ENGINES: 3.6}, pods={(ENGINES, 9): Held(3600, 1800)}))
    assert found.cost == pytest.approx(32.5 * 3.6 / 3600)


def test_no_price_is_made_up() -> None:
    found = figures(counted(prices={ENGINES: 3.6}, split_policies={POLICY}))
    assert (found.cost, found.bill, found.idle_cost) == (None, None, None)
    assert "shop/assistant (classifier)" in found.missing[0]
    elsewhere = figures(counted(prices={ENGINES: 3.6}, split_policies={POLICY}, price_elsewhere=0.36))
    assert elsewhere.bill == figures(counted()).bill


def test_savings_compare_requests_of_one_length() -> None:
    found = {(level.variant, level.level): level for level in figures(counted()).levels}
    assert found["chat", "3"].engine_ms > found["chat", "0"].engine_ms, "plain means say the opposite"
    assert found["chat", "3"].saved_share == pytest.approx(0.5)
    assert found["chat", "3"].saved == pytest.approx(15.5 * 3.6 / 3600)
    assert found["chat", "0"].saved_share is None
    assert found["intent", "3"].saved_share is None


def test_few_requests_are_no_comparison() -> None:
    spent = counted().spent | {Work(POLICY, "chat", "0", "500-2000"): Spent(4, 4.0)}
    top = next(level for level in figures(counted(spent=spent)).levels if level.level == "3")
    assert (top.saved_share, top.compared_share) == (pytest.approx(0.5), 0.25)


def test_waste_and_what_modes_did() -> None:
    found = figures(counted())
    assert found.wasted_share == pytest.approx(0.7)
    assert found.wasted_by_cause == (("recomputed_prefix", 0.6), ("padding", 0.1))
    assert dict(found.wasted_cost_by_cause) == pytest.approx({"recomputed_prefix": 0.5 * 3.6 * 0.6, "padding": 0.18})
    assert [mode.name for mode in found.modes] == ["Early exit", "Speculative decoding"]
    assert found.tokens_per_verification == pytest.approx(3.0)
    assert found.mean_exit_depth == (("intent", pytest.approx(4.8)),)
    assert [(load.starts, load.starts_seconds) for load in found.loads] == [(2, 3.0)]
    assert [room.unused_share for room in found.memory] == [0.75]
    assert "idle" in found.advice[0] and "kvCacheReuse" in found.advice[1], "the dearest first"
    assert [(one.variant, one.utilisation) for one in found.quadrants] == [
        ("intent", pytest.approx(0.1)), ("chat", pytest.approx(0.25)), ("chat", pytest.approx(0.25)),
    ]  # fmt: skip
    assert found.missing == ()


def test_what_is_not_known_is_said_and_never_zero() -> None:
    bare = figures(Counted(source="x", requests={(1, "unknown", "chat"): 3.0}))
    assert (bare.cost, bare.bill, bare.wasted_share, bare.utilisation, bare.idle_hours) == (None,) * 5
    assert len(bare.missing) == 5
    text = page(bare, "all policies")
    for line in bare.missing:
        assert str(escape(line)) in text
    with pytest.raises(ReportError, match="nobody made a request"):
        figures(Counted(source="x"))


# --- growth


@pytest.mark.parametrize(
    ("samples", "grown"),
    [
        ([(0, 5.0), (10, 7.0), (20, 7.0), (30, 8.0)], [(10, 2.0), (30, 1.0)]),
        ([(10, 7.0)], [(10, 7.0)]),
        ([(0, 7.0)], []),
        ([(-10, 3.0), (10, 7.0)], [(10, 4.0)]),
        ([(0, 9.0), (10, 2.0), (20, 5.0)], [(10, 2.0), (20, 3.0)]),
        ([], []),
    ],
    ids=["grows", "begins within", "was there before", "a gap at the start", "a reset", "nothing"],
)
def test_growth(samples: list[tuple[float, float]], grown: list[tuple[float, float]]) -> None:
    assert growth(samples, start_seconds=0) == grown


@given(st.lists(st.lists(st.floats(0, 1e6), min_size=1, max_size=5), max_size=4), st.integers(0, 12))
def test_growth_in_pieces_is_that_of_the_whole(lives: list[list[float]], cut: int) -> None:
    """A counter that begins again at 0 now and then."""
    values = [value for life in lives for value in sorted(life)]
    samples = [(float(at), value) for at, value in enumerate(values)]
    counters = Counters()
    pieces = [grown for piece in (samples[:cut], samples[cut:]) for grown in counters.grown("a", piece, 0)]
    assert pieces == growth(samples, start_seconds=0)


# --- histograms, columns and labels


@given(st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=20), st.floats(0, 1))
def test_a_quantile_of_a_logs_bins_is_right_to_a_few_percent(values: list[float], share: float) -> None:
    counts: dict[float, float] = {}
    for value in values:
        counts[fine_bound(value)] = counts.get(fine_bound(value), 0.0) + 1
    counts |= {bound / 1.02: counts.get(bound / 1.02, 0.0) for bound in list(counts)}  # where bins begin
    found = quantile(counts, share)
    assert found is not None
    assert any(abs(found / value - 1) < 0.025 for value in values)
    assert sum(coarse(counts).values()) == len(values)


def test_a_quantile_beyond_the_last_bound_is_told_as_that() -> None:
    assert quantile({1.0: 1.0, math.inf: 9.0}, 0.9) == 1.0
    assert quantile({}, 0.5) is None


@given(st.integers(0, 2**31), st.integers(1, 400 * 86400))
def test_columns_cover_any_period(start: int, seconds: int) -> None:
    slots = Slots.of(start, start + seconds)
    assert 1 <= slots.count <= MOST
    assert slots.column(start) == 0 or slots.is_daily
    assert 0 <= slots.column(start + seconds) < slots.count


@given(st.lists(st.tuples(st.floats(0, 0.2), st.floats(0, 0.1)), max_size=20))
def test_numbers_in_a_crowded_corner_neither_overlap_nor_leave_the_plot(shares: list[tuple[float, float]]) -> None:
    dots = [(LEFT + SIDE * x, TOP + SIDE * (1 - y)) for x, y in shares]
    boxes = labels(dots)
    for number, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:number])
        assert LEFT <= box.left <= LEFT + SIDE
        assert TOP <= box.top <= TOP + SIDE


# --- the page


@pytest.mark.parametrize("name", ["chat", "<script>alert(1)</script>", '"><img src=x>'])
def test_the_page_needs_nothing_from_outside(name: str) -> None:
    tasks = {name: "Generation"}
    spent = {Work(POLICY, name, "3", "0-100"): Spent(5, 1.0)}
    text = page(figures(counted(requests={(9, "0-100", name): 5.0}, spent=spent, tasks=tasks)), name)
    assert "<script" not in text
    assert "<img" not in text
    assert "http" not in text.replace("http://prometheus", "")


# --- logs


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
        *(["pod-1 " + line(level=0, engine_seconds=0.4)] * 5),
        '{"message": "started"}',
        line()[:40],
        "",
        line(status=503, engine_seconds=None),
        line(start_time="2025-12-01T09:30:00Z"),
    ]
    (tmp_path / "log").write_text("\n".join(lines))
    found = log_source.read([tmp_path / "log"], timedelta(days=1), NOW)
    assert found.requests == {(0, "100-500", "chat"): 7.0}
    assert (found.failed, found.skipped_lines) == (1.0, 3)
    assert {work.level: round(spent.seconds, 6) for work, spent in found.spent.items()} == {"3": 0.2, "0": 2.0}
    assert figures(found).levels[1].saved_share == pytest.approx(0.5)


def test_a_log_of_days_is_folded_to_hours_of_the_day(tmp_path: Path) -> None:
    moments = [datetime(2026, 1, day, hour, 5, tzinfo=UTC) for day in range(1, 8) for hour in (3, 17)]
    (tmp_path / "log").write_text("\n".join(line(start_time=moment.isoformat()) for moment in moments))
    found = log_source.read([tmp_path / "log"], None, NOW)
    assert found.slots.is_daily
    assert found.requests == {(3, "100-500", "chat"): 7.0, (17, "100-500", "chat"): 7.0}


def test_a_log_of_one_line_lasts_as_long_as_its_request(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(line(end_time="2026-01-01T09:30:05Z"))
    found = figures(log_source.read([tmp_path / "log"], None, NOW))
    assert found.hours == pytest.approx(5 / 3600)
    assert "1 request in 5 seconds" in found.summary[0]


@given(st.lists(st.text(max_size=60) | st.dictionaries(st.text(max_size=5), st.integers()).map(json.dumps), max_size=5))
def test_no_line_ends_the_reading(lines: list[str]) -> None:
    for text in lines:
        log_source.request(text)


# --- the command


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(line() + "\n")
    html, numbers = tmp_path / "r.html", tmp_path / "r.json"
    arguments = ["report", "--log", str(tmp_path / "log"), "-o", str(html), "--json", str(numbers)]
    answer = CliRunner().invoke(app, [*arguments, "--cost-per-hour", "3.6"])
    assert answer.exit_code == 0, answer.output
    figures_ = json.loads(numbers.read_text())
    assert (figures_["schema_version"], figures_["cost"]) == (1, pytest.approx(0.0002))
    assert "What inference costs" in html.read_text()
    assert "a thousand requests" in answer.output


def test_the_command_reads_standard_input() -> None:
    answer = CliRunner().invoke(app, ["report", "--log", "-"], input=line() + "\n")
    assert answer.exit_code == 0, answer.output
    assert "1 request in 1 second" in answer.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "either --prometheus URL or --log FILE"),
        (["--log", "/nowhere/log"], "/nowhere/log can't be read"),
        (["--log", "/dev/null"], "kubectl logs"),
        (["--log", "/dev/null", "--policy", "chat"], "doesn't name the policy"),
        (["--log", "/dev/null", "--since", "1s"], "between 1m and 8784h"),
        (["--log", "/dev/null", "--since", "5x5h"], "such as 90m"),
        (["--prometheus", "http://127.0.0.1:9"], "nothing listens there"),
        (["--prometheus", "http://127.0.0.1:9"], "kubectl -n sixfold-system port-forward"),
        (["--prometheus", "localhost:9090"], "an address such as http://localhost:9090"),
        (["--prometheus", "http://[::1"], "no address"),
    ],
)
def test_mistakes_are_told(arguments: list[str], words: str) -> None:
    answer = CliRunner().invoke(app, ["report", *arguments])
    assert answer.exit_code == 1
    assert words in " ".join(answer.output.split())
