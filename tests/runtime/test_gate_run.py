"""`sixfold gate` with real models: the same candidate passes, one whose modes are off fails and says why.

Only what doesn't depend on the machine's load decides here: the baseline is made to be another machine's.
"""

from __future__ import annotations

import json
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from sixfold_runtime.cli import app

MODELS = Path(__file__).parents[2] / "examples" / "models"
FILE = """
apiVersion: sixfold.dev/v1alpha1
kind: ModelVariant
metadata: {name: chat}
spec: {task: Generation, source: {uri: pvc://models/chat}}
---
apiVersion: sixfold.dev/v1alpha1
kind: ModelVariant
metadata: {name: intent}
spec: {task: Classification, source: {uri: pvc://models/intent}}
---
apiVersion: sixfold.dev/v1alpha1
kind: InferencePolicy
metadata: {name: bot}
spec:
  rollbackLevel: 3
  engine: {costPerHour: "0.08", accelerator: {type: CPU}}
  generation:
    variantRef: {name: chat}
    kvCacheReuse: {}
  classification:
    variantRef: {name: intent}
    subgraphs: {tasks: [{name: topic}, {name: pos}]}
  batching: {}
  shadow: {sampleRate: "1"}
"""


class Gate:
    def __init__(self, folder: Path, classifiers: Path) -> None:
        (folder / "models").mkdir()
        (folder / "models" / "chat").symlink_to(MODELS / "chat")
        (folder / "models" / "intent").symlink_to(classifiers / "intent")
        (folder / "bot.yaml").write_text(FILE)
        self.baseline = folder / "cost.json"
        self._files = ["-f", str(folder / "bot.yaml"), "--claim", f"models={folder / 'models'}"]

    def __call__(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, ["gate", "--baseline", str(self.baseline), *self._files, *arguments])


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory, classifiers: Path) -> Gate:
    """With a baseline, at level 3."""
    gate = Gate(tmp_path_factory.mktemp("gate"), classifiers)
    done = gate("--update-baseline", "--requests", "6")
    assert done.exit_code == 0, done.output
    assert "this is one now" in done.output
    kept = json.loads(gate.baseline.read_text())
    kept["machine"]["cpu"] = "another"
    gate.baseline.write_text(json.dumps(kept))
    return gate


def test_the_baseline_holds_what_it_was_made_with(gate: Gate) -> None:
    kept = json.loads(gate.baseline.read_text())
    assert (kept["schema"], kept["policy"], kept["level"]) == ("sixfold.dev/gate/v1", "bot", 3)
    assert {"KVCacheReuse", "DynamicBatching"} <= set(kept["modes"])
    assert {"python", "sixfold", "torch"} <= set(kept["versions"])
    assert list(kept["answers"]) == [
        "generate short", "generate dialogue", "classify text", "classify task pos", "classify task topic"
    ]  # fmt: skip
    assert kept["cost_per_hour"]["classify text"] == 0.08
    times = [figure for figure in kept["figures"] if figure["metric"] == "engine_seconds"]
    assert all(len(figure["values"]) == len(figure["paces"]) == 5 for figure in times)
    assert all(value > 0 for figure in times for value in figure["values"])


def test_the_same_candidate_passes(gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    done = gate("-o", "json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["passed"]
    assert {figure["verdict"] for figure in found["figures"]} <= {"ok", "better", "not compared"}
    assert found["candidate"]["workload"]["requests"] == 6, "as in the baseline"
    assert any("another machine" in warning for warning in found["warnings"])
    assert (tmp_path / "summary.md").read_text().startswith("### sixfold gate: bot at level 3")


def test_without_its_modes_it_fails_and_says_why(gate: Gate) -> None:
    done = gate("--level", "0", "-o", "json")
    assert done.exit_code == 1, done.output
    found = json.loads(done.stdout)
    assert any("MFLOP a request" in reason for reason in found["reasons"])
    assert found["candidate"]["waste"]["recomputed_prefix"] > 0.2
    assert any("off in the candidate: Subgraphs, KVCacheReuse" in warning for warning in found["warnings"])


def test_a_model_that_cant_be_served(gate: Gate, tmp_path: Path) -> None:
    for name in ("chat", "intent"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    done = gate("--claim", f"models={tmp_path}")
    assert done.exit_code == 2, done.output
    assert "error: model chat: " in done.output


def test_another_workload_isnt_compared(gate: Gate) -> None:
    done = gate("--requests", "4")
    assert done.exit_code == 2
    assert "6 requests of each kind, this with 4" in done.output


def test_a_level_above_the_policys(gate: Gate, tmp_path: Path) -> None:
    low = tmp_path / "low.yaml"
    low.write_text(FILE.replace("rollbackLevel: 3", "rollbackLevel: 1"))
    models = gate.baseline.parent / "models"
    done = CliRunner().invoke(
        app,
        ["gate", "--baseline", str(gate.baseline), "-f", str(low), "--claim", f"models={models}", "--level", "2"],
    )
    assert done.exit_code == 2
    assert "level 2 is above spec.rollbackLevel, which is 1" in done.output
