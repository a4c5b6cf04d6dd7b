"""`sixfold report` of a made-up hour in a real Prometheus, as figures and as a page in a real Chromium."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "e2e"))

from prometheus_server import PrometheusServer

from sixfold_runtime.cli import app
from sixfold_runtime.report import command
from sixfold_runtime.report.model import Figures, ReportError
from sixfold_runtime.report.page import page
from sixfold_runtime.report.parts import Cell, Quadrant

CHROMIUM = shutil.which("chromium")
START = datetime(2025, 6, 2, 9, tzinfo=UTC)
END = datetime(2025, 6, 2, 10, tzinfo=UTC)
SCRAPE_SECONDS = 15
GATEWAY = "gateway:8000"
ENGINE_SECONDS_BOUNDS = ("0.05", "0.1", "0.25", "0.5", "1.0", "+Inf")
PRICES = {("assistant", "engine"): 3.6, ("assistant", "classifier"): 0.9, ("notes", "engine"): 7.2}

with_prometheus = pytest.mark.skipif(
    not all(map(shutil.which, ("prometheus", "promtool"))), reason="prometheus and promtool aren't installed"
)
in_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium isn't installed (e2e/cluster/packages.py chromium)")


class Past:
    """Samples of the hour, and of the half hour before it, in OpenMetrics' text form."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def series(self, name: str, value: Callable[[float], float | None], **labels: str) -> None:
        """`value` of the minute, counted from the hour's begin; None where there is no sample."""
        text = ",".join(f'{key}="{value_}"' for key, value_ in labels.items())
        for second in range(-1800, 3601, SCRAPE_SECONDS):
            number = value(second / 60)
            if number is not None:
                self._lines.append(f"{name}{{{text}}} {number} {int(START.timestamp()) + second}")

    def requests(self, policy: str, variant: str, task: str, **traffic: Any) -> None:
        """`before` requests when the hour begins, then `number` evenly between two minutes, each of `seconds` of an
        engine. The series begin with the first request."""
        begin, end = traffic["minutes"]
        number, before, seconds = traffic["number"], traffic.get("before", 0), traffic["seconds"]

        def done(minute: float) -> float | None:
            share = min(1.0, max(0.0, (minute - begin) / (end - begin))) if end > begin else float(minute >= begin)
            count = before + round(number * share)
            return count or None

        def spent(minute: float) -> float | None:
            return None if (count := done(minute)) is None else count * seconds

        labels = {
            "namespace": "shop", "policy": policy, "variant": variant, "task": task, "level": traffic["level"],
            "arm": "stable", "length_bucket": traffic["length"], "instance": GATEWAY,
        }  # fmt: skip
        self.series("sixfold_requests_total", done, **labels, outcome="ok")
        self.series("sixfold_request_engine_seconds_sum", spent, **labels)
        self.series("sixfold_request_engine_seconds_count", done, **labels)
        for bound in ENGINE_SECONDS_BOUNDS:
            self.series(
                "sixfold_request_engine_seconds_bucket",
                lambda minute, bound=bound: done(minute) if float(bound) >= seconds else done(minute) and 0,
                **labels,
                le=bound,
            )

    def pod(self, policy: str, component: str, number: int, variants: tuple[str, ...], **times: float) -> None:
        """Up from a minute on, and computing for a share of the time."""
        begin, busy = times["begin"], times["busy"]
        name = f"{policy}-{component}-{number}"
        labels = {"namespace": "shop", "policy": policy, "component": component, "pod": name}
        self.series("sixfold_level", lambda minute: 3 if minute >= begin else None, **labels)
        for variant in variants:
            name = "sixfold_model_load_seconds"
            self.series(name, lambda minute: 12.5 if minute >= begin else None, **labels, variant=variant)
        self.series(
            "sixfold_engine_busy_seconds_total",
            lambda minute: 60 * busy * (minute - begin) if minute >= begin else None,
            **labels,
            variant=variants[0],
            level="3",
        )

    def steady(self, name: str, a_minute: float, **labels: str) -> None:
        """A counter of the assistant that grows by so much a minute."""
        labels |= {"namespace": "shop", "policy": "assistant"}
        self.series(name, lambda minute: 1000 + a_minute * (minute + 30), **labels)

    def text(self) -> str:
        return "\n".join([*self._lines, "# EOF", ""])


