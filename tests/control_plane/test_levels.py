"""From a patch of the level to what pods are told and what they report, with the operator as a process."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("operator")


def test_what_runs_keeps_running_when_the_variant_is_exchanged_for_a_bad_one(scene: Any) -> None:
    scene.ready_policy()
    before = scene.api.get("Deployment", "bot-engine")
    scene.api.patch(
        "InferencePolicy", "bot", {"spec": {"generation": {"variantRef": {"name": "gone"}}, "rollbackLevel": 1}}
    )
    scene.wait("InferencePolicy", "bot", "VariantsReady", "False", "VariantMissing")
    assert scene.api.get("Deployment", "bot-engine")["spec"] == before["spec"]
    config = json.loads(scene.api.get("ConfigMap", "bot-runtime")["data"]["config.json"])
    assert config["stable"]["level"] == 1  # levels still work


def test_a_level_reaches_config_map_and_pods_without_rolling_them(scene: Any) -> None:
    scene.ready_policy()
    scene.pod("bot-engine", "bot-engine-1", scene.RUNNING)
    scene.pod("bot-gateway", "bot-gateway-1", scene.RUNNING)
    api = scene.api
    generation = api.get("Deployment", "bot-engine")["metadata"]["generation"]
    first = json.loads(api.get("ConfigMap", "bot-runtime")["data"]["config.json"])
    api.patch("InferencePolicy", "bot", {"spec": {"rollbackLevel": 0}})

    def sequences() -> set[str]:
        config = json.loads(api.get("ConfigMap", "bot-runtime")["data"]["config.json"])
        if config["stable"]["level"] != 0:
            return set()
        assert config["sequence"] > first["sequence"]
        annotations = [
            pod["metadata"].get("annotations", {}) for pod in api.list("Pod") if "bot" in pod["metadata"]["name"]
        ]
        told = {annotation.get("sixfold.dev/config-sequence") for annotation in annotations}
        return told if told == {str(config["sequence"])} else set()

    scene.eventually("both pods are annotated with the new sequence", sequences)
    assert api.get("Deployment", "bot-engine")["metadata"]["generation"] == generation
    scene.wait_generation("InferencePolicy", "bot")
    seen = scene.wait("InferencePolicy", "bot", "ConfigApplied", "Unknown", "PodsUnreachable")
    assert "/state" in seen["message"]
    status = api.get("InferencePolicy", "bot")["status"]
    assert status["level"]["target"] == 0
    assert status["config"]["pods"] == 2
    assert status["config"]["applied"] == 0
    assert {mode["name"]: mode["state"] for mode in status["modes"]}["CompressedStreaming"] == "BelowLevel"
    assert any(event["reason"] == "LevelChanged" for event in api.list("Event"))


def test_changes_that_cross_a_reconcile_are_never_lost(scene: Any) -> None:
    """Patches land while statuses are being written; each time the last one wins."""
    scene.ready_policy()
    for _ in range(8):
        for level in (0, 3, 1, 2):
            scene.api.patch("InferencePolicy", "bot", {"spec": {"rollbackLevel": level}})
        scene.wait_generation("InferencePolicy", "bot")
        assert scene.api.get("InferencePolicy", "bot")["status"]["level"]["target"] == 2


def test_what_pods_report_reaches_the_status(scene: Any, pod_reports: Any) -> None:
    """Pods answer on /state with the runtime's own model; the last one to apply a sequence decides the level."""
    scene.ready_policy()
    api = scene.api
    reports = {name: pod_reports(port) for name, port in (("bot-engine", 8001), ("bot-gateway", 8000))}
    for deployment, report in reports.items():
        report.say(sequence=1, level=3)
        scene.pod(
            deployment,
            f"{deployment}-1",
            {**scene.RUNNING, "podIP": report.address, "podIPs": [{"ip": report.address}]},
        )
    api.patch("InferencePolicy", "bot", {"spec": {"rollbackLevel": 1}})
    sequence = scene.sequence(level=1)
    scene.wait("InferencePolicy", "bot", "ConfigApplied", "False", "Waiting")
    reports["bot-engine"].say(sequence=sequence, level=1)
    scene.eventually("one pod has it", lambda: api.get("InferencePolicy", "bot")["status"]["config"]["applied"] == 1)
    assert api.get("InferencePolicy", "bot")["status"]["effectiveLevel"] == 3, (
        "pods differ: the last common level stays"
    )
    reports["bot-gateway"].say(sequence=sequence, level=1)
    scene.wait("InferencePolicy", "bot", "ConfigApplied", "True", "Applied")
    status = api.get("InferencePolicy", "bot")["status"]
    assert status["effectiveLevel"] == 1
    assert status["config"] == {"sequence": sequence, "pods": 2, "applied": 2}
    reports["bot-engine"].say(sequence=sequence, level=1, config_error="stable.level: Input should be less than 4")
    api.patch("Pod", "bot-engine-1", {"metadata": {"labels": {"touched": "yes"}}})
    seen = scene.wait("InferencePolicy", "bot", "ConfigApplied", "False", "ConfigRejected")
    assert "Input should be less than 4" in seen["message"]
    unsupported = {"CompressedStreaming": "the image has no zstd"}
    reports["bot-engine"].say(sequence=sequence, level=1)
    reports["bot-gateway"].say(sequence=sequence, level=1, unsupported=unsupported)
    api.patch("InferencePolicy", "bot", {"spec": {"rollbackLevel": 3}})

    def mode() -> bool:
        modes = api.get("InferencePolicy", "bot")["status"]["modes"]
        (entry,) = (mode for mode in modes if mode["name"] == "CompressedStreaming")
        return entry["state"] == "Unsupported" and "no zstd" in entry["reason"]

    scene.eventually("the mode is reported as unsupported", mode)


def test_a_config_map_that_was_deleted_never_takes_pods_back(scene: Any) -> None:
    scene.ready_policy()
    first = json.loads(scene.api.get("ConfigMap", "bot-runtime")["data"]["config.json"])["sequence"]
    scene.api.delete("ConfigMap", "bot-runtime")
    back = scene.eventually("the ConfigMap is back", lambda: scene.api.get("ConfigMap", "bot-runtime"))
    assert json.loads(back["data"]["config.json"])["sequence"] > first
