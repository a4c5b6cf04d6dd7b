"""`sixfold recommend`: by the source's rules, always something that validates, each setting with its reason."""

from __future__ import annotations

import json
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from sixfold_api.merge_patch import merged
from sixfold_api.policy import InferencePolicySpec
from sixfold_runtime.cli import app
from sixfold_runtime.length_bucket import LENGTH_BUCKETS
from sixfold_runtime.report.accelerators import accelerators
from sixfold_runtime.report.model import Counted, ReportError
from sixfold_runtime.report.recommend import proposals
from sixfold_runtime.report.recommended import new_policy, patch_of
from sixfold_runtime.report.served import (
    ANSWERS,
    LABEL_ANSWERS,
    SLICE_LOADS,
    SLICE_REQUESTS,
    Served,
    others,
    served_by,
    served_of,
)

BOTH = Served("chat", "intent", "tiny")
TASKS = {"chat": "Generation", "intent": "Classification", "spam": "Classification"}
CHAT: dict[str, Any] = {"generation": {"variantRef": {"name": "chat"}}}


def traffic(*requests: tuple[str, str, float]) -> Counted:
    """(variant, length bucket, requests)."""
    counted = Counted(hours=2.0, tasks=TASKS)
    for variant, bucket, number in requests:
        counted.requests[9, bucket, variant] += number
    return counted


def patched(counted: Counted, spec: dict[str, Any], **served: str) -> tuple[str, dict[str, Any]]:
    """The patch as text, and the spec once it is applied."""
    model = InferencePolicySpec.model_validate(spec)
    text = patch_of("shop", "default", model, proposals(counted, served_of(model, **served), model))
    after: dict[str, Any] = merged({"spec": spec}, yaml.safe_load(text))["spec"]
    InferencePolicySpec.model_validate(after)
    return text, after


@pytest.mark.parametrize(
    ("requests", "block"),
    [
        (("intent", "0-100", 50.0), {"classification": {"earlyExit": {}}}),
        (("chat", "100-500", 50.0), {"generation": {"speculative": {"numTokens": 5}}}),
        (("chat", "500-2000", 50.0), {"generation": {"kvCacheReuse": {}}, "streaming": {"compression": "Auto"}}),
    ],
)
def test_the_rules_of_the_source(requests: tuple[str, str, float], block: dict[str, dict[str, object]]) -> None:
    (found,) = proposals(traffic(requests), BOTH)
    assert "%" in found.why
    assert found.patch is not None
    for part, wanted in block.items():
        assert wanted.keys() <= found.patch[part].keys()


def test_what_few_would_gain_by_is_not_proposed() -> None:
    found = proposals(traffic(("intent", "0-100", 95.0), ("chat", "100-500", 5.0)), BOTH)
    assert [proposal.what for proposal in found] == ["early exit for short texts"]


TRAFFIC = st.lists(
    st.tuples(
        st.sampled_from(["chat", "intent", "other", "spam", "Not/AName"]),
        st.sampled_from([*LENGTH_BUCKETS, "unknown"]),
        st.floats(0.1, 1e6),
    ),
    min_size=1,
    max_size=12,
).filter(lambda requests: any(variant != "Not/AName" for variant, _, _ in requests))
TALLIES = st.dictionaries(
    st.tuples(st.sampled_from([ANSWERS, LABEL_ANSWERS]), st.sampled_from(["chat", "other"])), st.floats(0.0, 1e6)
)


@settings(max_examples=40)
@given(TRAFFIC, TALLIES, st.none() | st.just("tiny"), st.none() | st.just("labels"))
def test_policies_are_always_valid(
    requests: list[tuple[str, str, float]],
    tallies: dict[tuple[str, str], float],
    draft: str | None,
    classifier: str | None,
) -> None:
    counted = traffic(*requests)
    counted.tallies |= tallies
    for served in served_by(counted, draft, classifier):
        text = new_policy("recommended", served, proposals(counted, served))
        InferencePolicySpec.model_validate(yaml.safe_load(text)["spec"])
        assert "replace-me" not in text


@settings(max_examples=40)
@given(TRAFFIC, TALLIES, st.integers(0, 3))
def test_patches_are_always_valid_and_leave_the_rest_alone(
    requests: list[tuple[str, str, float]], tallies: dict[tuple[str, str], float], level: int
) -> None:
    counted = traffic(*requests)
    counted.tallies |= tallies
    spec = CHAT | {"rollbackLevel": level, "gateway": {"replicas": 3}}
    text, after = patched(counted, spec, draft="tiny", classifier="labels")
    assert after["gateway"] == {"replicas": 3}
    assert after["rollbackLevel"] == level, "a ceiling is a person's choice"
    again, _ = patched(counted, after, draft="tiny")
    assert yaml.safe_load(again) == {}, "once it is applied, there is nothing left to apply"
    assert text.startswith("#") or yaml.safe_load(text) == {}


