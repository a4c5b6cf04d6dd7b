"""A gateway that is told to stop: what runs may finish, and what can't in time ends with an error that says so."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

LONG = {"model": "chat", "prompt": "hello", "temperature": 0, "max_tokens": 4000}
PATH = "/v1/completions"


@pytest.fixture
def start(
    engine: Any, sixfold: Callable[..., Any], free_port: int, tmp_path: Path
) -> Callable[[float], tuple[Any, httpx.Client]]:
    """Runs a gateway that has so many seconds to stop in."""

    def run(drain_seconds: float) -> tuple[Any, httpx.Client]:
        config = tmp_path / "config"
        config.mkdir()
        stable = {"level": 2, "activeModes": [], "streaming": {"compression": "Off", "level": 3}}
        (config / "config.json").write_text(json.dumps({"sequence": 1, "stable": stable}))
        command = sixfold(
            "serve",
            "--role",
            "gateway",
            SIXFOLD_ENGINES=json.dumps([f"127.0.0.1:{engine.port}"]),
            SIXFOLD_GATEWAY_PORT=str(free_port),
            SIXFOLD_HOST="127.0.0.1",
            SIXFOLD_POLICY="assistant",
            SIXFOLD_CONFIG_DIRECTORY=str(config),
            SIXFOLD_DRAIN_SECONDS=str(drain_seconds),
        )
        url = f"http://127.0.0.1:{free_port}"
        command.wait_ready(url)
        return command, httpx.Client(base_url=url, timeout=60, trust_env=False)

    return run


def stop_while_answering(command: Any, client: httpx.Client, tokens: int) -> tuple[str, httpx.Response]:
    """SIGTERM while a stream and a plain call run: the stream's text, and the plain call's answer."""
    plain: list[httpx.Response] = []
    body = {**LONG, "max_tokens": tokens}
    with client.stream("POST", PATH, json={**body, "stream": True}) as response:
        parts = response.iter_text()
        text = next(parts)
        call = threading.Thread(target=lambda: plain.append(client.post(PATH, json=body)))
        call.start()
        text += next(parts)
        command.process.send_signal(signal.SIGTERM)
        text += "".join(parts)
    call.join(60)
    assert command.process.wait(60) == 0
    return text, plain[0]


def test_what_runs_may_finish(start: Any) -> None:
    text, plain = stop_while_answering(*start(60), tokens=500)
    assert text.endswith("data: [DONE]\n\n")
    assert plain.json()["usage"]["completion_tokens"] == 500


def test_what_takes_too_long_ends_with_an_error(start: Any, engine: Any, until: Callable[..., Any]) -> None:
    cancelled = engine.metric("sixfold_engine_requests_total", outcome="cancelled")
    text, plain = stop_while_answering(*start(1.5), tokens=4000)
    last = json.loads(text.removesuffix("\n\n").rpartition("data: ")[2])
    assert last["error"]["code"] == "shutting_down"
    assert "[DONE]" not in text
    assert (plain.status_code, plain.json()["error"]["code"]) == (503, "shutting_down")
    assert plain.headers["connection"] == "close"
    assert "Retry-After" in plain.headers
    until(lambda: engine.metric("sixfold_engine_requests_total", outcome="cancelled") == cancelled + 2, "both to stop")
