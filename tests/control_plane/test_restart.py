"""Killed at any point, the next operator reaches the same end state."""

from __future__ import annotations

import json
from typing import Any

from sixfold_operator.cache import Cache
from sixfold_operator.controller import CHILD_KINDS, CHILD_SELECTOR, WATCHED_KINDS, tags
from sixfold_operator.kube import Kube
from sixfold_operator.outbox import Outbox
from sixfold_operator.pod_states import PodStates
from sixfold_operator.reconcile.children import Children
from sixfold_operator.reconcile.context import Context
from sixfold_operator.reconcile.decided import NOTHING_WATCHED
from sixfold_operator.reconcile.decisions import Decider
from sixfold_operator.reconcile.policy import PolicyReconciler
from sixfold_operator.reconcile.variant import reconcile_variant
from sixfold_operator.settings import OperatorSettings
from sixfold_operator.sinks import SinksFile

WRITES = ("apply", "apply_status", "annotate", "delete", "create_event")


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
            self.written.append(f"{name} {[argument for argument in arguments if isinstance(argument, str)]}")
            if len(self.written) == self.dies_after:
                raise KilledError
            return result

        return write


async def reconcile_all(kube: CountedKube, namespace: str) -> None:
    """One life of an operator, as after a restart: list, then look at everything twice."""
    cache = Cache(tags)
    for kind in WATCHED_KINDS:
        items, version = await kube.list(kind, namespace, CHILD_SELECTOR if kind in CHILD_KINDS else "")
        cache.replace(kind, namespace, items, version)
    states = PodStates()
    settings = OperatorSettings(runtime_image="registry.example/runtime:1", network_policies=True)
    context = Context(settings, kube, cache, Children(kube, cache), states)  # type: ignore[arg-type]
    policies = PolicyReconciler(
        context, Decider(NOTHING_WATCHED, context.clock), Outbox(SinksFile(None), lambda *_: None)
    )
    try:
        for _ in range(2):
            await reconcile_variant(context, namespace, "chat", lambda _: None)
            await policies.reconcile(namespace, "bot")
    finally:
        await states.close()


async def live_through(scene: Any, kube: CountedKube) -> None:
    """A policy's way from nothing to a lowered level; every life that ends early is followed by another."""
    scene.claim()
    scene.variant()
    scene.policy(gateway={"replicas": 2, "ingress": {"host": "chat.example.com"}})
    await survive(kube, scene)
    scene.finish_job(summary={"facts": scene.FACTS})
    await survive(kube, scene)
    for part in ("engine", "gateway"):
        scene.deployment_ready(f"bot-{part}")
    scene.pod("bot-engine", "bot-engine-1", scene.RUNNING)
    await survive(kube, scene)
    scene.api.patch("InferencePolicy", "bot", {"spec": {"rollbackLevel": 1, "engine": {"replicas": 2}}})
    await survive(kube, scene)


async def survive(kube: CountedKube, scene: Any) -> None:
    try:
        await reconcile_all(kube, scene.api.namespace)
    except KilledError:
        await reconcile_all(kube, scene.api.namespace)


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
    await reconcile_all(quiet := CountedKube(kube, None), scene.api.namespace)
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
