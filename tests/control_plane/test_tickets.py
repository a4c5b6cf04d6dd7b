"""Tickets on a real kube-apiserver: what is recommended validates, what is found is written, only decisions change."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from scenes import Scene

from sixfold_api.modes import Mode
from sixfold_api.policy import InferencePolicySpec
from sixfold_api.ticket import (
    Cause,
    OptimizationTicketSpec,
    OptimizationTicketStatus,
    Phase,
    SinkState,
    SinkStatus,
)
from sixfold_operator.builders.ticket import ticket_manifest
from sixfold_operator.control.recommendations import recommend
from sixfold_operator.control.tickets import Ticket
from sixfold_operator.control.waste import Facts
from sixfold_operator.kube import Kube

GENERATION: dict[str, Any] = {"variantRef": {"name": "chat"}}
SPECULATIVE = {"draftVariantRef": {"name": "tiny"}, "numTokens": 5}
CLASSIFICATION = {"variantRef": {"name": "intent"}, "subgraphs": {"tasks": [{"name": "ner"}], "cacheSize": "8Mi"}}
TICKET = OptimizationTicketSpec.model_validate(
    {
        "policyRef": {"name": "bot"},
        "fingerprint": "0123456789",
        "cause": "RecomputedPrefix",
        "evidence": {"signal": "WastedFlops", "query": "up", "value": "0.8", "threshold": "0.65", "window": "600s"},
        "recommendation": {"summary": "Keep keys and values."},
    }
)
SPECS: list[dict[str, Any]] = [
    {"generation": GENERATION},
    {"generation": GENERATION, "rollbackLevel": 1, "batching": {}},
    {"generation": {**GENERATION, "speculative": SPECULATIVE, "kvCacheReuse": {}}, "batching": {}},
    {"generation": {**GENERATION, "speculative": {**SPECULATIVE, "numTokens": 1, "length": "Fixed"}}},
    {"classification": CLASSIFICATION, "engine": {"replicas": 3}},
    {"classification": {**CLASSIFICATION, "earlyExit": {"rule": "Fixed", "threshold": "0.9"}}},
]


@pytest.mark.parametrize("number", range(len(SPECS)))
def test_every_patch_is_taken_by_the_api(scene: Scene, http: httpx.Client, number: int) -> None:
    document = SPECS[number]
    scene.api.create(
        {
            "apiVersion": "sixfold.dev/v1alpha1",
            "kind": "InferencePolicy",
            "metadata": {"name": "bot"},
            "spec": {"engine": {}, **document},
        }
    )
    live = scene.api.get("InferencePolicy", "bot")
    assert live is not None
    spec = InferencePolicySpec.model_validate(live["spec"])
    facts = Facts("shop", "bot", exit_variants=frozenset({"intent"}), suspended=frozenset({Mode.SAMPLER_PIPELINE}))
    patches = 0
    for cause in Cause:
        found = recommend(cause, spec, facts, "ner" if cause is Cause.MIS_HOT_TASK else None)
        if found.patch is not None:
            patches += 1
            answer = http.patch(
                scene.api.path("InferencePolicy", "bot"),
                params={"dryRun": "All"},
                content=json.dumps(found.patch),
                headers={"Content-Type": "application/merge-patch+json"},
            )
            assert answer.is_success, f"{cause}: {found.patch}: {answer.text}"
            assert answer.json()["spec"] != live["spec"], f"{cause}: {found.patch} changes nothing"
    assert patches


def refused(scene: Scene, name: str, change: dict[str, Any]) -> str:
    """What the API says against a change of a ticket's spec; "" if it takes it."""
    path = f"/apis/sixfold.dev/v1alpha1/namespaces/{scene.api.namespace}/optimizationtickets/{name}"
    headers = {"Content-Type": "application/merge-patch+json"}
    answer = scene.api.http.patch(path, content=json.dumps({"spec": change}), headers=headers)
    return "" if answer.is_success else answer.text


async def test_only_the_decision_of_a_ticket_changes(scene: Scene, kube: Kube) -> None:
    scene.policy()
    policy = scene.api.get("InferencePolicy", "bot")
    assert policy is not None
    found = Ticket("bot-0123456789", TICKET, OptimizationTicketStatus(phase=Phase.OPEN, occurrences=1))
    made = await kube.apply(ticket_manifest(policy, found), force=False)
    sinks = [SinkStatus(name="ops", state=SinkState.DELIVERED, phase=Phase.OPEN, reference="r")]
    status = found.status.model_copy(update={"sinks": sinks}).to_dict()
    keep = {key: made["metadata"][key] for key in ("name", "namespace", "uid")}
    written = await kube.apply_status({**made, "metadata": keep, "status": status})
    assert written["status"]["sinks"][0]["state"] == "Delivered"
    assert not refused(scene, found.name, {"decision": "Approved"})
    assert "only decision may change" in refused(scene, found.name, {"recommendation": {"summary": "another"}})
    again = await kube.apply(ticket_manifest(policy, found), force=False)
    assert again["spec"]["decision"] == "Approved", "the operator leaves a decision alone"
