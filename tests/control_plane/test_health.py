"""The liveness probe notices an operator that has gone deaf."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sixfold_operator.controller import Controller, Key
from sixfold_operator.kube import Kube
from sixfold_operator.reconcile.context import Clock
from sixfold_operator.settings import OperatorSettings


async def test_a_stalled_loop_fails_the_probe(kube: Kube, http: Any) -> None:
    now = [0.0]
    clock = Clock(monotonic=lambda: now[0], now=lambda: datetime(2030, 1, 1, tzinfo=UTC))
    settings = OperatorSettings(runtime_image="registry.example/runtime:1", watch_namespaces=["default"])
    controller = Controller(settings, kube, clock)
    assert controller.unready() == "the first listing isn't done"
    assert controller.stalled() == "", "waiting for the CRDs is no reason to be restarted"
    await controller.start()
    assert controller.unready() == ""
    now[0] = 31.0
    assert "no tick for 31 s" in controller.stalled()
    await controller.stop()
    assert controller.stalled() == "a background task has ended"


async def test_a_key_that_is_gone_is_no_error(kube: Kube, http: Any) -> None:
    settings = OperatorSettings(runtime_image="registry.example/runtime:1", watch_namespaces=["default"])
    controller = Controller(settings, kube)
    assert await controller.handle(Key("InferencePolicy", "default", "never-there")) is None
    assert await controller.handle(Key("ModelVariant", "default", "never-there")) is None