def made_up() -> str:
    past = Past()
    past.series("up", lambda minute: 1, instance=GATEWAY)
    for (policy, component), price in PRICES.items():
        labels = {"namespace": "shop", "policy": policy, "component": component, "pod": "operator"}
        past.series("sixfold_cost_per_hour", lambda minute, price=price: price, **labels)
    chat, intent = ("assistant", "chat", "Generation"), ("assistant", "intent", "Classification")
    # At level 0 mostly short prompts, at level 3 mostly long ones: plain means would say that level 3 saves nothing.
    past.requests(*chat, level="0", length="100-500", minutes=(0, 20), number=180, before=70, seconds=0.2)
    past.requests(*chat, level="0", length="500-2000", minutes=(0, 20), number=20, seconds=0.8)
    past.requests(*chat, level="3", length="100-500", minutes=(20, 60), number=100, seconds=0.1)
    past.requests(*chat, level="3", length="500-2000", minutes=(20, 60), number=300, seconds=0.4)
    past.requests(*chat, level="1", length="100-500", minutes=(20, 20), number=9, seconds=0.15)
    past.requests(*intent, level="3", length="0-100", minutes=(0, 60), number=2000, before=5000, seconds=0.02)
    past.requests("notes", "notes", "Generation", level="3", length="2000+", minutes=(30, 60), number=50, seconds=0.9)
    past.pod("assistant", "engine", 0, ("chat", "chat-int4", "tiny"), begin=-30, busy=0.1)
    past.pod("assistant", "engine", 1, ("chat", "chat-int4", "tiny"), begin=30, busy=0.05)
    past.pod("assistant", "classifier", 0, ("intent",), begin=-30, busy=0.02)
    past.pod("notes", "engine", 0, ("notes",), begin=-30, busy=0.6)
    flops = {"level": "3", "arm": "stable", "estimated": "false", "variant": "chat"}
    for cause, amount in {"": 4e9, "recomputed_prefix": 4e9, "padding": 1e9, "rejected_draft": 1e9}.items():
        past.steady("sixfold_flops_total", amount, **flops, cause=cause, outcome="wasted" if cause else "useful")
    for depth, texts in {"3": 20, "6": 10, "12": 3}.items():
        past.steady("sixfold_exit_total", texts, variant="intent", level="3", depth=depth)
    past.steady("sixfold_draft_tokens_total", 100, variant="chat", level="3")
    past.steady("sixfold_accepted_tokens_total", 60, variant="chat", level="3", position="1")
    past.steady("sixfold_draft_length_tokens_count", 30, variant="chat", level="3")
    past.steady("sixfold_draft_length_tokens_bucket", 10, variant="chat", level="3", le="0.0")
    past.steady("sixfold_kv_blocks_total", 30, variant="chat", result="hit_memory")
    past.steady("sixfold_kv_blocks_total", 90, variant="chat", result="miss")
    for kind, amount in (("reserved", 4.0 * 2**30), ("used", 1.0 * 2**30)):
        labels = {"namespace": "shop", "policy": "assistant", "variant": "chat", "kind": kind, "pod": "engine-0"}
        past.series("sixfold_memory_bytes", lambda minute, amount=amount: amount, **labels)
    return past.text()


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = PrometheusServer(tmp_path_factory.mktemp("prometheus"))
    server.backfill(made_up())
    with server:
        yield server.url


def asked(url: str | None, **changes: Any) -> command.Question:
    question = command.Question(url, [], None, None, "1h", None)
    return dataclasses.replace(question, **changes)


@pytest.fixture(scope="module")
def found(prometheus: str) -> Figures:
    return command.answer(asked(prometheus, namespace="shop"), END)


# --- figures


@with_prometheus
def test_what_began_within_the_hour_counts_whole_and_what_was_before_does_not(found: Figures) -> None:
    assert found.requests == 180 + 20 + 100 + 300 + 9 + 2000 + 50
    levels = {(level.variant, level.level): level.requests for level in found.levels}
    assert levels == {
        ("chat", "0"): 200, ("chat", "1"): 9, ("chat", "3"): 400, ("intent", "3"): 2000, ("notes", "3"): 50,
    }  # fmt: skip


