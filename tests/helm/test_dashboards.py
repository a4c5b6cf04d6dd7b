"""Dashboards and rules against what the code exports: no panel may wait for a series that nobody has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest

from sixfold_operator import metrics

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "helm" / "sixfold" / "monitoring"
DASHBOARDS = sorted((MONITORING / "dashboards").glob("*.json"))
SOURCES = (ROOT / "operator" / "sixfold_operator", ROOT / "runtime_image" / "sixfold_runtime")
FOREIGN = {"up", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED"}
SUFFIXES = {"Counter": ("_total",), "Histogram": ("_bucket", "_sum", "_count"), "Gauge": ("",)}
UNITS = {"none", "percentunit", "s", "reqps", "ops", "bytes", "Bps"}


def exported() -> set[str]:
    """Names of the series that operator and runtime export, by the constructors in their sources."""
    found = set(FOREIGN)
    for source in SOURCES:
        for path in source.rglob("*.py"):
            text = path.read_text()
            kinds = {
                name: kind.removeprefix("_").capitalize()
                for kind, name in re.findall(r'\b(Counter|Histogram|_histogram)\(\s*"(sixfold_\w+)"', text)
            }
            for name in re.findall(r'"(sixfold_[a-z_]+)"', text):
                found |= {f"{name}{suffix}" for suffix in SUFFIXES[kinds.get(name, "Gauge")]}
    return found


def recorded() -> dict[str, str]:
    groups = yaml.safe_load((MONITORING / "rules.yaml").read_text())["groups"]
    return {rule["record"]: rule["expr"] for group in groups for rule in group["rules"] if "record" in rule}


def series(expr: str) -> set[str]:
    """Names of series in a PromQL expression."""
    bare = re.sub(r'"[^"]*"', "", expr)
    return {name for name in re.findall(r"[A-Za-z_:][\w:]*", bare) if name.startswith("sixfold_") or ":" in name} | {
        name for name in FOREIGN if re.search(rf"\b{name}\b", bare)
    }


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[tuple[str, str]]:
    """Where an expression stands, and the expression as Prometheus would get it."""
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        found = [(panel["title"], target["expr"]) for panel in panels(board) for target in panel["targets"]]
        found += [(note["name"], note["expr"]) for note in board["annotations"]["list"]]
        for title, expr in found:
            expr = re.sub(r"\$__(rate_interval|range)", "5m", expr)
            yield f"{path.stem}: {title}", re.sub(r"\$(namespace|policy)", ".*", expr)


def test_every_expression_parses(promtool, tmp_path: Path) -> None:
    found = [{"record": f"r{number}", "expr": expr} for number, (_, expr) in enumerate(expressions())]
    assert len(found) > 80
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "dashboards", "rules": found}]}))
    promtool("check", "rules", "--lint=none", tmp_path / "rules.yaml")


def test_every_series_exists() -> None:
    known = exported() | recorded().keys()
    groups = yaml.safe_load((MONITORING / "rules.yaml").read_text())["groups"]
    asked = dict(expressions()) | {
        rule.get("alert") or rule["record"]: rule["expr"] for group in groups for rule in group["rules"]
    }
    missing = {place: unknown for place, expr in asked.items() if (unknown := series(expr) - known)}
    assert not missing


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_is_one_that_grafana_takes(path: Path) -> None:
    board = json.loads(path.read_text())
    assert board["schemaVersion"] >= 39, "Grafana 11 or newer"
    assert board["uid"] == f"sixfold-{path.stem}"
    assert [variable["name"] for variable in board["templating"]["list"]] == ["datasource", "namespace", "policy"]
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    for panel in panels(board):
        assert panel["description"].endswith((".", "-A")), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            # The operator's own series aren't about one policy.
            if not re.search(r"sixfold_operator_(?!policy|signal|tickets)", target["expr"]):
                assert 'namespace=~"$namespace", policy=~"$policy"' in target["expr"], panel["title"]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_lie_side_by_side(path: Path) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(path.read_text())["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_promtool_likes_the_operators_metrics(promtool) -> None:
    assert metrics.RECONCILES
    own = [line for line in generate_latest().decode().splitlines() if "sixfold_" in line]
    assert len(own) > 20
    promtool("check", "metrics", stdin="\n".join(own) + "\n")
