"""operator/CONDITIONS.md says what every condition, reason, decision, event and error code means and what to do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sixfold_api.modes import ModeState
from sixfold_api.ticket import Cause, Phase
from sixfold_operator.control.signals import BUILT_IN
from sixfold_runtime.prepare.failures import Reason

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "operator" / "CONDITIONS.md"
NO_REASONS = {
    # Kinds and fields of Kubernetes.
    *(
        "ConfigMap",
        "Deployment",
        "Service",
        "Event",
        "Job",
        "Secret",
        "PersistentVolumeClaim",
        "Lease",
        "NetworkPolicy",
    ),
    *("PodDisruptionBudget", "Ingress", "HTTPRoute", "HorizontalPodAutoscaler", "ScaledObject", "PodMonitor", "Pod"),
    *("PodScheduled", "Complete", "Failed", "Running", "Succeeded", "Normal", "Warning", "True", "False", "Background"),
    # Values of the spec, and parts of the loop that have other names outside.
    *("Redis", "Memory", "SingleToken", "CostModel", "Shadow", "Health", "Waste", "Figure", "Freshness", "HeatMap"),
    *("Ticket", "SignalsError"),
}
"""PascalCase words in the sources that nobody meets as a type or reason."""
CALLS_WITH_CODES = {"ApiError": 1, "RequestError": 1, "Failure": 1, "bad_request": 2, "unavailable": 1}
"""Function -> position of the error's code."""


def words() -> set[str]:
    """All that stands on the page as code."""
    return set(re.findall(r"`([^`\s]+)`", PAGE.read_text()))


def strings(folder: Path) -> Iterator[tuple[str, str]]:
    """Each string of a module that isn't a docstring, with where it stands."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value, f"{path.relative_to(ROOT)}:{node.lineno}"


def error_codes() -> Iterator[tuple[str, str]]:
    """Each literal code of an error that a client of the gateway may get."""
    for folder in ("gateway", "engine"):
        for path in sorted((ROOT / "runtime_image" / "sixfold_runtime" / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call):
                    continue
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                place = CALLS_WITH_CODES.get(name)
                given = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
                if place is not None:
                    given += node.args[place : place + 1]
                for value in given:
                    if isinstance(value, ast.Constant) and isinstance(value.value, str):
                        yield value.value, f"{path.relative_to(ROOT)}:{node.lineno}"


def missing(found: Iterator[tuple[str, str]]) -> dict[str, str]:
    known = words()
    return {word: where for word, where in found if word not in known}


@pytest.mark.parametrize("folder", ["reconcile", "control"])
def test_every_condition_reason_and_decision_of_the_operator_is_on_the_page(folder: str) -> None:
    """Any PascalCase word in the modules that judge and decide may become one: those that can't stand in NO_REASONS."""
    found = strings(ROOT / "operator" / "sixfold_operator" / folder)
    reasons = (
        (word, where)
        for word, where in found
        if re.fullmatch(r"([A-Z]+[a-z0-9]+){2,}|[A-Z]{2,}[a-z]{3,}|[A-Z][a-z]{2,}[0-9]?", word)
    )
    left = missing((word, where) for word, where in reasons if word not in NO_REASONS)
    assert not left, f"say in {PAGE.name} what these mean and what to do, or add them to NO_REASONS: {left}"


def test_every_reason_of_a_preparation_is_on_the_page() -> None:
    assert {reason.value for reason in Reason} <= words()


def test_every_signal_cause_phase_and_state_is_on_the_page() -> None:
    named = {signal.name for signal in BUILT_IN} - NO_REASONS
    assert named | {word.value for enum in (Cause, Phase, ModeState) for word in enum} <= words()


def test_every_error_code_is_on_the_page() -> None:
    found = list(error_codes())
    assert {"invalid_api_key", "model_not_found", "empty_prompt", "no_chat_template"} <= {code for code, _ in found}
    left = missing(iter(found))
    assert not left, f"say in {PAGE.name} what a client does about these: {left}"
