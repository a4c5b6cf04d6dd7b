"""What the operator says when its environment is wrong."""

from __future__ import annotations

import pytest

from sixfold_operator.main import main
from sixfold_operator.settings import OperatorSettings


def test_a_missing_image_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("SIXFOLD_RUNTIME_IMAGE", raising=False)
    assert main() == 2
    assert "runtime_image" in capsys.readouterr().err


def test_namespaces_are_a_json_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIXFOLD_RUNTIME_IMAGE", "registry.example/runtime:1")
    monkeypatch.setenv("SIXFOLD_WATCH_NAMESPACES", '["a", "b"]')
    assert OperatorSettings().watch_namespaces == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PROMETHEUS_URL", "prometheus:9090"),
        ("PROMETHEUS_TIMEOUT_SECONDS", "0"),
        ("ALERTS_PORT", "70000"),
    ],
)
def test_what_is_wrong_with_monitoring_is_named(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SIXFOLD_RUNTIME_IMAGE", "registry.example/runtime:1")
    monkeypatch.setenv(f"SIXFOLD_{name}", value)
    assert main() == 2
    assert name.lower() in capsys.readouterr().err
