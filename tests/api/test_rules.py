"""Every CEL rule, on its valid and its invalid side, with the message that a person reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from sixfold_api.crdgen import crd
from sixfold_api.kinds import KINDS, POLICY, VARIANT, Kind

COMMIT = "0123456789" * 4
GENERATION = {"variantRef": {"name": "chat"}}
CLASSIFICATION = {"variantRef": {"name": "intent"}}

NAME = "metadata.name must have at most 40 characters: lower-case letters, digits and dashes, a letter first"
NEITHER = "at least one of spec.generation and spec.classification is needed"
OWN_ENGINE = "spec.classification.engine is for policies that generate too; without spec.generation use spec.engine"
GPU_ONLY = "count and resourceName are for type: GPU; remove them or set type: GPU"
KEYLESS = "a toleration without a key needs operator: Exists"
EXISTS_VALUE = "a toleration with operator: Exists takes no value; remove it or set operator: Equal"
NO_EXECUTE = "tolerationSeconds is for effect: NoExecute"
URI = (
    "uri must be hf://org/name@commit with the 40 hex digits of a commit (a branch or tag could move),"
    " or pvc://claim/path"
)
DEADLINE = "deadline must be between 1s and 720h"
NEEDS_CLAIM = "an hf:// source needs artifact.claimName: the claim that the weights are written to"
IN_PLACE = "a pvc:// source is used in place: remove artifact"
CREDENTIALS = "credentialsSecretRef is for hf:// sources: remove it"
IMMUTABLE = "source, task and artifact are immutable: create another ModelVariant and point the policy to it"


def policy(**blocks: Any) -> dict[str, Any]:
    return {"generation": GENERATION, **blocks}


def tolerating(toleration: dict[str, Any]) -> dict[str, Any]:
    return policy(engine={"pod": {"tolerations": [toleration]}})


def from_hub(**fields: Any) -> dict[str, Any]:
    source = {"uri": f"hf://acme/chat@{COMMIT}"}
    return {"source": source, "task": "Generation", "artifact": {"claimName": "models"}, **fields}


def from_claim(uri: str = "pvc://models/chat", **fields: Any) -> dict[str, Any]:
    return {"source": {"uri": uri}, "task": "Generation", **fields}


CASES: list[tuple[Kind, dict[str, Any], str | None]] = [
    (POLICY, {"generation": GENERATION}, None),
    (POLICY, {"classification": CLASSIFICATION}, None),
    (POLICY, {"generation": GENERATION, "classification": CLASSIFICATION}, None),
    (POLICY, {}, NEITHER),
    (POLICY, {"rollbackLevel": 0, "streaming": {}}, NEITHER),
    (POLICY, policy(classification=CLASSIFICATION | {"engine": {"replicas": 2}}), None),
    (POLICY, {"classification": CLASSIFICATION | {"engine": {"replicas": 2}}}, OWN_ENGINE),
    (POLICY, policy(engine={"accelerator": {"type": "CPU"}}), None),
    (POLICY, policy(engine={"accelerator": {"type": "GPU", "count": 2, "resourceName": "amd.com/gpu"}}), None),
    (POLICY, policy(engine={"accelerator": {"type": "CPU", "count": 2}}), GPU_ONLY),
    (POLICY, policy(engine={"accelerator": {"type": "CPU", "resourceName": "amd.com/gpu"}}), GPU_ONLY),
    (POLICY, policy(classification=CLASSIFICATION | {"engine": {"accelerator": {"type": "CPU", "count": 1}}}),
     GPU_ONLY),
    (POLICY, tolerating({"operator": "Exists"}), None),
    (POLICY, tolerating({"key": "gpu", "operator": "Equal", "value": "yes"}), None),
    (POLICY, tolerating({"key": "gpu", "value": "yes", "effect": "NoSchedule"}), None),
    (POLICY, tolerating({"effect": "NoSchedule"}), KEYLESS),
    (POLICY, tolerating({"operator": "Equal", "value": "yes"}), KEYLESS),
    (POLICY, tolerating({"key": "gpu", "operator": "Exists", "value": "yes"}), EXISTS_VALUE),
    (POLICY, tolerating({"key": "gpu", "effect": "NoExecute", "tolerationSeconds": 0}), None),
    (POLICY, tolerating({"key": "gpu", "effect": "NoSchedule", "tolerationSeconds": 5}), NO_EXECUTE),
    (POLICY, tolerating({"key": "gpu", "tolerationSeconds": 5}), NO_EXECUTE),
    (POLICY, policy(gateway={"pod": {"tolerations": [{}]}}), KEYLESS),
    (VARIANT, from_hub(), None),
    (VARIANT, from_hub(credentialsSecretRef={"name": "hub"}), None),
    (VARIANT, from_claim(), None),
    (VARIANT, from_claim("pvc://models.team-a/a/b_c/v1.2"), None),
    (VARIANT, {"source": {"uri": f"hf://acme/chat@{COMMIT}"}, "task": "Generation"}, NEEDS_CLAIM),
    (VARIANT, from_claim(artifact={"claimName": "models"}), IN_PLACE),
    (VARIANT, from_claim(credentialsSecretRef={"name": "hub"}), CREDENTIALS),
    *((VARIANT, from_claim(uri), URI) for uri in (
        "", "s3://bucket/chat", "pvc://models", "pvc://models/", "pvc://models/../etc", "pvc://models/.hidden",
        "pvc:///chat", "pvc://Models/chat", "pvc://models//chat", "pvc://models/chat ", "pvc://models/chat\n",
    )),
    *((VARIANT, from_hub(source={"uri": uri}), URI) for uri in (
        "hf://acme/chat", "hf://acme/chat@main", f"hf://acme/chat@{COMMIT[:-1]}", f"hf://acme/chat@{COMMIT}0",
        f"hf://chat@{COMMIT}", f"hf://acme/chat/extra@{COMMIT}", f"hf://acme/chat@{COMMIT.replace('0', 'A')}",
        f"HF://acme/chat@{COMMIT}",
    )),
    *((VARIANT, from_claim(preparation={"deadline": deadline}), None) for deadline in (
        "1s", "1000ms", "90m", "1h30m", "720h", "719h59m60s",
    )),
    *((VARIANT, from_claim(preparation={"deadline": deadline}), DEADLINE) for deadline in (
        "0s", "999ms", "721h", "720h1ms", "999999h999999h", "0h0m0s",
    )),
    (VARIANT, from_claim(preparation={"pod": {"tolerations": [{"effect": "NoExecute"}]}}), KEYLESS),
]  # fmt: skip


@pytest.mark.parametrize(
    "kind, spec, message", CASES, ids=[f"{index}-{case[2] or 'accepted'}" for index, case in enumerate(CASES)]
)
def test_rules(api, kind: Kind, spec: dict[str, Any], message: str | None) -> None:
    answer = api.create(kind, spec)
    if message is None:
        assert answer.accepted, answer.causes
        kind.spec.model_validate(answer.spec)
        kind.spec.model_validate(spec)
    else:
        assert any(cause.endswith(f": {message}") for cause in answer.causes), answer.causes
        with pytest.raises(ValidationError, match="Value error") as caught:
            kind.spec.model_validate(spec)
        assert message in str(caught.value)


@pytest.mark.parametrize(
    "name, valid",
    [
        ("a", True),
        ("support-bot-2", True),
        ("a" * 40, True),
        ("a" * 41, False),
        ("2fast", False),
        ("with.dot", False),
    ],
)
def test_names(api, name: str, valid: bool) -> None:
    for kind, spec in ((POLICY, policy()), (VARIANT, from_claim())):
        answer = api.create(kind, spec, name)
        assert answer.accepted is valid, answer.causes
        assert valid or any(cause.endswith(f": {NAME}") for cause in answer.causes)


CHANGES = [
    ({"source": {"uri": f"hf://acme/chat@{COMMIT[::-1]}"}}, IMMUTABLE),
    ({"task": "Classification"}, IMMUTABLE),
    ({"artifact": {"claimName": "elsewhere"}}, IMMUTABLE),
    ({"source": {"uri": "pvc://models/chat"}, "artifact": None}, IMMUTABLE),
    ({"preparation": {"deadline": "2h"}}, None),
    ({"credentialsSecretRef": {"name": "another"}}, None),
    ({"credentialsSecretRef": None}, None),
]


@pytest.mark.parametrize("change, message", CHANGES)
def test_what_shapes_the_artifact_is_immutable(api, change: dict[str, Any], message: str | None) -> None:
    assert api.create(VARIANT, from_hub(), "immutable", dry_run=False).accepted
    try:
        answer = api.patch(VARIANT, "immutable", {"spec": change})
        assert answer.accepted is (message is None), answer.causes
        assert message is None or any(cause.endswith(f": {message}") for cause in answer.causes)
    finally:
        api.delete(VARIANT, "immutable")


def test_every_rule_has_its_case() -> None:
    tested = {NAME, IMMUTABLE} | {case[2] for case in CASES}
    for kind in KINDS:
        for message in _messages(crd(kind)):
            if not message.startswith("each key must"):  # test_bounds.py has these
                assert message in tested


def _messages(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        yield from (rule["message"] for rule in node.get("x-kubernetes-validations", ()))
        for value in node.values():
            yield from _messages(value)
    elif isinstance(node, list):
        for item in node:
            yield from _messages(item)
