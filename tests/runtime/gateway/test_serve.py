"""`sixfold serve -f` as a person runs it: models from files, a level edited while a stream runs, SIGTERM."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

VARIANTS = """
apiVersion: sixfold.dev/v1alpha1
kind: ModelVariant
metadata: {name: chat}
spec: {task: Generation, source: {uri: pvc://models/chat}}
---
apiVersion: sixfold.dev/v1alpha1
kind: ModelVariant
metadata: {name: sentiment}
spec: {task: Classification, source: {uri: pvc://models/sentiment}}
"""
POLICY = """
apiVersion: sixfold.dev/v1alpha1
kind: InferencePolicy
metadata: {name: assistant}
spec:
  rollbackLevel: LEVEL
  engine: {accelerator: {type: CPU}}
  generation: {variantRef: {name: chat}}
  classification: {variantRef: {name: sentiment}}
"""
STREAM = {"model": "assistant", "prompt": "hello", "max_tokens": 3000, "temperature": 0, "stream": True}


def test_from_files_to_an_orderly_end(
    sixfold: Callable[..., Any], models: Path, free_port: int, tmp_path: Path, until: Callable[..., Any]
) -> None:
    policy, variants = tmp_path / "policy.yaml", tmp_path / "variants.yaml"
    policy.write_text(POLICY.replace("LEVEL", "3"))
    variants.write_text(VARIANTS)
    files = ["-f", str(policy), "-f", str(variants), "--claim", f"models={models}", "--port", str(free_port)]
    command = sixfold("serve", *files, SIXFOLD_DRAIN_SECONDS="60")
    url = f"http://127.0.0.1:{free_port}"
    command.wait_ready(url)
    client = httpx.Client(base_url=url, timeout=60, trust_env=False)

    def level() -> int:
        return int(client.get("/state").json()["level"])

    assert client.post("/v1/classify", json={"input": "hello"}).status_code == 200
    with client.stream("POST", "/v1/completions", json=STREAM) as response:
        parts = response.iter_text()
        text = next(parts)
        policy.write_text(POLICY.replace("LEVEL", "1"))
        until(lambda: level() == 1, "the edited level")
        policy.write_text(POLICY.replace("LEVEL", "7"))
        until(lambda: client.get("/state").json()["configError"], "the bad edit to be reported")
        assert level() == 1
        assert "spec: rollbackLevel" in client.get("/state").json()["configError"]
        assert client.post("/v1/completions", json={**STREAM, "max_tokens": 2}).headers["x-sixfold-level"] == "1"
        command.process.send_signal(signal.SIGTERM)
        until(lambda: client.get("/readyz").status_code == 503, "the gateway to be unready")
        late = client.post("/v1/completions", json={**STREAM, "max_tokens": 2, "stream": False})
        assert late.status_code == 200, "a request that comes just after SIGTERM"
        assert late.headers["connection"] == "close"
        text += "".join(parts)
    assert response.headers["x-sixfold-level"] == "3"
    assert text.endswith("data: [DONE]\n\n"), "a stream finishes after SIGTERM"
    assert command.process.wait(60) == 0


MODES = """
apiVersion: sixfold.dev/v1alpha1
kind: InferencePolicy
metadata: {name: assistant}
spec:
  engine: {accelerator: {type: CPU}}
  generation: {variantRef: {name: chat}}
  classification:
    variantRef: {name: intent}
    earlyExit: {rule: Fixed, threshold: "0.5", lengthRelaxation: "0", sanitize: {}}
    subgraphs: {tasks: [{name: topic}, {name: pos, pinned: true}]}
    escalate: {belowConfidence: "CONFIDENCE", maxTokens: 4, promptTemplate: "Is this {labels}? {text}"}
"""
INTENT = VARIANTS.replace("pvc://models/sentiment", "pvc://classifiers/intent").replace(
    "name: sentiment", "name: intent"
)


def test_exits_tasks_and_escalation_from_files(
    sixfold: Callable[..., Any],
    models: Path,
    classifiers: Path,
    free_port: int,
    tmp_path: Path,
    until: Callable[..., Any],
) -> None:
    policy, variants = tmp_path / "policy.yaml", tmp_path / "variants.yaml"
    policy.write_text(MODES.replace("CONFIDENCE", "0"))
    variants.write_text(INTENT)
    claims = ["--claim", f"models={models}", "--claim", f"classifiers={classifiers}"]
    command = sixfold("serve", "-f", str(policy), "-f", str(variants), *claims, "--port", str(free_port))
    url = f"http://127.0.0.1:{free_port}"
    command.wait_ready(url)
    client = httpx.Client(base_url=url, timeout=60, trust_env=False)

    def item(text: str, **headers: str) -> dict[str, Any]:
        (labelled,) = client.post("/v1/classify", json={"input": text}, headers=headers).json()["data"]
        return dict(labelled)

    early = item("hello §")
    assert (early["exited"], early["sanitized"], early["escalated"]) == (True, True, False)
    assert item("hello", **{"X-Task": "topic"})["task"] == "topic"
    assert item("the old dog", **{"X-Task": "pos"})["tokens"][2]["text"] == "dog"
    policy.write_text(MODES.replace("CONFIDENCE", "1"))
    until(lambda: item("hello")["escalated"], "the text to be escalated")
    policy.write_text(MODES.replace("CONFIDENCE", "1").replace("spec:", "spec:\n  rollbackLevel: 2"))
    until(lambda: not item("hello")["exited"], "the level without exits")
    command.process.send_signal(signal.SIGTERM)
    assert command.process.wait(60) == 0
