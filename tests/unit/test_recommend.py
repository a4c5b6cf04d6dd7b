"""`sixfold recommend`: by the source's rules, always a policy that validates, with the reasons."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from sixfold_api.policy import InferencePolicySpec
from sixfold_runtime.cli import app
from sixfold_runtime.length_bucket import LENGTH_BUCKETS
from sixfold_runtime.report.analysis import figures
from sixfold_runtime.report.model import Counted, ReportError
from sixfold_runtime.report.recommend import Served, accelerators, policy, proposals, served_by

BOTH = Served("chat", "intent", "tiny")


def traffic(*requests: tuple[str, str, float]) -> Counted:
    """(variant, length bucket, requests)."""
    tasks = {"chat": "Generation", "intent": "Classification"}
    return Counted(requests={(9, bucket, variant): number for variant, bucket, number in requests}, tasks=tasks)


@pytest.mark.parametrize(
    ("requests", "block"),
    [
        (("intent", "0-100", 50.0), {"classification": {"earlyExit": {}}}),
        (("chat", "100-500", 50.0), {"generation": {"speculative": {"numTokens": 5}}}),
        (("chat", "500-2000", 50.0), {"generation": {"kvCacheReuse": {}}, "streaming": {"compression": "Auto"}}),
    ],
)
def test_the_rules_of_the_source(requests: tuple[str, str, float], block: dict[str, dict[str, object]]) -> None:
    (found,) = proposals(figures(traffic(requests)), BOTH)
    assert "%" in found.why
    assert found.patch is not None
    for part, wanted in block.items():
        assert wanted.keys() <= found.patch[part].keys()


def test_what_few_would_gain_by_is_not_proposed() -> None:
    found = proposals(figures(traffic(("intent", "0-100", 95.0), ("chat", "100-500", 5.0))), BOTH)
    assert [proposal.what for proposal in found] == ["early exit for short texts"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["chat", "intent", "other"]),
            st.sampled_from([*LENGTH_BUCKETS, "unknown"]),
            st.floats(0.1, 1e6),
        ),
        min_size=1,
        max_size=12,
    ),
    st.booleans(),
)
def test_a_policy_is_always_valid(requests: list[tuple[str, str, float]], has_draft: bool) -> None:
    counted = traffic(*requests)
    served = served_by(counted, "tiny" if has_draft else None)
    document = policy(proposals(figures(counted), served), served, "recommended")
    InferencePolicySpec.model_validate(document["spec"])


def test_accelerators_are_ranked_by_what_was_measured() -> None:
    rows = ["name,costPerHour,requestsPerSecond", "A100,4.0,90", "L20,1.2,45"]
    assert [entry.name for entry in accelerators(rows)] == ["L20", "A100"]
    for bad in (["name,costPerHour", "A100,4"], [rows[0], "A100,four,9"], [rows[0], "A100,4,0"]):
        with pytest.raises(ReportError, match="line 2"):
            accelerators(bad)


def test_the_command(tmp_path: Path) -> None:
    line = {
        "X-Request-ID": "r",
        "path": "/v1/classify",
        "model_name": "intent",
        "input_length": 30,
        "start_time": "2026-01-01T09:30:00Z",
    }
    (tmp_path / "log").write_text(json.dumps(line))
    (tmp_path / "devices").write_text("name,costPerHour,requestsPerSecond\nL20,1.2,45\n")
    arguments = ["recommend", "--log", str(tmp_path / "log"), "--accelerators", str(tmp_path / "devices")]
    answer = CliRunner().invoke(app, arguments)
    assert answer.exit_code == 0, answer.output
    spec = yaml.safe_load(answer.stdout)["spec"]
    assert spec == {"classification": {"variantRef": {"name": "intent"}, "earlyExit": {}}}
    assert "early exit for short texts" in answer.stderr
    assert "L20" in answer.stderr