@with_prometheus
def test_each_pod_has_the_price_of_its_policy_and_component(found: Figures) -> None:
    capacity = {(part.policy, part.component): part for part in found.capacity}
    assert {key: part.price for key, part in capacity.items()} == {
        (f"shop/{policy}", component): price for (policy, component), price in PRICES.items()
    }
    engines = capacity["shop/assistant", "engine"]
    assert engines.pod_hours == pytest.approx(1.5, rel=0.02)
    assert engines.busy_hours == pytest.approx(0.1 + 0.025, rel=0.02)
    assert engines.idle_cost == pytest.approx(3.6 * (1.5 - 0.125), rel=0.02)
    assert found.bill == pytest.approx(1.5 * 3.6 + 0.9 + 7.2, rel=0.02)
    chat = 180 * 0.2 + 20 * 0.8 + 100 * 0.1 + 300 * 0.4 + 9 * 0.15
    assert found.cost == pytest.approx((chat * 3.6 + 2000 * 0.02 * 0.9 + 50 * 0.9 * 7.2) / 3600)
    assert sum(column.pod_hours for column in found.capacity_by_column) == pytest.approx(3.5, rel=0.02)
    assert [(load.variant, load.starts) for load in found.loads] == [
        ("chat", 1), ("chat-int4", 1), ("intent", 0), ("notes", 0), ("tiny", 1),
    ]  # fmt: skip


@with_prometheus
def test_savings_compare_like_with_like(found: Figures) -> None:
    levels = {(level.variant, level.level): level for level in found.levels}
    assert levels["chat", "3"].engine_ms > levels["chat", "0"].engine_ms
    assert levels["chat", "3"].saved_share == pytest.approx(0.5)
    assert levels["chat", "3"].saved == pytest.approx((100 * 0.1 + 300 * 0.4) * 3.6 / 3600)
    assert levels["chat", "1"].saved_share == pytest.approx(0.25)
    assert levels["intent", "3"].saved_share is None


@with_prometheus
def test_what_modes_did_and_what_memory_holds(found: Figures) -> None:
    assert found.tokens_per_verification == pytest.approx(1 + 60 / 20, rel=0.02)
    assert found.wasted_share == pytest.approx(0.6, rel=0.01)
    assert [(one.depth, round(one.share, 2)) for one in found.exits] == [(3, 0.61), (6, 0.3), (12, 0.09)]
    (room,) = found.memory
    assert (room.variant, round(room.unused_share, 3)) == ("chat", 0.75)
    assert room.reserved_bytes == pytest.approx(4 * 2**30, rel=0.02)
    quadrants = {entry.variant: entry.utilisation for entry in found.quadrants}
    assert quadrants["notes"] == pytest.approx(0.6, rel=0.02)
    assert quadrants["intent"] == pytest.approx(0.02, rel=0.02)
    assert [spread.price for spread in found.spread] == [0.9, 3.6, 7.2]


@with_prometheus
def test_columns_are_minutes_and_the_period_begins_when_prometheus_did(prometheus: str, found: Figures) -> None:
    assert (found.columns[:2], found.column_seconds, len(found.columns)) == (("09:00", "09:05"), 300, 12)
    level_0 = [cell for cell in found.cells if cell.variant == "notes"]
    assert {cell.column for cell in level_0} <= set(range(6, 12))
    week = command.answer(asked(prometheus, since="168h"), END)
    assert (week.start, week.hours) == ("2025-06-02 08:30 UTC", pytest.approx(1.5, rel=0.01))
    assert "began to record at 2025-06-02 08:30" in week.missing[-1]
    assert week.requests == found.requests, "what was there when Prometheus began may be older than the week"
    assert week.bill == pytest.approx(found.bill + 0.5 * (3.6 + 0.9 + 7.2), rel=0.02)


@with_prometheus
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"policy": "nobody"}, "knows no policy shop/nobody .*it knows shop/assistant, shop/notes"),
        ({"policy": "notes", "since": "20m", "until": START + timedelta(minutes=29)}, "nobody made a request"),
        ({"until": START - timedelta(days=90)}, "no series of Sixfold"),
    ],
)
def test_nothing_to_report_is_told(prometheus: str, changes: dict[str, Any], words: str) -> None:
    until = changes.pop("until", END)
    with pytest.raises(ReportError, match=words):
        command.answer(asked(prometheus, namespace="shop", **changes), until)


@with_prometheus
def test_no_password_leaves_the_command(prometheus: str, tmp_path: Path) -> None:
    question = asked(prometheus.replace("://", "://user:hunter2@") + "/?token=hunter2")
    with pytest.raises(ReportError) as error:
        command.answer(question, END)
    assert "hunter2" not in str(error.value)
    question = asked(prometheus.replace("://", "://user:hunter2@"))
    command.write(command.answer(question, END), question, tmp_path / "page", tmp_path / "json")
    assert "hunter2" not in (tmp_path / "page").read_text() + (tmp_path / "json").read_text()
    assert json.loads((tmp_path / "json").read_text())["capacity"][0]["price"] == 0.9
    gone = CliRunner().invoke(app, ["report", "--prometheus", "http://user:hunter2@127.0.0.1:9"])
    assert "hunter2" not in gone.output
    assert "kubectl -n sixfold-system port-forward" in gone.output


