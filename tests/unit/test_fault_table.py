"""The table of tests/README.md: every kind of fault has tests, and those are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KINDS = {"Serving": 15, "Operator": 13, "Security": 7}
ROW = re.compile(r"^\| (?P<kind>[^|]+) \| (?P<tests>[^|]+) \|$", re.MULTILINE)
TEST = re.compile(r"`(?P<path>[\w/]+\.py)::(?P<name>test_\w+)`")


def section(title: str) -> str:
    found = re.search(rf"^### {title}\n(.*?)(?=^#|\Z)", (ROOT / "tests" / "README.md").read_text(), re.M | re.S)
    assert found, f"tests/README.md has no section {title}"
    return found[1]


def rows(title: str) -> list[tuple[str, str]]:
    return [
        (row["kind"], row["tests"])
        for row in ROW.finditer(section(title))
        if row["kind"] != "kind of fault" and not row["kind"].startswith("---")
    ]


@pytest.mark.parametrize(("title", "number"), KINDS.items())
def test_every_kind_has_its_row(title: str, number: int) -> None:
    kinds = [kind for kind, _ in rows(title)]
    assert len(kinds) == len(set(kinds)) == number


@pytest.mark.parametrize(("kind", "tests"), [row for title in KINDS for row in rows(title)])
def test_its_tests_are_there(kind: str, tests: str) -> None:
    named = list(TEST.finditer(tests))
    assert named, f"no test is named for: {kind}"
    assert not TEST.sub("", tests).strip(", "), f"something else stands among the tests of: {kind}"
    for test in named:
        module = ast.parse((ROOT / test["path"]).read_text())
        there = {node.name for node in ast.walk(module) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert test["name"] in there, f"{test['path']} has no {test['name']}"
