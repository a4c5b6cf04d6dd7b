"""Engines that sleep while nobody asks: what the gateway says meanwhile, and the request that wakes them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

BODY = {"model": "chat", "prompt": "hello", "max_tokens": 8}


def idle_seconds(gateway: Any) -> float:
    seconds: float = gateway.client.get("/state").json()["idleSeconds"]
    return seconds


def test_a_request_waits_for_the_engine_that_it_wakes(
    new_gateway: Any, free_port: int, wire_at: Callable[[int], Any], until: Callable[..., Any]
) -> None:
    gateway = new_gateway(free_port, ready=False)
    gateway.apply(maySleep=True)
    assert gateway.client.get("/readyz").status_code == 200, "traffic must come, or nobody wakes the engines"
    assert idle_seconds(gateway) > 0
    answers: list[Any] = []
    call = threading.Thread(target=lambda: answers.append(gateway.client.post("/v1/completions", json=BODY)))
    call.start()
    until(lambda: gateway.metric("sixfold_gateway_waiting") == 1, "the request to wait")
    assert idle_seconds(gateway) == 0, "the operator's sign to wake the engines"
    wire_at(free_port)
    call.join(60)
    assert answers[0].status_code == 200
    assert gateway.metric("sixfold_gateway_waiting") == 0
    until(lambda: idle_seconds(gateway) > 0, "the request to be over")


def test_who_may_not_ask_wakes_nobody(new_gateway: Any, free_port: int, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "alice").write_text("secret")
    gateway = new_gateway(free_port, keys=keys, ready=False)
    gateway.apply(maySleep=True)
    before = idle_seconds(gateway)
    assert gateway.client.post("/v1/completions", json=BODY).status_code == 401
    assert gateway.client.get("/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200
    assert idle_seconds(gateway) > before


def test_a_request_that_waits_too_long_is_told(new_gateway: Any, free_port: int) -> None:
    gateway = new_gateway(free_port, ready=False)
    gateway.apply(maySleep=True)
    response = gateway.client.post("/v1/completions", json=BODY, headers={"X-Request-Timeout": "0.2"})
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"
