"""Engines that are missing, lost, or replaced."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from sixfold_api.runtime_config import ServedModel
from sixfold_api.scalars import Task
from sixfold_runtime.gateway import core

BODY = {"model": "chat", "prompt": "hello", "max_tokens": 3500, "temperature": 0}
SHORT = {**BODY, "max_tokens": 8}


def test_without_an_engine_it_is_unready_and_says_503(
    new_gateway: Any, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "RESTART_SECONDS", 0.1)
    gateway = new_gateway(free_port, ready=False)
    readiness = gateway.client.get("/readyz")
    assert readiness.status_code == 503
    assert f"127.0.0.1:{free_port}" in readiness.text
    assert gateway.client.get("/healthz").status_code == 200
    response = gateway.client.post("/v1/completions", json=SHORT)
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["code"] == "no_engine_ready"
    assert gateway.client.get("/v1/models").json()["data"] == []


def test_it_waits_for_every_configured_target(
    engine: Any, new_gateway: Any, free_port: int, until: Callable[..., Any]
) -> None:
    gateway = new_gateway(engine.port, f"localhost:{free_port}", ready=False)
    until(lambda: gateway.metric("sixfold_gateway_engines_ready") == 1, "the engine that is there")
    assert f"localhost:{free_port}" in gateway.client.get("/readyz").text
    assert gateway.client.post("/v1/completions", json=SHORT).status_code == 200, "but it serves what it can"


def test_an_unready_name_doesnt_matter_to_those_that_are(
    engine: Any, new_gateway: Any, until: Callable[..., Any]
) -> None:
    gateway = new_gateway(engine.port, "no-such-host.invalid:1", ready=False)
    until(lambda: gateway.metric("sixfold_gateway_engines_ready") == 1, "the engine that is there")
    assert gateway.client.post("/v1/completions", json=SHORT).status_code == 200


def test_a_lost_engine_in_mid_stream_is_an_error_event(wire: Any, new_gateway: Any, until: Callable[..., Any]) -> None:
    gateway = new_gateway(wire.port)
    pieces = []
    with pytest.raises(openai.APIError, match="engine was lost"):
        for event in gateway.openai().completions.create(**BODY, stream=True):
            pieces.append(event.choices[0].text)
            if len(pieces) == 5:
                wire.cut()
    assert len(pieces) >= 5
    until(lambda: gateway.metric("sixfold_requests_total", outcome="error") == 1, "the error to be counted")
    assert gateway.client.post("/v1/completions", json=SHORT).status_code == 200, "it connects again by itself"


def test_a_plain_call_survives_the_loss_of_its_engine(
    wire: Any, engine: Any, new_gateway: Any, until: Callable[..., Any]
) -> None:
    gateway = new_gateway(wire.port)
    expected = gateway.client.post("/v1/completions", json={**BODY, "max_tokens": 600}).json()["choices"]
    answers: list[Any] = []
    call = threading.Thread(
        target=lambda: answers.append(gateway.client.post("/v1/completions", json={**BODY, "max_tokens": 600}))
    )
    call.start()
    until(lambda: engine.metric("sixfold_requests_running") == 1, "the engine to work")
    wire.cut()
    call.join(60)
    assert answers[0].status_code == 200
    assert answers[0].json()["choices"] == expected


def test_an_engine_gone_for_good_is_a_503(
    wire: Any, engine: Any, new_gateway: Any, monkeypatch: pytest.MonkeyPatch, until: Callable[..., Any]
) -> None:
    monkeypatch.setattr(core, "RESTART_SECONDS", 0.1)
    gateway = new_gateway(wire.port)
    wire.cut(for_good=True)
    until(lambda: gateway.client.get("/readyz").status_code == 503, "the gateway to notice")
    response = gateway.client.post("/v1/completions", json=SHORT)
    assert response.status_code == 503
    assert gateway.client.post("/v1/completions", json={**SHORT, "model": "nobody"}).status_code == 404


def test_requests_go_to_the_idler_engine(engine: Any, wire: Any, new_gateway: Any) -> None:
    """Two ways to one engine are two engines to the gateway; the plain call takes the way without the stream."""
    gateway = new_gateway(engine.port, wire.port)
    with gateway.client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
        parts = response.iter_raw()
        next(parts)
        pool = gateway.app.state.gateway.pool
        for _ in range(4):
            assert gateway.client.post("/v1/completions", json=SHORT).status_code == 200
        busy = sorted(session.in_flight for session in pool._sessions)
        assert busy == [0, 1]
        assert len({session.last_used for session in pool._sessions} - {0}) == 2


def test_a_rolling_restart_fails_no_request(
    engine: Any,
    models: Path,
    new_gateway: Any,
    free_port: int,
    sixfold: Callable[..., Any],
    tmp_path: Path,
    until: Callable[..., Any],
) -> None:
    """A second engine, run by `sixfold serve`, gets SIGTERM under load: it finishes what it has and leaves."""
    config = tmp_path / "config"
    config.mkdir()
    stable = {"level": 2, "activeModes": [], "streaming": {"compression": "Off", "level": 3}}
    (config / "config.json").write_text(json.dumps({"sequence": 5, "stable": stable}))
    served = [{"name": "chat", "task": "Generation", "path": str(models / "chat")}]
    command = sixfold(
        "serve",
        "--role",
        "engine",
        SIXFOLD_MODELS=json.dumps(served),
        SIXFOLD_ENGINE_PORT=str(free_port),
        SIXFOLD_HOST="127.0.0.1",
        SIXFOLD_POLICY="assistant",
        SIXFOLD_DEVICE="cpu",
        SIXFOLD_CONFIG_DIRECTORY=str(config),
        SIXFOLD_DRAIN_SECONDS="60",
    )
    command.wait_ready(f"http://127.0.0.1:{free_port}")
    gateway = new_gateway(engine.port, free_port)
    outcomes: list[tuple[int, str, str]] = []
    stop = threading.Event()

    def load(stream: bool) -> None:
        while not stop.is_set():
            response = gateway.client.post("/v1/completions", json={**SHORT, "max_tokens": 40, "stream": stream})
            complete = response.text.endswith("data: [DONE]\n\n") if stream else "choices" in response.text
            outcomes.append((response.status_code, response.headers["x-sixfold-level"], str(complete)))

    threads = [threading.Thread(target=load, args=(index % 2 == 0,)) for index in range(4)]
    for thread in threads:
        thread.start()
    until(lambda: {outcome[1] for outcome in outcomes} == {"2", "3"}, "both engines to work")
    command.process.send_signal(signal.SIGTERM)
    assert command.process.wait(90) == 0
    before = len(outcomes)
    until(lambda: len(outcomes) >= before + 8, "requests after the restart")
    stop.set()
    for thread in threads:
        thread.join(60)
    assert {(status, complete) for status, _, complete in outcomes} == {(200, "True")}
    assert {level for _, level, _ in outcomes[before + 4 :]} == {"3"}


def test_a_model_that_is_not_loaded_is_missing_and_not_unknown(
    new_engine: Any, new_gateway: Any, models: Path, tmp_path: Path, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One model of the engine can't be loaded: the gateway stays unready, and says 503 rather than 404."""
    monkeypatch.setattr(core, "RESTART_SECONDS", 0.1)
    broken = ServedModel(name="chat", task=Task.GENERATION, path=str(tmp_path / "absent"))
    sentiment = ServedModel(name="sentiment", task=Task.CLASSIFICATION, path=str(models / "sentiment"))
    gateway = new_gateway(new_engine(broken, sentiment).port, ready=False)
    until(lambda: gateway.client.post("/v1/classify", json={"input": "hello"}).status_code == 200, "the other model")
    assert gateway.client.get("/readyz").status_code == 503
    answer = gateway.client.post("/v1/completions", json={"model": "assistant", "prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_not_ready")
    unknown = gateway.client.post("/v1/completions", json={"model": "gpt-4", "prompt": "x"})
    assert unknown.status_code == 404
    states = {model["name"]: model["ready"] for model in gateway.client.get("/state").json()["models"]}
    assert states == {"chat": False, "sentiment": True}
