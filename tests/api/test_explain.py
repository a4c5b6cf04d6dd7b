"""`sixfold explain policy NAME` reads spec and status from a real kube-apiserver."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from sixfold_api.kinds import POLICY
from sixfold_runtime.cli import app

SPEC = {"rollbackLevel": 3, "generation": {"variantRef": {"name": "chat"}}}
STATUS = {
    "effectiveLevel": 3,
    "level": {"target": 2, "reason": "LatencyBreach", "since": "2030-01-01T00:00:00Z"},
    "modes": [{"name": "CompressedStreaming", "state": "BelowLevel", "reason": "as the operator says"}],
    "config": {"sequence": 5, "pods": 3, "applied": 1},
    "conditions": [],
}


@pytest.fixture
def explain(api, control_plane, monkeypatch: pytest.MonkeyPatch) -> Any:
    assert api.create(POLICY, SPEC, "explained", dry_run=False).accepted
    assert api.patch(POLICY, "explained", {"status": STATUS}, "status").accepted
    monkeypatch.setenv("KUBECONFIG", str(control_plane.kubeconfig))
    monkeypatch.setenv("COLUMNS", "160")
    yield lambda *arguments: CliRunner().invoke(app, ["explain", "policy", *arguments])
    api.delete(POLICY, "explained")


def test_levels_and_modes_are_what_the_cluster_reports(explain) -> None:
    answer = explain("explained", "-n", "default", "-o", "json")
    assert answer.exit_code == 0, answer.output
    explained = json.loads(answer.stdout)
    assert explained["levels"] == {"ceiling": 3, "target": 2, "effective": 3}
    assert explained["modes"] == STATUS["modes"]
    assert explained["config"]["level"] == 2
    (row,) = (row for row in explained["provenance"] if row["path"] == "/rollbackLevel")
    assert (row["value"], row["setBy"]) == ("2", "Level")


def test_the_tables_say_why(explain) -> None:
    shown = explain("explained").stdout
    for words in ("LatencyBreach", "1 of 3 pods have configuration 5", "as the operator says"):
        assert words in shown


HELD = {
    "suspended": [{"mode": "Speculative", "reason": "DraftTime", "since": "2030-01-01T00:00:00Z"}],
    "tuned": [
        {
            "path": "/batching/maxBatchTokens",
            "value": "768",
            "base": "1024",
            "ticket": "t1",
            "since": "2030-01-01T00:00:00Z",
        }
    ],
    "signals": [{"name": "DraftTime", "verdict": "Breach", "failures": 3}, {"name": "TTFTP95", "verdict": "Ok"}],
    "history": [
        {
            "at": "2030-01-01T00:00:00Z",
            "decision": "ModeSuspended",
            "reason": "DraftTime",
            "message": "time of drafting over the time of verifying: 1.5",
        }
    ],
}


def test_what_the_operator_holds_and_why(api, explain) -> None:
    assert api.patch(POLICY, "explained", {"spec": {"batching": {}}}).accepted
    assert api.patch(POLICY, "explained", {"status": STATUS | {"level": None} | HELD}, "status").accepted
    explained = json.loads(explain("explained", "-o", "json").stdout)
    assert {row["what"] for row in explained["held"]} == {"Speculative off", "/batching/maxBatchTokens"}
    (row,) = (row for row in explained["provenance"] if row["path"] == "/batching/maxBatchTokens")
    assert (row["value"], row["setBy"]) == ("768", "Tuned")
    shown = explain("explained").stdout
    for words in ("DraftTime", "1024 -> 768", "ticket t1", "3 in a row", "time of drafting over"):
        assert words in shown


def test_what_another_level_would_do(explain) -> None:
    explained = json.loads(explain("explained", "--level", "3", "-o", "json").stdout)
    assert [mode["name"] for mode in explained["modes"] if mode["state"] == "Active"] == ["CompressedStreaming"]


def test_a_policy_that_isnt_there(explain) -> None:
    answer = explain("nobody", "-n", "default")
    assert answer.exit_code == 1
    assert "no InferencePolicy nobody in the namespace default" in answer.output


def test_an_unreachable_cluster(explain, control_plane, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    gone = tmp_path / "kubeconfig"
    gone.write_text(control_plane.kubeconfig.read_text().replace(control_plane.url, "https://127.0.0.1:1"))
    monkeypatch.setenv("KUBECONFIG", str(gone))
    answer = explain("explained")
    assert answer.exit_code == 1
    assert "doesn't answer" in answer.output
    assert "Traceback" not in answer.output