def test_each_setting_says_which_figure_led_to_it() -> None:
    counted = traffic(("chat", "100-500", 30.0), ("chat", "2000+", 70.0))
    lines = new_policy("shop", BOTH, proposals(counted, BOTH)).splitlines()
    for setting, figure in (("speculative:", "30 %"), ("kvCacheReuse:", "70 %"), ("compression:", "70 %")):
        before = lines[: next(at for at, line in enumerate(lines) if line.strip().startswith(setting))]
        comment = list(takewhile(lambda line: line.lstrip().startswith("#"), reversed(before)))
        assert figure in " ".join(comment)


def test_without_a_draft_a_comment_says_why_there_is_none() -> None:
    text = new_policy("shop", Served("chat"), proposals(traffic(("chat", "100-500", 9.0)), Served("chat")))
    assert yaml.safe_load(text)["spec"] == CHAT
    assert "--draft NAME" in text


def test_generated_labels_ask_for_a_classifier() -> None:
    counted = traffic(("chat", "0-100", 10.0))
    counted.tallies |= {(ANSWERS, "chat"): 10.0, (LABEL_ANSWERS, "chat"): 8.0}
    text, after = patched(counted, CHAT)
    assert after == CHAT
    assert "80 %" in text
    assert "task: Classification" in text
    _, after = patched(counted, CHAT, classifier="labels")
    assert after["classification"] == {"variantRef": {"name": "labels"}}


def test_hot_and_mis_hot_tasks_are_pinned_and_the_others_kept() -> None:
    names = ("sum", "pos", "ner")
    spec = {"generation": CHAT["generation"] | {"subgraphs": {"tasks": [{"name": name} for name in names]}}}
    counted = traffic(("chat", "0-100", 10.0))
    counted.tallies |= {(SLICE_REQUESTS, "sum"): 90.0, (SLICE_REQUESTS, "pos"): 5.0, (SLICE_REQUESTS, "ner"): 5.0}
    counted.tallies[SLICE_LOADS, "pos"] = 80.0
    text, after = patched(counted, spec)
    tasks = {task["name"]: task.get("pinned", False) for task in after["generation"]["subgraphs"]["tasks"]}
    assert tasks == {"sum": True, "pos": True, "ner": False}
    assert "90 %" in text
    assert "40 times an hour" in text


def test_several_classifiers_get_a_policy_each() -> None:
    counted = traffic(
        ("chat", "0-100", 50.0), ("intent", "0-100", 30.0), ("spam", "0-100", 20.0), ("old", "0-100", 1.0)
    )
    policies = served_by(counted)
    assert policies == (Served("chat", "intent"), Served(None, "spam"))
    assert others(counted, policies) == ("old",)


def test_accelerators_are_ranked_by_what_was_measured() -> None:
    rows = ["name,costPerHour,requestsPerSecond", "A100,4.0,90", "L20,1.2,45"]
    assert [entry.name for entry in accelerators(rows)] == ["L20", "A100"]
    for bad in (["name,costPerHour", "A100,4"], [rows[0], "A100,four,9"], [rows[0], "A100,4,0"]):
        with pytest.raises(ReportError, match="line 2"):
            accelerators(bad)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    line = {
        "X-Request-ID": "r", "path": "/v1/classify", "model_name": "intent", "input_length": 30,
        "start_time": "2026-01-01T09:30:00Z",
    }  # fmt: skip
    answer = line | {"path": "/v1/completions", "model_name": "chat", "output_length": 3}
    (tmp_path / "log").write_text(f"{json.dumps(line)}\n{json.dumps(answer)}\n")
    return tmp_path / "log"


def test_the_command(log: Path, tmp_path: Path) -> None:
    (tmp_path / "devices").write_text("name,costPerHour,requestsPerSecond\nL20,1.2,45\n")
    arguments = ["recommend", "--log", str(log), "--accelerators", str(tmp_path / "devices")]
    answer = CliRunner().invoke(app, arguments)
    assert answer.exit_code == 0, answer.output
    spec = yaml.safe_load(answer.stdout)["spec"]
    assert spec == CHAT | {"classification": {"variantRef": {"name": "intent"}, "earlyExit": {}}}
    assert "early exit for short texts" in answer.stderr
    assert "call /v1/classify with model intent" in answer.stdout
    assert "L20" in answer.stderr


def test_the_command_with_a_policy_prints_a_patch(log: Path, tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(new_policy("shop", Served("chat", "intent"), ()))
    answer = CliRunner().invoke(app, ["recommend", "--log", str(log), "-f", str(file)])
    assert answer.exit_code == 0, answer.output
    assert yaml.safe_load(answer.stdout) == {"spec": {"classification": {"earlyExit": {}}}}
    assert "kubectl patch inferencepolicies shop" in answer.stdout
    file.write_text(new_policy("shop", Served("elsewhere"), ()))
    answer = CliRunner().invoke(app, ["recommend", "--log", str(log), "-f", str(file)])
    assert answer.exit_code == 1
    assert "chat, intent" in answer.stderr
