"""Variants made from variants, quantised weights and drafts, from resources to engine pods and back into statuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sixfold_api.names import config_map_name

pytestmark = pytest.mark.usefixtures("operator")

TEXT = {"uri": "pvc://models/text/heldout.jsonl"}
INT4 = {
    "source": {"variantRef": {"name": "chat"}},
    "precision": {"scheme": "GPTQ", "bits": 4, "groupSize": 32},
    "calibration": {"uri": "pvc://models/text/calibration.jsonl"},
    "evaluation": TEXT,
    "artifact": {"claimName": "models"},
}
DRAFT = {"draftFor": {"name": "chat"}, "evaluation": TEXT}
QUALITY = {
    "metric": "perplexity",
    "source": "12.25",
    "prepared": "12.31",
    "loss": "0.49",
    "budget": "1",
    "samples": 64,
    "tries": 1,
}
COMPARED = {"target": "chat", "latencyRatio": "0.12", "parameterRatio": "0.08", "kl": "0.11"}
GENERATION = {
    "variantRef": {"name": "chat"},
    "quantized": {"variantRef": {"name": "chat-int4"}},
    "speculative": {"draftVariantRef": {"name": "chat-draft"}, "numTokens": 8},
    "samplerPipeline": {},
}


def args_of(job: dict[str, Any]) -> dict[str, str]:
    _, *args = job["spec"]["template"]["spec"]["containers"][0]["args"]
    return dict(zip(args[::2], args[1::2], strict=True))


def served_by(scene: Any) -> dict[str, Any]:
    """The model that the engine's Deployment asks for."""
    deployment = scene.api.get("Deployment", "bot-engine")
    if deployment is None:
        return {}
    environment = deployment["spec"]["template"]["spec"]["containers"][0]["env"]
    (value,) = (entry["value"] for entry in environment if entry["name"] == "SIXFOLD_MODELS")
    (model,) = json.loads(value)
    return dict(model)


def stable(scene: Any) -> dict[str, Any]:
    config_map = scene.api.get("ConfigMap", config_map_name("bot"))
    return dict(json.loads(config_map["data"]["config.json"])["stable"])


def mode(scene: Any, name: str) -> dict[str, str]:
    modes = scene.api.get("InferencePolicy", "bot")["status"]["modes"]
    return next(entry for entry in modes if entry["name"] == name)


def prepare_all(scene: Any, draft: dict[str, Any] | None = None) -> None:
    """chat, chat-int4 and chat-draft, each prepared; `draft` joins the facts of the draft."""
    scene.claim()
    scene.variant("chat")
    scene.variant("chat-int4", **INT4)
    scene.variant("chat-draft", **DRAFT)
    scene.finish_job("chat", {"facts": scene.FACTS})
    scene.finish_job("chat-int4", {"facts": scene.FACTS | {"scheme": "GPTQ"}, "quality": QUALITY})
    scene.finish_job("chat-draft", {"facts": scene.FACTS | (draft or {}), "draft": COMPARED})


def test_a_variant_waits_for_the_one_that_it_is_made_from(scene: Any) -> None:
    scene.claim()
    scene.variant("chat-int4", **INT4)
    scene.variant("chat-draft", **DRAFT)
    for name in ("chat-int4", "chat-draft"):
        assert "chat" in scene.wait("ModelVariant", name, "Ready", "False", "VariantMissing")["message"]
    scene.variant("chat")
    for name in ("chat-int4", "chat-draft"):
        scene.wait("ModelVariant", name, "Ready", "False", "VariantNotReady")
    scene.finish_job("chat", {"facts": scene.FACTS})
    quantise, compare = scene.job("chat-int4"), scene.job("chat-draft")
    assert args_of(quantise)["--source"] == "pvc://models/chat"
    assert args_of(quantise)["--artifact-path"] == "chat-int4"
    assert args_of(compare)["--source"] == "pvc://models/chat-draft"
    assert args_of(compare)["--draft-for"] == "pvc://models/chat"
    scene.finish_job("chat-int4", {"facts": scene.FACTS, "quality": QUALITY})
    scene.finish_job("chat-draft", {"facts": scene.FACTS, "draft": COMPARED | {"kl": "0.4", "warnings": ["KL 0.4"]}})
    scene.wait("ModelVariant", "chat-int4", "Ready", "True", "Prepared")
    within = scene.wait("ModelVariant", "chat-int4", "WithinBudget", "True")
    assert "0.49% lost of at most 1%" in within["message"]
    unlike = scene.wait("ModelVariant", "chat-draft", "DraftCompatible", "False", "DraftUnlike")
    assert "0.4" in unlike["message"]
    scene.wait("ModelVariant", "chat-draft", "Ready", "True", "Prepared")
    assert scene.api.get("ModelVariant", "chat-int4")["status"]["quality"] == QUALITY
    assert scene.api.get("ModelVariant", "chat-draft")["status"]["draft"]["kl"] == "0.4"
    scene.eventually(
        "people are warned", lambda: any(event["reason"] == "DraftUnlike" for event in scene.api.list("Event"))
    )


