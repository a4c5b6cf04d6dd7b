"""The control loop against a real kube-apiserver: what Prometheus said in, levels, status and configuration out.

Prometheus itself is real in test_prometheus.py and in the journeys; here its answers are given, with the clock.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from sixfold_operator.alerts import Heard
from sixfold_operator.cache import Cache
from sixfold_operator.control.model import Reading, Snapshot
from sixfold_operator.control.signals import BUILT_IN
from sixfold_operator.controller import CHILD_KINDS, CHILD_SELECTOR, WATCHED_KINDS, tags
from sixfold_operator.kube import Kube
from sixfold_operator.outbox import Outbox
from sixfold_operator.pod_states import PodStates
from sixfold_operator.reconcile.children import Children
from sixfold_operator.reconcile.context import Clock, Context
from sixfold_operator.reconcile.decided import Watched
from sixfold_operator.reconcile.decisions import Decider
from sixfold_operator.reconcile.policy import PolicyReconciler
from sixfold_operator.reconcile.variant import reconcile_variant
from sixfold_operator.settings import OperatorSettings
from sixfold_operator.sinks import SinksFile

ANALYSIS = {
    "interval": "10s",
    "initialDelay": "0s",
    "failureLimit": 3,
    "cooldown": "60s",
    "recoverAfter": "60s",
    "alerts": [{"alertName": "High5xx", "action": "StepDown"}],
}


class World:
    """A policy, an operator that can be replaced, a clock, and what Prometheus and Alertmanager say."""

    def __init__(self, scene: Any, kube: Kube) -> None:
        self.scene, self.kube = scene, kube
        self.now = datetime.now(UTC)
        self.seconds = 0.0
        self.slow = False
        self.down = ""
        self.firing: dict[str, Heard] = {}
        self.restart()

    def restart(self) -> None:
        """A new process: what it knows comes from the API."""
        self._cache = Cache(tags)
        clock = Clock(monotonic=lambda: self.seconds, now=lambda: self.now)
        settings = OperatorSettings(runtime_image="registry.example/runtime:1")
        states = PodStates()
        self.context = Context(settings, self.kube, self._cache, Children(self.kube, self._cache), states, clock)
        watched = Watched(lambda: BUILT_IN, lambda *_: self._snapshot(), lambda *_: self.firing)
        outbox = Outbox(SinksFile(None), lambda *_: None)
        self._policies = PolicyReconciler(self.context, Decider(watched, clock), outbox)

    def _snapshot(self) -> Snapshot:
        if self.down:
            return Snapshot(self.now, {}, {}, "PrometheusError", self.down)
        level = (self.status().get("level") or {}).get("target", 3)
        at = self.now.timestamp()
        readings = {
            "ErrorRate": (Reading(0.0, 500.0, at, level, "stable"),),
            "RequestP95": (Reading(99.0 if self.slow else 0.1, 500.0, at, level, "stable"),),
        }
        return Snapshot(self.now, readings)

    async def look(self, times: int = 1, seconds: float = 10.0) -> None:
        for _ in range(times):
            self.now += timedelta(seconds=seconds)
            self.seconds += seconds
            for kind in WATCHED_KINDS:
                selector = CHILD_SELECTOR if kind in CHILD_KINDS else ""
                items, version = await self.kube.list(kind, self.scene.api.namespace, selector)
                self._cache.replace(kind, self.scene.api.namespace, items, version)
            await reconcile_variant(self.context, self.scene.api.namespace, "chat", lambda _: None)
            await self._policies.reconcile(self.scene.api.namespace, "bot")

    def status(self) -> dict[str, Any]:
        return (self.scene.api.get("InferencePolicy", "bot") or {}).get("status", {})

    def level(self) -> int:
        """What pods are told."""
        config = json.loads(self.scene.api.get("ConfigMap", "bot-runtime")["data"]["config.json"])
        assert config["stable"]["level"] == self.status()["level"]["target"]
        return int(config["stable"]["level"])

    def condition(self, type_: str) -> dict[str, Any]:
        found = (entry for entry in self.status()["conditions"] if entry["type"] == type_)
        return next(found, {"status": "Absent", "reason": ""})


@pytest.fixture
async def world(kube: Kube, make_scene: Any) -> World:
    """A Ready policy at level 3."""
    scene = make_scene()
    scene.claim()
    scene.variant()
    scene.policy(analysis=ANALYSIS)
    world = World(scene, kube)
    await world.look()
    scene.finish_job(summary={"facts": scene.FACTS})
    await world.look(2)
    for part in ("engine", "gateway"):
        scene.deployment_ready(f"bot-{part}")
    await world.look(2)
    assert world.condition("Ready")["status"] == "True"
    assert world.level() == 3
    await world.look(seconds=60.0)  # what was before the policy came isn't held against it
    return world


async def test_a_breach_lowers_the_level_and_health_brings_it_back(world: World) -> None:
    world.slow = True
    await world.look(2)
    assert world.level() == 3
    await world.look()
    assert world.level() < 3
    lowered = world.status()
    assert lowered["level"]["reason"] == "RequestP95"
    assert lowered["history"][0]["decision"] == "LevelChanged"
    assert world.condition("RolledBack")["reason"] == "LevelLowered"
    assert "LevelChanged" in world.scene.warnings()
    world.slow = False
    await world.look(12)
    assert world.level() == 3
    assert world.condition("RolledBack")["status"] == "Absent"


async def test_a_restart_goes_on_where_the_last_operator_was(world: World) -> None:
    world.slow = True
    await world.look(2)
    world.restart()
    await world.look()
    assert world.level() < 3
    world.slow = False
    world.restart()
    await world.look(3)
    assert world.level() < 3, "a restart is no recovery"


async def test_without_prometheus_nothing_moves_and_the_status_rests(world: World) -> None:
    world.down = "http://prometheus can't be reached"
    await world.look(2)
    before = world.scene.api.get("InferencePolicy", "bot")["metadata"]["resourceVersion"]
    await world.look(6)
    assert world.level() == 3
    assert world.condition("MetricsAvailable")["reason"] == "PrometheusError"
    assert world.scene.api.get("InferencePolicy", "bot")["metadata"]["resourceVersion"] == before


async def test_healthy_looks_write_nothing(world: World) -> None:
    await world.look(2)
    before = world.scene.api.get("InferencePolicy", "bot")["metadata"]["resourceVersion"]
    await world.look(5)
    assert world.scene.api.get("InferencePolicy", "bot")["metadata"]["resourceVersion"] == before


async def test_an_alert_acts_at_once_and_its_end_is_not_forgotten_by_a_restart(world: World) -> None:
    await world.look()
    world.firing = {"High5xx": Heard(True, world.now)}
    await world.look(seconds=1.0)
    assert world.level() < 3
    assert world.status()["level"]["reason"] == "Alert/High5xx"
    world.restart()
    world.firing = {}
    await world.look(12)
    assert world.level() < 3, "nothing was heard of the alert since the restart"
    world.firing = {"High5xx": Heard(False, world.now)}
    await world.look(12)
    assert world.level() == 3


async def test_a_human_wins_at_once(world: World) -> None:
    world.slow = True
    await world.look(3)
    assert world.level() < 3
    world.slow = False
    world.scene.api.patch("InferencePolicy", "bot", {"spec": {"retryToken": "again"}})
    await world.look(seconds=1.0)
    assert world.level() == 3
    world.scene.api.patch("InferencePolicy", "bot", {"spec": {"rollbackLevel": 1}})
    await world.look(seconds=1.0)
    assert world.level() == 1


async def test_observe_only_tells(world: World) -> None:
    world.scene.api.patch("InferencePolicy", "bot", {"spec": {"automation": "Observe"}})
    world.slow = True
    await world.look(6)
    assert world.level() == 3
    assert world.status()["history"][0]["decision"] == "Observed"


async def test_a_threshold_for_a_signal_that_nobody_watches_is_told(world: World) -> None:
    thresholds = [{"signal": "NoSuchSignal", "threshold": "1"}]
    world.scene.api.patch("InferencePolicy", "bot", {"spec": {"analysis": {**ANALYSIS, "thresholds": thresholds}}})
    await world.look()
    assert world.condition("SignalsUnknown")["reason"] == "NoSuchSignal"
