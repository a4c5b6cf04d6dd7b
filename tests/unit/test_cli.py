"""`sixfold serve` with settings and files that are wrong: one line, and no model is loaded."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sixfold_runtime.cli import app

FILE = """
apiVersion: sixfold.dev/v1alpha1
kind: ModelVariant
metadata: {name: chat}
spec: {task: Generation, source: {uri: pvc://models/chat}}
---
apiVersion: sixfold.dev/v1alpha1
kind: InferencePolicy
metadata: {name: bot}
spec: {generation: {variantRef: {name: chat}}}
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(logging.root, "handlers", [])  # `serve` sets up its own, on the stdout of the runner
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "bot.yaml").write_text(FILE)
    (tmp_path / "models" / "chat").mkdir(parents=True)
    return ["-f", str(tmp_path / "bot.yaml"), "--claim", f"models={tmp_path / 'models'}"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--port", "99999"], 1, "error: gateway_port: Input should be less than or equal to 65535"),
        (["--device", "abacus"], 1, "error: device: String should match pattern"),
        (["--api-keys", "nowhere"], 2, "nowhere"),
        (["--redis", "nowhere"], 2, "nowhere"),
        (["--stream-dictionary", "nowhere"], 2, "nowhere"),
        (["--claim", "models"], 2, "expected CLAIM=FOLDER"),
        (["--policy", "other"], 1, "error: no InferencePolicy other; the files have: bot"),
    ],
)
def test_what_is_wrong_is_one_line(files: list[str], arguments: list[str], code: int, words: str) -> None:
    done = CliRunner().invoke(app, ["serve", *files, *arguments])
    assert (done.exit_code, words in done.output) == (code, True), done.output


def test_a_port_that_is_taken(files: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = CliRunner().invoke(app, ["serve", *files, "--port", str(port)])
    assert done.exit_code == 1
    assert f"can't listen on 127.0.0.1:{port}: Address already in use; choose another with --port" in done.output


def test_an_output_that_does_not_exist(files: list[str]) -> None:
    done = CliRunner().invoke(app, ["explain", "policy", *files[:2], "-o", "yaml"])
    assert (done.exit_code, "'table', 'json'" in done.output) == (2, True)