def test_every_claim_that_a_preparation_names_must_be_there(scene: Any) -> None:
    scene.claim()
    scene.variant("chat")
    scene.variant("small", **{**INT4, "calibration": {"uri": "pvc://texts/calibration.jsonl"}})
    scene.finish_job("chat", {"facts": scene.FACTS})
    seen = scene.wait("ModelVariant", "small", "Ready", "False", "ClaimMissing")
    assert "texts" in seen["message"]
    scene.claim("texts")
    assert scene.job("small")


def test_weights_over_their_budget_are_not_served_and_what_runs_stays(scene: Any) -> None:
    scene.ready_policy()
    before = scene.api.get("Deployment", "bot-engine")["spec"]
    scene.variant("chat-int4", **INT4)
    quality = QUALITY | {"loss": "3.5", "tries": 4}
    failure = {"reason": "OverBudget", "message": "3.5% of perplexity lost at 8 bits, 1% may be"}
    job = scene.finish_job("chat-int4", {"failure": failure, "quality": quality}, ok=False)
    ready = scene.wait("ModelVariant", "chat-int4", "Ready", "False", "OverBudget")
    assert job["metadata"]["name"] in ready["message"]
    within = scene.wait("ModelVariant", "chat-int4", "WithinBudget", "False", "OverBudget")
    assert "after trying 4 precisions" in within["message"]
    quantized = {"quantized": {"variantRef": {"name": "chat-int4"}}}
    scene.api.patch("InferencePolicy", "bot", {"spec": {"generation": quantized}})
    seen = scene.wait("InferencePolicy", "bot", "VariantsReady", "False", "VariantNotReady")
    assert "OverBudget" in seen["message"]
    scene.wait_generation("InferencePolicy", "bot")
    assert scene.api.get("Deployment", "bot-engine")["spec"] == before


def test_levels_of_a_policy_with_every_mode_touch_the_config_map_only(scene: Any) -> None:
    prepare_all(scene)
    scene.policy(generation=GENERATION)
    model = scene.eventually("the engine is asked for", lambda: served_by(scene))
    assert model["quantized"]["name"] == "chat-int4"
    assert model["quantized"]["path"] == "/claims/models/chat-int4"
    assert (model["draft"]["name"], model["draft"]["device"], model["fullWeights"]) == ("chat-draft", "Auto", "Auto")
    versions = {name: scene.api.get("Deployment", name)["metadata"] for name in ("bot-engine", "bot-gateway")}
    for level, active in ((0, set()), (1, {"Quantized"}), (2, {"Quantized", "Speculative"})):
        scene.api.patch("InferencePolicy", "bot", {"spec": {"rollbackLevel": level}})
        scene.sequence(level)
        config = stable(scene)
        assert set(config["activeModes"]) == active
        assert ("speculative" in config) is (level == 2)
    assert stable(scene)["speculative"]["numTokens"] == 8
    scene.api.patch("InferencePolicy", "bot", {"spec": {"rollbackLevel": 3}})
    scene.sequence(3)
    assert stable(scene)["samplerPipeline"] == {"workers": 1, "overlap": "Auto"}
    scene.wait_generation("InferencePolicy", "bot")
    for name, metadata in versions.items():
        assert scene.api.get("Deployment", name)["metadata"]["resourceVersion"] == metadata["resourceVersion"]


def test_another_draft_length_rolls_nothing_but_another_draft_does(scene: Any) -> None:
    prepare_all(scene)
    scene.policy(generation=GENERATION)
    scene.eventually("the engine is asked for", lambda: served_by(scene))
    template = scene.api.get("Deployment", "bot-engine")["spec"]["template"]
    scene.api.patch("InferencePolicy", "bot", {"spec": {"generation": {"speculative": {"numTokens": 3}}}})
    scene.eventually("the pods are told", lambda: stable(scene)["speculative"]["numTokens"] == 3)
    scene.wait_generation("InferencePolicy", "bot")
    assert scene.api.get("Deployment", "bot-engine")["spec"]["template"] == template
    scene.api.patch("InferencePolicy", "bot", {"spec": {"engine": {"fullWeights": "Swap"}}})
    scene.eventually("the engine swaps", lambda: served_by(scene)["fullWeights"] == "Swap")
    scene.api.patch("InferencePolicy", "bot", {"spec": {"generation": {"speculative": None}}})
    scene.eventually("the draft is gone", lambda: "draft" not in served_by(scene))


