"""The table and the plot of `make bench`."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

BENCH = Path(__file__).resolve().parents[2] / "e2e" / "bench"
sys.path.insert(0, str(BENCH))

import comparisons
import scoreboard

SAMPLER = {
    "name": "sampler",
    "ratio": 20.0,
    "goal": 4.2,
    "compared": {"realistic_32000": {"ratio": 20.0}, "flat_32000": {"ratio": 5.0}},
}
REUSE = {"name": "kv_reuse", "goals": {"turn_2": 0.36, "turn_4": 0.21}, "turn_2": {"ratio": 0.34}}
OTHER = {"name": "new", "ratio": 0.5, "goal": 1.0, "at_500": {"ratio": 2.0, "goal": 1.5, "peer": "a bare loop"}}


def test_ratios_shares_and_goals() -> None:
    first, second = comparisons.rows(SAMPLER)
    assert (first.shown, first.goal, first.holds) == ("20 x", "4.2 x", True)
    assert (second.goal, second.holds) == ("", None), "a figure beside the goal"
    (turn,) = comparisons.rows(REUSE)
    assert (turn.shown, turn.goal, turn.holds) == ("0.34 of it", "at most 0.36", True)
    assert turn.ratio == pytest.approx(1 / 0.34), "in the plot more is better"


def test_a_benchmark_that_nobody_described_tells_its_ratios() -> None:
    assert [(row.peer, row.holds) for row in comparisons.rows(OTHER)] == [("its peer", False), ("a bare loop", True)]
    changed = {"name": "sampler", "ratio": 20.0, "goal": 4.2}
    assert [row.ratio for row in comparisons.rows(changed)] == [20.0]


def test_the_page_says_what_did_not_hold_and_what_did_not_run() -> None:
    page = scoreboard.markdown([SAMPLER, OTHER], {"levels": "no cluster"}, "Measured on a Tuesday.")
    assert "Measured on a Tuesday." in page
    assert "| `new` | new | its peer | 0.5 x | 1 x | **no** |" in page
    assert "- `levels`: no cluster" in page
    assert scoreboard.said(SAMPLER) == "every goal holds"
    assert "0.5 x, goal 1 x" in scoreboard.said(OTHER)


def test_the_plot_is_one() -> None:
    picture = ElementTree.fromstring(scoreboard.plot([SAMPLER, REUSE, OTHER, {"name": "<&>", "ratio": 9e9, "goal": 1}]))
    bars = [element for element in picture.iter() if element.get("rx")]
    assert len(bars) == 6
    right = float(picture.attrib["viewBox"].split()[2])
    assert all(float(bar.attrib["x"]) + float(bar.attrib["width"]) < right for bar in bars)
    assert scoreboard.place(1) < scoreboard.place(2) < scoreboard.place(4)
