"""The recording and alerting rules: read, and run on made-up series, by the real promtool."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

HERE = Path(__file__).resolve().parent
RULES = HERE.parents[1] / "helm" / "sixfold" / "monitoring" / "rules.yaml"
CASES = (HERE / "rules.test.yaml", HERE / "rules-of-days.test.yaml")


def rules(kind: str) -> list[dict[str, Any]]:
    """All rules that are an `alert`, or all that are a `record`."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


def cases(kind: str) -> Iterator[dict[str, Any]]:
    for path in CASES:
        for test in yaml.safe_load(path.read_text())["tests"]:
            yield from test.get(kind, ())


def test_promtool_finds_nothing_to_say(promtool) -> None:
    total = len(rules("alert")) + len(rules("record"))
    assert f"SUCCESS: {total} rules found" in promtool("check", "rules", "--lint-fatal", RULES)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.name)
def test_every_case_holds(promtool, path: Path) -> None:
    promtool("test", "rules", path)


def test_every_alert_is_seen_firing_and_silent() -> None:
    names = {rule["alert"] for rule in rules("alert")}
    fired = {case["alertname"] for case in cases("alert_rule_test") if case["exp_alerts"]}
    assert fired == names
    # Each test has a healthy policy beside the ill one; what isn't about a policy has a case of its own.
    unlabelled = {rule["alert"] for rule in rules("alert") if rule["alert"].startswith("SixfoldOperator")}
    assert unlabelled <= {case["alertname"] for case in cases("alert_rule_test") if not case["exp_alerts"]}


def test_every_record_is_computed_somewhere() -> None:
    texts = " ".join(case["expr"] for case in cases("promql_expr_test"))
    texts += " ".join(rule["expr"] for rule in rules("alert") + rules("record"))
    for rule in rules("record"):
        assert rule["record"] in texts, rule["record"]


def test_an_alert_about_a_policy_says_which() -> None:
    """The receiver finds the policy by the labels namespace and policy, and people by the summary."""
    about_policies = [rule for rule in rules("alert") if "$labels.policy" in rule["annotations"]["summary"]]
    assert len(about_policies) == 10
    for case in cases("alert_rule_test"):
        if case["alertname"] in {rule["alert"] for rule in about_policies}:
            for alert in case["exp_alerts"]:
                assert {"namespace", "policy", "severity"} <= alert["exp_labels"].keys()
    for rule in rules("alert"):
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"].keys() == {"summary", "description"}
