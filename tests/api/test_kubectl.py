"""What a person sees through kubectl: documentation, columns, short names, subresources, strictness."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sixfold_api.crdgen import crd
from sixfold_api.kinds import KINDS, POLICY, TICKET, VARIANT, Kind

ROOT = Path(__file__).resolve().parents[2]
SPECS = {
    POLICY: {
        "generation": {"variantRef": {"name": "chat"}},
        "rollbackLevel": 2,
        "automation": "Enforce",
        "remediation": "TicketOnly",
    },
    VARIANT: {
        "source": {"uri": "pvc://models/chat"},
        "task": "Generation",
        "precision": {"scheme": "INT8"},
        "evaluation": {"uri": "pvc://models/heldout.jsonl"},
        "artifact": {"claimName": "models"},
    },
    TICKET: yaml.safe_load((ROOT / "tests" / "api" / "full-ticket.yaml").read_text()),
}
QUALITY = {
    "metric": "perplexity",
    "source": "12.25",
    "prepared": "12.31",
    "loss": "0.49",
    "budget": "1",
    "samples": 128,
    "tries": 1,
}
CHOICE = {
    "depths": [2, 4],
    "thresholds": ["0.93", "0.88"],
    "exitRate": "0.71",
    "meanLayers": "3.4",
    "disagreement": "0.014",
    "disagreementBound": "0.029",
}
EXITS = {
    "layers": 6,
    "calibrated": CHOICE,
    "quantile": CHOICE | {"depths": [], "thresholds": []},
    "samples": 2000,
    "meanLayers": "3.5",
    "disagreement": "0.021",
    "accuracy": "0.902",
    "fullAccuracy": "0.904",
    "calibrationError": "0.012",
}
SLICES = [{"name": "ner", "task": "TokenClassification", "sizeBytes": 2**33}]
READY = {"type": "Ready", "status": "False", "reason": "Unschedulable", "message": "no node has nvidia.com/gpu"}


@pytest.fixture
def example(api) -> Iterator[str]:
    """The name of an object of each kind."""
    for kind, spec in SPECS.items():
        assert api.create(kind, spec, "example", dry_run=False).accepted
    yield "example"
    for kind in KINDS:
        api.delete(kind, "example")


def documented(schema: dict[str, Any], path: str) -> Iterator[tuple[str, str]]:
    """(path for `kubectl explain`, description) of every field."""
    for name, child in schema.get("properties", {}).items():
        yield f"{path}.{name}", child.get("description", "")
        yield from documented(child, f"{path}.{name}")
    if "items" in schema:
        yield from documented(schema["items"], path)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_explain_describes_every_field(kubectl, kind: Kind) -> None:
    schema = crd(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    fields = [*documented(schema["spec"], "spec"), *documented(schema["status"], "status")]
    assert [path for path, description in fields if not description] == []
    for part in ("spec", "status"):
        shown = "".join(kubectl("explain", f"{kind.short_name}.{part}").split())
        assert "".join(schema[part]["description"].split()) in shown
        for path, description in fields:
            if path.count(".") == 1 and path.startswith(part):
                assert "".join(description.split()) in shown


def test_explain_reaches_the_deepest_fields(kubectl) -> None:
    shown = kubectl("explain", "ipol.spec.engine.pod.tolerations.effect")
    assert "Absent matches every effect." in shown
    assert shown.split("ENUM:")[1].split()[:3] == ["NoSchedule", "PreferNoSchedule", "NoExecute"]


def test_columns(api, kubectl, example: str) -> None:
    status = {"effectiveLevel": 1, "engine": {"readyReplicas": 4}, "conditions": [READY]}
    assert api.patch(POLICY, example, {"status": status}, "status").accepted
    header, row = kubectl("get", "ipol").splitlines()
    assert header.split() == ["NAME", "CEILING", "LEVEL", "ENGINES", "READY", "REASON", "AGE"]
    assert row.split()[:6] == ["example", "2", "1", "4", "False", "Unschedulable"]
    assert "no node has nvidia.com/gpu" in kubectl("get", "ipol", "-o", "wide")

    facts = {
        "digest": f"sha256:{'0' * 64}",
        "sizeBytes": 7,
        "parameters": 1_900_000,
        "architecture": "LlamaForCausalLM",
    }
    facts |= {
        "dtype": "bfloat16",
        "contextTokens": 4096,
        "vocabularyTokens": 512,
        "claimName": "models",
        "path": "chat",
    }
    facts |= {"tokenizerFingerprint": f"sha256:{'1' * 64}"}
    answer = api.patch(
        VARIANT,
        example,
        {"status": {"size": "7.1 MiB", "artifact": facts, "quality": QUALITY, "exits": EXITS}},
        "status",
    )
    assert answer.accepted, answer.causes
    header, row = kubectl("get", "mvar").splitlines()
    assert header.split() == ["NAME", "TASK", "SIZE", "PARAMETERS", "READY", "REASON", "AGE"]
    assert row.split()[:5] == ["example", "Generation", "7.1", "MiB", "1900000"]
    header, row = kubectl("get", "mvar", "-o", "wide").splitlines()
    assert header.split()[4:] == ["PRECISION", "LOSS", "EXITS", "READY", "REASON", "MESSAGE", "AGE"]
    assert row.split()[5:8] == ["INT8", "0.49", "0.71"]


@pytest.mark.parametrize("name", ["ipol", "inferencepolicy", "inferencepolicies"])
def test_names_of_policies(kubectl, example: str, name: str) -> None:
    assert kubectl("get", name, "-o", "name").strip() == "inferencepolicy.sixfold.dev/example"


@pytest.mark.parametrize("name", ["mvar", "modelvariant", "modelvariants"])
def test_names_of_variants(kubectl, example: str, name: str) -> None:
    assert kubectl("get", name, "-o", "name").strip() == "modelvariant.sixfold.dev/example"


def test_the_category_lists_all_kinds(kubectl, example: str) -> None:
    assert set(kubectl("get", "sixfold", "-o", "name").split()) == {
        "inferencepolicy.sixfold.dev/example",
        "modelvariant.sixfold.dev/example",
        "optimizationticket.sixfold.dev/example",
    }


def test_unknown_fields_are_errors(kubectl) -> None:
    document = {
        "apiVersion": "sixfold.dev/v1alpha1",
        "kind": "InferencePolicy",
        "metadata": {"name": "typo"},
        "spec": {"generation": {"variantRef": {"name": "chat"}}, "rolbackLevel": 2},
    }
    done = kubectl.run("apply", "-f", "-", stdin=json.dumps(document))
    assert done.returncode != 0
    assert 'unknown field "spec.rolbackLevel"' in done.stderr


def test_a_patch_with_an_unknown_field_warns_and_drops_it(api, kubectl, example: str) -> None:
    done = kubectl.run("patch", "ipol", example, "--type=merge", "-p", '{"spec": {"rolbackLevel": 1}}')
    assert 'unknown field "spec.rolbackLevel"' in done.stderr
    assert api.get(POLICY, example)["spec"] == SPECS[POLICY]


def test_a_level_out_of_range_is_refused_at_the_prompt(kubectl, example: str) -> None:
    done = kubectl.run("patch", "ipol", example, "--type=merge", "-p", '{"spec": {"rollbackLevel": 4}}')
    assert done.returncode != 0
    assert "spec.rollbackLevel in body should be less than or equal to 3" in done.stderr


def test_writes_to_the_spec_leave_the_status_alone(api, example: str) -> None:
    assert api.patch(POLICY, example, {"status": {"effectiveLevel": 1}}, "status").accepted
    before = api.get(POLICY, example)
    assert api.patch(POLICY, example, {"spec": {"rollbackLevel": 0}, "status": {"effectiveLevel": 3}}).accepted
    after = api.get(POLICY, example)
    assert after["status"] == {"effectiveLevel": 1}
    assert after["metadata"]["generation"] == before["metadata"]["generation"] + 1


def test_writes_to_the_status_leave_the_spec_alone(api, example: str) -> None:
    before = api.get(POLICY, example)
    patch = {"spec": {"rollbackLevel": 0}, "status": {"effectiveLevel": 3}}
    assert api.patch(POLICY, example, patch, "status").accepted
    after = api.get(POLICY, example)
    assert after["spec"] == before["spec"]
    assert after["metadata"]["generation"] == before["metadata"]["generation"]


NOW = "2026-01-01T00:00:00Z"
TUNED = {"path": "/generation/speculative/numTokens", "value": "3", "base": "5", "ticket": "t1", "since": NOW}


def test_a_status_survives_the_models(api, example: str) -> None:
    """What the operator writes is stored and parsed whole: nothing is pruned in silence."""
    status = {
        "observedGeneration": 1,
        "effectiveLevel": 3,
        "level": {"target": 3, "reason": "Spec", "since": "2026-01-01T00:00:00Z"},
        "modes": [{"name": "CompressedStreaming", "state": "Active", "reason": ""}],
        "config": {"sequence": 1764489600000, "pods": 5, "applied": 5},
        "engine": {
            "replicas": 1,
            "readyReplicas": 1,
            "selector": "sixfold.dev/policy=example",
            "fullWeights": "Resident",
        },
        "suspended": [{"mode": "Speculative", "reason": "DraftTime", "since": NOW}],
        "tuned": [TUNED],
        "canary": {"tuned": TUNED, "percent": 25, "since": NOW},
        "signals": [{"name": "TTFTP95", "verdict": "Breach", "failures": 2}],
        "history": [{"at": NOW, "decision": "LevelChanged", "reason": "TTFTP95", "message": "2.1 s is over 2 s"}],
        "control": {
            "specHash": "9f2c",
            "ceiling": 3,
            "retryToken": "1",
            "changedAt": NOW,
            "healthySince": NOW,
            "healthySeconds": 60,
            "breaches": [{"subject": "Level/3", "at": NOW}],
            "trial": {"path": TUNED["path"], "previous": "5", "objective": "0.0012", "since": NOW},
            "settling": {"byPolicy": NOW, "byLevel": NOW, "byArm": NOW, "canary": NOW},
        },
        "conditions": [READY | {"observedGeneration": 1, "lastTransitionTime": "2026-01-01T00:00:00Z"}],
    }
    rejected = [{"level": 3, "specHash": "9f2c", "reason": "TTFTP95"}]
    status["level"] |= {"rejected": rejected}
    answer = api.patch(POLICY, example, {"status": POLICY.status.model_validate(status).to_dict()}, "status")
    assert answer.accepted, answer.causes
    assert api.get(POLICY, example)["status"] == status
    assert set(status) == set(
        crd(POLICY)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
    )


def test_a_tickets_status_and_columns(api, kubectl, example: str) -> None:
    status = {
        "phase": "Applied",
        "firstSeen": NOW,
        "lastSeen": NOW,
        "occurrences": 2,
        "healthySince": NOW,
        "sinks": [{"name": "ops", "state": "Failed", "phase": "Open", "reference": "", "message": "HTTP 500"}],
        "conditions": [],
    }
    answer = api.patch(TICKET, example, {"status": TICKET.status.model_validate(status).to_dict()}, "status")
    assert answer.accepted, answer.causes
    assert api.get(TICKET, example)["status"] == status
    header, row = kubectl("get", "oticket").splitlines()
    assert header.split() == ["NAME", "POLICY", "CAUSE", "VALUE", "SAVING", "DECISION", "PHASE", "SEEN", "AGE"]
    assert row.split()[:8] == [
        *("example", "assistant", "RejectedDraft", "0.71", "512.40", "Approved", "Applied", "2"),
    ]


def test_a_variants_status_survives_the_models(api, example: str) -> None:
    facts = {
        "digest": f"sha256:{'0' * 64}",
        "sizeBytes": 1,
        "parameters": 1,
        "architecture": "X",
        "dtype": "int32",
        "contextTokens": 1,
        "vocabularyTokens": 1,
        "tokenizerFingerprint": f"sha256:{'1' * 64}",
        "scheme": "GPTQ",
        "labels": [],
        "claimName": "models",
        "path": "example",
    }
    ratios = {"target": "chat", "latencyRatio": "0.12", "parameterRatio": "0.08", "kl": "0.2"}
    status = {
        "observedGeneration": 1,
        "artifact": facts,
        "size": "1 B",
        "quality": QUALITY | {"kl": "0.003"},
        "draft": ratios | {"warnings": ["KL 0.2 is not below 0.15"]},
        "exits": EXITS,
        "slices": SLICES,
        "jobName": "example-prepare-0",
        "conditions": [READY | {"observedGeneration": 1, "lastTransitionTime": "2026-01-01T00:00:00Z"}],
    }
    answer = api.patch(VARIANT, example, {"status": VARIANT.status.model_validate(status).to_dict()}, "status")
    assert answer.accepted, answer.causes
    assert api.get(VARIANT, example)["status"] == status
    assert set(status) == set(
        crd(VARIANT)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
    )


def test_scale(api, kubectl, example: str) -> None:
    """Absent replicas mean 1. `kubectl scale` sets them all the same; reading /scale works once they are there."""
    assert "replicas" not in api.get(POLICY, example)["spec"].get("engine", {})
    done = kubectl.run("scale", "ipol", example, "--current-replicas=1", "--replicas=2")
    assert 'the spec replicas field ".spec.engine.replicas" does not exist' in done.stderr
    kubectl("scale", "ipol", example, "--replicas=3")
    assert api.get(POLICY, example)["spec"]["engine"]["replicas"] == 3
    engine = {"replicas": 2, "readyReplicas": 1, "selector": "sixfold.dev/policy=example"}
    assert api.patch(POLICY, example, {"status": {"engine": engine}}, "status").accepted
    scale = json.loads(kubectl("get", "--raw", api.path(POLICY, example) + "/scale"))
    assert scale["spec"] == {"replicas": 3}
    assert scale["status"] == {"replicas": 2, "selector": "sixfold.dev/policy=example"}
    assert "should be less than or equal to 1000" in kubectl.run("scale", "ipol", example, "--replicas=1001").stderr
    kubectl("scale", "ipol", example, "--replicas=0")
    assert api.get(POLICY, example)["spec"]["engine"]["replicas"] == 0


def applied(kubectl: Any, manager: str, document: dict[str, Any]) -> None:
    kubectl("apply", "--server-side", f"--field-manager={manager}", "-f", "-", stdin=json.dumps(document))


def test_tasks_of_several_appliers_join_by_name(api, kubectl) -> None:
    """Server-side apply: each owns its own tasks, and taking one back leaves the other's."""

    def policy(*tasks: dict[str, Any]) -> dict[str, Any]:
        classification = {"variantRef": {"name": "intent"}, "subgraphs": {"tasks": list(tasks)}}
        metadata = {"name": "shared", "namespace": "default"}
        spec = {"classification": classification}
        return {"apiVersion": "sixfold.dev/v1alpha1", "kind": "InferencePolicy", "metadata": metadata, "spec": spec}

    def tasks() -> list[dict[str, Any]]:
        return api.get(POLICY, "shared")["spec"]["classification"]["subgraphs"]["tasks"]

    try:
        applied(kubectl, "one", policy({"name": "ner", "pinned": True}))
        applied(kubectl, "two", policy({"name": "topic"}))
        assert tasks() == [{"name": "ner", "pinned": True}, {"name": "topic", "pinned": False}]
        applied(kubectl, "one", policy({"name": "intent"}))
        assert {task["name"] for task in tasks()} == {"topic", "intent"}
    finally:
        kubectl("delete", "ipol", "shared")


def test_the_order_of_slices_is_no_change(api, kubectl) -> None:
    """They are a map by name: the same slices in another order are the same weights."""
    spec = {"source": {"uri": "pvc://models/intent"}, "task": "Classification"}
    spec["slices"] = [{"name": "ner", "task": "TokenClassification"}, {"name": "topic"}]
    assert api.create(VARIANT, spec, "sliced", dry_run=False).accepted
    try:
        for slices, accepted in ((spec["slices"][::-1], True), (spec["slices"][:1], False), ([], False)):
            assert api.patch(VARIANT, "sliced", {"spec": {"slices": slices}}).accepted is accepted
    finally:
        api.delete(VARIANT, "sliced")