# --- the page


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


OVERLAPS = """() => {
    const found = [];
    for (const svg of document.querySelectorAll("svg")) {
        const boxes = [...svg.querySelectorAll("text")].map(one => [one.textContent, one.getBoundingClientRect()]);
        boxes.forEach(([name, a], at) => boxes.slice(at + 1).forEach(([other, b]) => {
            const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
            const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
            if (across > 1 && down > 3) found.push(`${name} / ${other}`);
        }));
    }
    const names = [...document.querySelectorAll(".ticks span")];
    names.forEach((one, at) => {
        const next = names[at + 1];
        if (one.scrollWidth > one.clientWidth + 1) found.push(`the tick ${one.textContent}`);
    });
    return found;
}"""

CONTRAST = """() => {
    const luminance = ([r, g, b]) => [r, g, b]
        .map(value => value / 255)
        .map(value => value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
        .reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
    const numbers = color => color.match(/[\\d.]+/g).map(Number);
    const ground = element => {
        for (let at = element; at !== null; at = at.parentElement) {
            const color = numbers(getComputedStyle(at).backgroundColor);
            if (color.length < 4 || color[3] > 0) return color;
        }
    };
    const poor = [];
    for (const element of document.querySelectorAll("body *:not(svg *)")) {
        if (![...element.childNodes].some(node => node.nodeType === 3 && node.data.trim() !== "")) continue;
        const pair = [numbers(getComputedStyle(element).color), ground(element)].map(luminance).sort((a, b) => b - a);
        const contrast = (pair[0] + 0.05) / (pair[1] + 0.05);
        if (contrast < 4.5) poor.push([element.tagName, element.textContent, contrast]);
    }
    return poor;
}"""

UNNAMED = """() => [...document.querySelectorAll("svg, [role=img]")]
    .filter(one => !one.getAttribute("aria-label")).map(one => one.outerHTML)"""


def crowded(found: Figures) -> Figures:
    """Many models with long names and little traffic, over days."""
    names = [f"assistant-number-{number:02}-with-a-long-name" for number in range(15)]
    columns = tuple(f"{hour:02}:00" for hour in range(24))
    cells = tuple(
        Cell(hour, "500-2000", name, 10.0 * (hour + at), 0.001 * (hour + at))
        for at, name in enumerate(names) for hour in range(0, 24, 1 + at % 5)
    )  # fmt: skip
    quadrants = tuple(
        Quadrant("500-2000", name, 0.02 / (1 + at), 123.4, 0.03 * at / 4, 0.01 + 0.01 * (at % 3))
        for at, name in enumerate(names)
    )
    return dataclasses.replace(
        found, columns=columns, is_daily=True, column_seconds=3600, cells=cells, quadrants=quadrants
    )


@with_prometheus
@in_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_the_page_can_be_read(browser: Any, found: Figures, tmp_path: Path, scheme: str, width: int) -> None:
    open_page(browser, page(found, "shop"), tmp_path / "report.html", scheme, width)


@with_prometheus
@in_chromium
def test_a_crowded_page_can_be_read(browser: Any, found: Figures, tmp_path: Path) -> None:
    open_page(browser, page(crowded(found), "shop"), tmp_path / "report.html", "light", 360)


def open_page(browser: Any, text: str, path: Path, scheme: str, width: int) -> None:
    """As a person would; fails where something can't be read, or asks anybody for anything."""
    path.write_text(text, encoding="utf-8")
    tab = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800}).new_page()
    complaints, requested = [], []
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("console", lambda line: complaints.append(line.text) if line.type in ("error", "warning") else None)
    tab.on("request", lambda request: requested.append(request.url))
    tab.goto(path.as_uri())
    tab.eval_on_selector_all("details", "all => all.forEach(one => one.open = true)")
    text = tab.inner_text("main")
    assert "2,659 requests in 1 hour cost 13.5" in text
    assert "a month would cost about" in text
    for heading in tab.eval_on_selector_all("h2", "all => all.map(one => one.textContent)"):
        assert heading in text
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate(OVERLAPS) == []
    assert tab.evaluate(CONTRAST) == []
    assert tab.evaluate(UNNAMED) == []
    assert tab.locator("script, link[rel=stylesheet], img").count() == 0
    assert (complaints, [url for url in requested if not url.startswith(("file:", "data:"))]) == ([], [])
    tab.context.close()
