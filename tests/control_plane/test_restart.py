"""Killed at any point, the next operator reaches the same end state."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from sixfold_api.ticket import Cause
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

WRITES = ("apply", "apply_status", "annotate", "delete", "create_event")


WASTE = Reading(value=0.9, samples=1e6, unix_seconds=0.0, variant="chat", cause=Cause.PADDING)


class KilledError(BaseException):
    """The process is gone: nothing after this write happens."""


class CountedKube:
    """The real API layer, which dies right after a given write."""

    def __init__(self, kube: Kube, dies_after: int | None) -> None:
        self._kube, self.dies_after = kube, dies_after
        self.written: list[str] = []

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._kube, name)
        if name not in WRITES:
            return call

        async def write(*arguments: Any, **options: Any) -> Any:
            result = await call(*arguments, **options)
            about = arguments[0]["kind"] if isinstance(arguments[0], dict) else arguments[0]
            self.written.append(f"{name} {about}")
            if len(self.written) == self.dies_after:
                raise KilledError
            return result

        return write


def finds_waste(clock: Clock) -> Watched:
    """What Prometheus says whenever it is asked: most of what is computed is padding."""

    def snapshot(*_: str) -> Snapshot:
        now = clock.now()
        return Snapshot(now, {"PaddingWaste": (replace(WASTE, unix_seconds=now.timestamp()),)})

    return Watched(signals=lambda: BUILT_IN, snapshot=snapshot, firing=lambda *_: {})


async def reconcile_all(kube: CountedKube, namespace: str, hours: int = 0) -> None:
    """One life of an operator, as after a restart: list, then look at everything twice."""
    cache = Cache(tags)
    for kind in WATCHED_KINDS:
        items, version = await kube.list(kind, namespace, CHILD_SELECTOR if kind in CHILD_KINDS else "")
        cache.replace(kind, namespace, items, version)
    states = PodStates()
    settings = OperatorSettings(runtime_image="registry.example/runtime:1", network_policies=True)
    clock = Clock(now=lambda: datetime.now(UTC) + timedelta(hours=hours))
    context = Context(settings, kube, cache, Children(kube, cache), states, clock)  # type: ignore[arg-type]
    policies = PolicyReconciler(context, Decider(finds_waste(clock), clock), Outbox(SinksFile(None), lambda *_: None))
    try:
        for _ in range(2):
            await reconcile_variant(context, namespace, "chat", lambda _: None)
            await policies.reconcile(namespace, "bot")
    finally:
        await states.close()


async def live_through(scene: Any, kube: CountedKube) -> None:
    """A policy's way from nothing to a ticket and a lower level; each life that ends early is followed by another."""
    scene.claim()
    scene.variant()
    gateway = {"replicas": 2, "ingress": {"host": "chat.example.com"}}
    scene.policy(gateway=gateway, analysis={"failureLimit": 1}, batching={})
    await survive(kube, scene)
    scene.finish_job(summary={"facts": scene.FACTS})
    await survive(kube, scene)
    for part in ("engine", "gateway"):
        scene.deployment_ready(f"bot-{part}")
    scene.pod("bot-engine", "bot-engine-1", scene.RUNNING)
    await survive(kube, scene)
    await survive(kube, scene, hours=1)
    scene.api.patch("InferencePolicy", "bot", {"spec": {"rollbackLevel": 1, "engine": {"replicas": 2}}})
    await survive(kube, scene, hours=1)


async def survive(kube: CountedKube, scene: Any, hours: int = 0) -> None:
    try:
        await reconcile_all(kube, scene.api.namespace, hours)
    except KilledError:
        await reconcile_all(kube, scene.api.namespace, hours)


def end_state(scene: Any) -> dict[str, Any]:
    """Specs, data and statuses without what differs by nature: uids, times, sequences, addresses."""
    config = json.loads(scene.api.get("ConfigMap", "bot-runtime")["data"]["config.json"])
    (pod,) = [pod for pod in scene.api.list("Pod") if pod["metadata"]["name"] == "bot-engine-1"]
    assert pod["metadata"]["annotations"]["sixfold.dev/config-sequence"] == str(config.pop("sequence"))
    state: dict[str, Any] = {"config": config}
    for kind in ("Deployment", "Service", "Job", "PodDisruptionBudget", "NetworkPolicy", "Ingress"):
        for item in scene.api.list(kind):
            state[f"{kind}/{item['metadata']['name'][:12]}"] = cleaned(item["spec"])
    for kind, name in (("InferencePolicy", "bot"), ("ModelVariant", "chat")):
        state[kind] = cleaned(scene.api.get(kind, name)["status"])
    (ticket,) = scene.api.list("OptimizationTicket")
    state["OptimizationTicket"] = cleaned({"spec": ticket["spec"], "phase": ticket["status"]["phase"]})
    return state


def cleaned(value: Any) -> Any:
    changing = {
        "byArm",
        "byLevel",
        "byPolicy",
        "at",
        "lastTransitionTime",
        "since",
        "sequence",
        "message",
        "jobName",
        "uid",
        "clusterIP",
        "clusterIPs",
        "changedAt",
        "fingerprint",
        "query",
    }
    noise = {"selector", "labels", "controller-uid"}
    if isinstance(value, list):
        return [cleaned(item) for item in value]
    if isinstance(value, dict):
        return {key: cleaned(item) for key, item in value.items() if key not in changing | noise}
    return value


async def test_killed_after_every_single_write(kube: Kube, http: Any, make_scene: Any) -> None:
    """Stands first in this module: the operator as a process must not be there yet."""
    undisturbed = CountedKube(kube, None)
    scene = make_scene()
    await live_through(scene, undisturbed)
    wanted = end_state(scene)
    assert wanted["InferencePolicy"]["level"]["target"] == 1
    await reconcile_all(quiet := CountedKube(kube, None), scene.api.namespace, hours=1)
    assert quiet.written == []
    print(f"{len(undisturbed.written)} writes, the operator is killed after each of them")
    for number in range(1, len(undisturbed.written) + 1):
        scene = make_scene()
        await live_through(scene, CountedKube(kube, number))
        assert end_state(scene) == wanted, f"killed after write {number}"


def test_the_apiserver_goes_and_comes_back(scene: Any, operator: Any, control_plane: Any) -> None:
    scene.ready_policy()
    control_plane.restart_apiserver()
    scene.api.patch("InferencePolicy", "bot", {"spec": {"rollbackLevel": 2}})
    scene.wait_generation("InferencePolicy", "bot")
    assert scene.api.get("InferencePolicy", "bot")["status"]["level"]["target"] == 2


def test_what_nobody_watched_is_done_after_a_restart_and_in_the_served_namespace_only(
    make_scene: Any, operator: Any
) -> None:
    scene, other = make_scene(), make_scene()
    scene.ready_policy()
    operator.kill()
    scene.api.patch("InferencePolicy", "bot", {"spec": {"rollbackLevel": 2}})
    scene.api.delete("Service", "bot-gateway")
    other.policy()
    operator.start(SIXFOLD_WATCH_NAMESPACES=json.dumps([scene.api.namespace]))
    scene.wait_generation("InferencePolicy", "bot")
    assert scene.api.get("InferencePolicy", "bot")["status"]["level"]["target"] == 2
    scene.eventually("the Service is back", lambda: scene.api.get("Service", "bot-gateway"))
    scene.replace_deleted("Service", "bot-engine")
    assert "status" not in other.api.get("InferencePolicy", "bot")
