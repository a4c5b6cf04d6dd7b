"""Classifiers with exits and task slices, from resources to the pods' configuration and back into statuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sixfold_api.names import config_map_name

pytestmark = pytest.mark.usefixtures("operator")

EXITING = {
    "exitHeads": {"training": {"uri": "pvc://models/reviews/training.jsonl"}, "depths": [2, 4]},
    "calibration": {"uri": "pvc://models/reviews/calibration.jsonl"},
    "evaluation": {"uri": "pvc://models/reviews/heldout.jsonl"},
    "artifact": {"claimName": "models"},
}
TASKS = [
    {"name": "category"},
    {"name": "pos", "task": "TokenClassification", "training": {"uri": "pvc://words/pos.jsonl"}},
]
CHOICE = {
    "depths": [2, 4],
    "thresholds": ["0.93", "0.88"],
    "exitRate": "0.71",
    "meanLayers": "3.4",
    "disagreement": "0.014",
    "disagreementBound": "0.029",
}
NO_EXIT = CHOICE | {"depths": [], "thresholds": [], "exitRate": "0", "meanLayers": "6"}
REPORT = {
    "layers": 6,
    "calibrated": CHOICE,
    "quantile": CHOICE,
    "samples": 2000,
    "meanLayers": "3.5",
    "disagreement": "0.021",
    "accuracy": "0.902",
    "fullAccuracy": "0.904",
    "calibrationError": "0.012",
}
SLICES = [
    {"name": "category", "task": "Classification", "sizeBytes": 8192},
    {"name": "pos", "task": "TokenClassification", "sizeBytes": 4096},
]
CLASSIFICATION = {
    "variantRef": {"name": "mood"},
    "earlyExit": {},
    "subgraphs": {"tasks": [{"name": "pos", "pinned": True}, {"name": "category"}], "cacheSize": "8Mi"},
    "escalate": {"belowConfidence": "0.6", "promptTemplate": "Is this {labels}? {text}"},
}


def stable(scene: Any) -> dict[str, Any]:
    config_map = scene.api.get("ConfigMap", config_map_name("bot"))
    return dict(json.loads(config_map["data"]["config.json"])["stable"])


def mode(scene: Any, name: str) -> dict[str, str]:
    modes = (scene.api.get("InferencePolicy", "bot").get("status") or {}).get("modes", [])
    return next((entry for entry in modes if entry["name"] == name), {"state": "", "reason": ""})


def conditions(scene: Any, kind: str, name: str) -> set[str]:
    return {entry["type"] for entry in scene.api.get(kind, name)["status"]["conditions"]}


def label(scene: Any, *, spec: dict[str, Any] | None = None, **summary: Any) -> None:
    """A policy `bot` that generates with chat and labels with mood, whose preparation left `summary`."""
    scene.claim()
    scene.claim("words")
    scene.variant("chat")
    scene.variant("mood", "Classification", **(EXITING | {"slices": TASKS} if spec is None else spec))
    scene.finish_job("chat", {"facts": scene.FACTS})
    scene.finish_job("mood", {"facts": scene.FACTS, **summary})
    scene.policy(classification=CLASSIFICATION)
    scene.wait("InferencePolicy", "bot", "VariantsReady", "True")


def test_exits_and_slices_from_the_job_to_the_status(scene: Any) -> None:
    scene.claim()
    scene.variant("mood", "Classification", **EXITING, slices=TASKS)
    seen = scene.wait("ModelVariant", "mood", "Ready", "False", "ClaimMissing")
    assert "words" in seen["message"]
    scene.claim("words")
    job = scene.job("mood")
    _, *args = job["spec"]["template"]["spec"]["containers"][0]["args"]
    options = dict(zip(args[::2], args[1::2], strict=True))
    heads, slices = json.loads(options["--exit-heads"]), json.loads(options["--slices"])
    assert heads["depths"] == [2, 4]
    assert heads["maxDisagreement"] == "0.03"
    assert [entry["name"] for entry in slices] == ["category", "pos"]
    scene.finish_job("mood", {"facts": scene.FACTS, "exits": REPORT, "slices": SLICES})
    scene.wait("ModelVariant", "mood", "Ready", "True", "Prepared")
    calibrated = scene.wait("ModelVariant", "mood", "ExitsCalibrated", "True", "Calibrated")
    assert "exit rate 0.71, 3.4 of 6 layers" in calibrated["message"]
    status = scene.api.get("ModelVariant", "mood")["status"]
    assert (status["exits"], status["slices"]) == (REPORT, SLICES)


def test_exits_that_are_never_safe_are_a_warning(scene: Any) -> None:
    label(scene, spec=EXITING, exits=REPORT | {"calibrated": NO_EXIT})
    scene.wait("ModelVariant", "mood", "ExitsCalibrated", "False", "NoSafeExit")
    scene.wait("ModelVariant", "mood", "Ready", "True", "Prepared")
    scene.eventually("the mode doesn't run", lambda: mode(scene, "EarlyExit")["state"] == "Unsupported")
    assert "mood has no exit that disagrees" in mode(scene, "EarlyExit")["reason"]
    scene.eventually("people are warned", lambda: {"NoSafeExit", "NoSuchSlice"} <= scene.warnings())
    allowed = {"classification": {"earlyExit": {"maxDisagreement": "0.1"}}}
    scene.api.patch("InferencePolicy", "bot", {"spec": allowed})
    scene.eventually("more is allowed", lambda: mode(scene, "EarlyExit")["state"] == "Active")
    assert stable(scene)["earlyExit"] == {"rule": "Calibrated", "maxDisagreement": 0.1}


def test_level_two_turns_exits_off_and_keeps_slices_in_memory(scene: Any) -> None:
    label(scene, exits=REPORT, slices=SLICES)
    scene.sequence(3)
    config = stable(scene)
    assert {"EarlyExit", "Subgraphs"} <= set(config["activeModes"])
    assert config["earlyExit"] == {"rule": "Calibrated"}
    subgraphs = {
        "tasks": [{"name": "pos", "pinned": True}, {"name": "category", "pinned": False}],
        "onDemand": True,
        "cacheBytes": 8 * 2**20,
    }
    assert config["classificationSubgraphs"] == subgraphs
    escalate = {"belowConfidence": 0.6, "promptTemplate": "Is this {labels}? {text}", "maxTokens": 128}
    assert config["escalate"] == escalate
    versions = {name: scene.api.get("Deployment", name)["metadata"] for name in ("bot-engine", "bot-gateway")}
    scene.api.patch("InferencePolicy", "bot", {"spec": {"rollbackLevel": 2}})
    scene.sequence(2)
    config = stable(scene)
    assert not {"EarlyExit", "Subgraphs"} & set(config["activeModes"])
    assert "earlyExit" not in config
    assert config["classificationSubgraphs"] == subgraphs | {"onDemand": False}
    assert config["escalate"] == escalate
    scene.wait_generation("InferencePolicy", "bot")
    for name in ("EarlyExit", "Subgraphs"):
        assert mode(scene, name)["state"] == "BelowLevel"
    for name, metadata in versions.items():
        assert scene.api.get("Deployment", name)["metadata"]["resourceVersion"] == metadata["resourceVersion"]
    assert not {"TasksMissing", "EscalationUnused"} & conditions(scene, "InferencePolicy", "bot")


def test_a_classifier_without_exit_heads_goes_on_without_them(scene: Any) -> None:
    label(scene, spec={"slices": [{"name": "pos"}, {"name": "category"}]}, slices=SLICES)
    scene.eventually("the mode doesn't run", lambda: mode(scene, "EarlyExit")["state"] == "Unsupported")
    assert "ModelVariant mood has no exit heads" in mode(scene, "EarlyExit")["reason"]
    assert "earlyExit" not in stable(scene)
    assert mode(scene, "Subgraphs")["state"] == "Active"
    assert "ExitsCalibrated" not in conditions(scene, "ModelVariant", "mood")
    for part in ("engine", "gateway"):
        scene.deployment_ready(f"bot-{part}")
    scene.wait("InferencePolicy", "bot", "Ready", "True")
    scene.api.patch("InferencePolicy", "bot", {"spec": {"classification": {"earlyExit": None}}})
    scene.eventually("nobody asks for exits", lambda: mode(scene, "EarlyExit")["state"] == "Off")


def test_tasks_that_the_variant_lacks(scene: Any) -> None:
    label(scene, exits=REPORT, slices=SLICES[1:])
    missing = scene.wait("InferencePolicy", "bot", "TasksMissing", "True", "NoSuchSlice")
    assert "mood has no slice for category; it has pos" in missing["message"]
    assert mode(scene, "Subgraphs")["state"] == "Active"
    assert scene.api.get("Deployment", "bot-engine") is not None
    offered = {"classification": {"subgraphs": {"tasks": [{"name": "pos"}]}}}
    scene.api.patch("InferencePolicy", "bot", {"spec": offered})
    scene.eventually("it is gone", lambda: "TasksMissing" not in conditions(scene, "InferencePolicy", "bot"))


def test_a_variant_that_labels_tokens_classifies(scene: Any) -> None:
    scene.claim()
    scene.variant("chat")
    scene.variant("words", "TokenClassification")
    for name in ("chat", "words"):
        scene.finish_job(name, {"facts": scene.FACTS})
    scene.policy(classification=CLASSIFICATION | {"variantRef": {"name": "words"}})
    scene.wait("InferencePolicy", "bot", "VariantsReady", "True")
    deployment = scene.eventually("the engine is asked for", lambda: scene.api.get("Deployment", "bot-engine"))
    environment = deployment["spec"]["template"]["spec"]["containers"][0]["env"]
    (value,) = (entry["value"] for entry in environment if entry["name"] == "SIXFOLD_MODELS")
    assert {model["name"]: model["task"] for model in json.loads(value)} == {
        "chat": "Generation",
        "words": "TokenClassification",
    }
    unused = scene.wait("InferencePolicy", "bot", "EscalationUnused", "True", "LabelsTokens")
    assert "words" in unused["message"]
    assert "labels tokens" in mode(scene, "EarlyExit")["reason"]
    assert mode(scene, "Subgraphs")["state"] == "Unsupported"
