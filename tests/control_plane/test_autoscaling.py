"""Who sets the number of pods: autoscalers and people; the operator only where engines sleep and wake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sixfold_api.names import GATEWAY_PORT

pytestmark = pytest.mark.usefixtures("operator")
LOAD = {"minReplicas": 2, "maxReplicas": 6, "cpuPercent": 80, "scaler": "HPA"}


def engine(scene: Any, **fields: Any) -> None:
    """Change spec.engine; None removes a field."""
    scene.api.patch("InferencePolicy", "bot", {"spec": {"engine": fields}})
    scene.wait_generation("InferencePolicy", "bot")


def replicas(scene: Any) -> int:
    number: int = scene.api.get("Deployment", "bot-engine")["spec"]["replicas"]
    return number


def test_replicas_are_handed_over_to_an_autoscaler_and_taken_back(scene: Any) -> None:
    scene.ready_policy()
    engine(scene, replicas=3)
    scene.eventually("three engines are asked for", lambda: replicas(scene) == 3)
    engine(scene, replicas=None, autoscaling=LOAD)
    hpa = scene.eventually("an HPA", lambda: scene.api.get("HorizontalPodAutoscaler", "bot-engine"))
    assert hpa["spec"]["scaleTargetRef"]["name"] == "bot-engine"
    assert replicas(scene) == 3, "the number survives the hand-over"

    # What an autoscaler does, and a change of the template after it.
    scene.api.patch("Deployment", "bot-engine", {"spec": {"replicas": 5}}, "scale")
    engine(scene, pod={"nodeSelector": {"pool": "gpu"}})
    template = scene.eventually(
        "the template changes",
        lambda: scene.api.get("Deployment", "bot-engine")["spec"]["template"]["spec"].get("nodeSelector"),
    )
    assert template == {"pool": "gpu"}
    assert replicas(scene) == 5, "the operator fights nobody"

    engine(scene, replicas=2, autoscaling=None)
    scene.eventually("the spec's number", lambda: replicas(scene) == 2)
    scene.eventually("the HPA goes", lambda: scene.api.get("HorizontalPodAutoscaler", "bot-engine") is None)


def test_a_policy_that_begins_with_an_autoscaler(scene: Any) -> None:
    scene.claim()
    scene.variant()
    scene.policy(
        engine={"accelerator": {"type": "CPU"}, "autoscaling": LOAD}, gateway={"autoscaling": {"maxReplicas": 3}}
    )
    scene.finish_job(summary={"facts": scene.FACTS})
    for part in ("engine", "gateway"):
        scene.eventually(f"HPA of {part}", lambda part=part: scene.api.get("HorizontalPodAutoscaler", f"bot-{part}"))
        scene.deployment_ready(f"bot-{part}")
    scene.wait("InferencePolicy", "bot", "Ready", "True")


def test_engines_sleep_while_nobody_asks_and_wake_for_a_request(scene: Any, pod_reports: Callable[[int], Any]) -> None:
    report = pod_reports(GATEWAY_PORT)
    report.say(role="gateway", sequence=1, level=3, idle_seconds=5.0)
    scene.ready_policy()
    address = {"podIP": report.address, "podIPs": [{"ip": report.address}]}
    scene.pod("bot-gateway", "bot-gateway-1", scene.RUNNING | address)
    engine(scene, autoscaling={**LOAD, "minReplicas": 0, "idleAfter": "10s"})
    scene.eventually("an HPA", lambda: scene.api.get("HorizontalPodAutoscaler", "bot-engine"))
    assert replicas(scene) == 1
    report.say(role="gateway", sequence=1, level=3, idle_seconds=11.0)
    scene.eventually("no engine is left", lambda: replicas(scene) == 0)
    scene.deployment_ready("bot-engine")
    scene.wait("InferencePolicy", "bot", "Ready", "True", "Asleep")
    report.say(role="gateway", sequence=1, level=3, idle_seconds=0.0)
    scene.eventually("an engine wakes", lambda: replicas(scene) == 1)
    assert scene.api.get("HorizontalPodAutoscaler", "bot-engine")["spec"]["minReplicas"] == 1


def test_a_kind_that_the_cluster_lacks_is_said(scene: Any) -> None:
    scene.ready_policy()
    engine(scene, autoscaling={**LOAD, "scaler": "KEDA", "queuedRequests": 4})
    seen = scene.wait("InferencePolicy", "bot", "AutoscalingFailed", "True", "KEDAMissing")
    assert "KEDA" in seen["message"]
    assert replicas(scene) == 1