def test_a_draft_with_another_tokenizer_is_left_out_and_the_policy_goes_on(scene: Any) -> None:
    prepare_all(scene, draft={"tokenizerFingerprint": "sha256:" + "f" * 64})
    scene.policy(generation=GENERATION)
    model = scene.eventually("the engine is asked for", lambda: served_by(scene))
    assert "draft" not in model
    assert model["quantized"]["name"] == "chat-int4"
    scene.wait("InferencePolicy", "bot", "VariantsReady", "True", "Ready")
    speculative = mode(scene, "Speculative")
    assert speculative["state"] == "Unsupported"
    assert "chat-draft" in speculative["reason"]
    assert speculative["reason"].count("chat") == 2
    assert "speculative" not in stable(scene)
    assert mode(scene, "Quantized")["state"] == "Active"


def test_a_draft_whose_preparation_found_another_tokenizer(scene: Any) -> None:
    scene.ready_policy()
    scene.variant("chat-draft", **DRAFT)
    failure = {"reason": "TokenizerMismatch", "message": "chat-draft has 512 tokens, chat has 1024"}
    scene.finish_job("chat-draft", {"failure": failure}, ok=False)
    scene.wait("ModelVariant", "chat-draft", "Ready", "False", "TokenizerMismatch")
    seen = scene.wait("ModelVariant", "chat-draft", "DraftCompatible", "False", "TokenizerMismatch")
    assert "512 tokens" in seen["message"]
    speculative = {"speculative": {"draftVariantRef": {"name": "chat-draft"}}}
    scene.api.patch("InferencePolicy", "bot", {"spec": {"generation": speculative}})
    scene.eventually("the mode is unsupported", lambda: mode(scene, "Speculative")["state"] == "Unsupported")
    scene.wait("InferencePolicy", "bot", "Ready", "True")
    assert "draft" not in served_by(scene)


def test_quantised_weights_of_another_model_are_refused(scene: Any) -> None:
    prepare_all(scene)
    scene.variant("other", **{**INT4, "source": {"uri": "pvc://models/other"}})
    facts = scene.FACTS | {"tokenizerFingerprint": "sha256:" + "f" * 64}
    scene.finish_job("other", {"facts": facts, "quality": QUALITY})
    scene.policy(generation={**GENERATION, "quantized": {"variantRef": {"name": "other"}}})
    seen = scene.wait("InferencePolicy", "bot", "VariantsReady", "False", "TokenizerMismatch")
    assert "other and chat" in seen["message"]
    scene.api.patch(
        "InferencePolicy", "bot", {"spec": {"generation": {"quantized": {"variantRef": {"name": "chat-draft"}}}}}
    )
    scene.wait("InferencePolicy", "bot", "VariantsReady", "False", "NotQuantized")
    assert scene.api.get("Deployment", "bot-engine") is None


def test_what_pods_say_about_their_weights_reaches_the_status(scene: Any, pod_reports: Any) -> None:
    prepare_all(scene)
    scene.policy(generation=GENERATION)
    report = pod_reports(8001)
    chat = {"name": "chat", "task": "Generation", "ready": True, "fullWeights": "Swap", "weights": "chat"}
    ill = {"weightsError": "/claims/models/chat-int4: cut off", "draftShortened": "3 of 8: 20 MiB are free"}
    report.say(sequence=1, level=3, models=[chat | ill])
    scene.pod(
        "bot-engine",
        "bot-engine-1",
        {**scene.RUNNING, "podIP": report.address, "podIPs": [{"ip": report.address}]},
    )
    failed = scene.wait("InferencePolicy", "bot", "WeightsFailed", "True", "LoadFailed")
    assert "cut off" in failed["message"]
    assert "chat goes on answering" in failed["message"]
    shortened = scene.wait("InferencePolicy", "bot", "DraftShortened", "True", "MemoryShort")
    assert "3 of 8" in shortened["message"]
    assert scene.api.get("InferencePolicy", "bot")["status"]["engine"]["fullWeights"] == "Swap"
    scene.eventually("people are warned", lambda: {"LoadFailed", "MemoryShort"} <= scene.warnings())
    report.say(sequence=scene.sequence(3), level=3, models=[chat | {"weights": "chat-int4"}])

    def gone() -> bool:
        conditions = scene.api.get("InferencePolicy", "bot")["status"]["conditions"]
        return not {"WeightsFailed", "DraftShortened"} & {entry["type"] for entry in conditions}

    scene.eventually("both conditions go by themselves", gone)
