"""Classification that stops early, and tasks that load only what they need, from the variant to the metrics."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable

import httpx
import pytest
from levels import LevelMeter
from stack import JOURNEY_KEY, TEXTS, Cluster, condition, model_folders, pod_metrics, wait_until

TEXT = "A moving, funny and beautifully acted film."
DEPTH = re.compile(r'^sixfold_exit_total\{.*depth="(\d+)".*\} ([0-9.e+]+)$', re.MULTILINE)


def held_out(count: int) -> list[str]:
    lines = (model_folders()["reviews"] / "heldout.jsonl").read_text().splitlines()[:count]
    return [json.loads(line)["text"] for line in lines]


async def classify(gateway: str, texts: Iterable[str], task: str = "") -> httpx.Response:
    headers = {"Authorization": f"Bearer {JOURNEY_KEY}"} | ({"X-Task": task} if task else {})
    async with httpx.AsyncClient(base_url=gateway, timeout=60, headers=headers) as http:
        return await http.post("/v1/classify", json={"model": "assistant", "input": list(texts)})


def test_the_variant_says_what_exits_save(cluster: Cluster, namespace: str) -> None:
    """The Job trained and calibrated the heads; its report stands in the status, with the bound that was kept."""
    variant = cluster.get(namespace, "mvar", "film-sentiment")
    assert variant is not None
    exits = variant["status"]["exits"]
    assert condition(variant, "ExitsCalibrated")["status"] == "True"
    assert exits["calibrated"]["depths"]
    assert float(exits["meanLayers"]) < exits["layers"]
    assert float(exits["calibrated"]["disagreementBound"]) <= float(variant["spec"]["exitHeads"]["maxDisagreement"])
    assert float(exits["disagreement"]) <= float(exits["calibrated"]["disagreementBound"])
    assert {entry["name"] for entry in variant["status"]["slices"]} == {"category", "pos"}


async def test_sure_texts_leave_early_and_level_2_turns_it_off(
    cluster: Cluster, namespace: str, gateway: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same texts at level 3 and 2: fewer layers, nearly the same labels, and the metrics tell."""
    texts = held_out(200)
    meter = LevelMeter(cluster, namespace, "assistant")
    await asyncio.to_thread(meter.move, 3)
    early = (await classify(gateway, texts)).raise_for_status().json()["data"]
    exits = {depth: float(count) for depth, count in DEPTH.findall(pod_metrics(cluster, namespace, "classifier"))}
    await asyncio.to_thread(meter.move, 2)
    full = (await classify(gateway, texts)).raise_for_status().json()["data"]
    await asyncio.to_thread(meter.move, 3)
    layers = max(item["layers"] for item in full)
    mean = sum(item["layers"] for item in early) / len(early)
    differ = sum(a["label"] != b["label"] for a, b in zip(early, full, strict=True))
    with capsys.disabled():
        print(f"\nearly exit: {mean:.2f} of {layers} layers on average, {differ} of {len(texts)} labels differ")
    assert any(item["exited"] for item in early)
    assert not any(item["exited"] for item in full)
    assert all(item["layers"] == layers for item in full)
    assert mean < layers
    assert differ <= 0.06 * len(texts)
    assert sum(count for depth, count in exits.items() if int(depth) < layers) > 0


async def test_tasks_share_the_trunk(cluster: Cluster, namespace: str, gateway: str) -> None:
    """X-Task chooses a slice, a cold one is loaded for its first request, an unknown one is refused with the list."""
    category = (await classify(gateway, ["a large cat with a tawny coat and black stripes"], "category")).json()
    assert category["data"][0]["task"] == "category"
    words = (await classify(gateway, ["The old dog quickly ran home"], "pos")).json()["data"][0]["tokens"]
    assert [word["text"] for word in words] == ["The", "old", "dog", "quickly", "ran", "home"]
    unknown = await classify(gateway, [TEXT], "poetry")
    assert unknown.status_code == 404
    assert "category" in unknown.json()["error"]["message"]
    metrics = pod_metrics(cluster, namespace, "classifier")
    assert re.search(r'sixfold_slice_loads_total\{[^}]*task="category"', metrics)
    assert re.search(r'sixfold_slice_resident_bytes\{[^}]*task="pos"[^}]*\} [1-9]', metrics)


async def test_what_is_unsure_is_escalated(cluster: Cluster, namespace: str, gateway: str) -> None:
    """A text under the confidence gets an answer of the generating model beside its label; the others don't."""
    cluster.patch(
        namespace, "ipol", "assistant", {"spec": {"classification": {"escalate": {"belowConfidence": "0.999999"}}}}
    )
    try:

        def escalated() -> bool:
            item = asyncio.run(classify(gateway, [TEXT])).raise_for_status().json()["data"][0]
            return bool(item.get("escalated") and item["answer"] and item["label"])

        await asyncio.to_thread(wait_until, "the text is escalated", escalated, 30)
    finally:
        cluster.patch(
            namespace, "ipol", "assistant", {"spec": {"classification": {"escalate": {"belowConfidence": "0.55"}}}}
        )


def test_exit_heads_that_cannot_be_made_say_why(cluster: Cluster, namespace: str) -> None:
    """Labels that the classifier doesn't have: refused with file and line, and what serves goes on."""
    text = {"uri": "pvc://models/text/heldout.jsonl"}
    assert (TEXTS / "heldout.jsonl").exists()
    spec = {
        "task": "Classification",
        "source": {"uri": "pvc://models/sentiment"},
        "exitHeads": {"training": text},
        "calibration": {"uri": "pvc://models/text/calibration.jsonl"},
        "evaluation": {"uri": "pvc://models/reviews/heldout.jsonl"},
        "artifact": {"claimName": "models"},
    }
    metadata = {"name": "unlabelled"}
    cluster.apply(
        namespace,
        {"apiVersion": "sixfold.dev/v1alpha1", "kind": "ModelVariant", "metadata": metadata, "spec": spec},
    )

    def refused() -> bool:
        seen = condition(cluster.get(namespace, "mvar", "unlabelled"), "Prepared")
        return seen["status"] == "False" and "heldout.jsonl" in seen.get("message", "")

    wait_until("Prepared is False and names the file", refused, 120)
    cluster.kubectl("delete", "mvar", "-n", namespace, "unlabelled")
