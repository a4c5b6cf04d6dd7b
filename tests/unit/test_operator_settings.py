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
