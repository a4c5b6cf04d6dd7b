"""The committed CRDs: what the models say, and an upgrade in place that keeps what is stored."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import yaml

from sixfold_api.crdgen import crd, write
from sixfold_api.kinds import KINDS, POLICY, Kind

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("folder", ["crds", "helm/sixfold/crd-files"])
def test_no_drift(tmp_path: Path, folder: str) -> None:
    committed = {path.name: path.read_text() for path in (ROOT / folder).glob("*.yaml")}
    fresh = {path.name: path.read_text() for path in write(tmp_path)}
    assert committed == fresh, "run `make crds`"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_the_written_yaml_is_the_document(kind: Kind) -> None:
    """The package writes YAML without a YAML library; a real one reads the same back."""
    assert yaml.safe_load((ROOT / "crds" / f"{kind.plural}.yaml").read_text()) == crd(kind)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_the_crd_is_accepted_as_structural(kubectl, kind: Kind) -> None:
    found = json.loads(kubectl("get", "crd", f"{kind.plural}.sixfold.dev", "-o", "json"))
    conditions = {condition["type"]: condition["status"] for condition in found["status"]["conditions"]}
    assert conditions["NamesAccepted"] == conditions["Established"] == "True"
    assert "NonStructuralSchema" not in conditions


def test_an_upgrade_in_place_keeps_stored_objects(api, kubectl) -> None:
    """An older CRD without streaming and with little of the gateway, an object, then today's CRD over it."""
    older = copy.deepcopy(crd(POLICY))
    spec = older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    for name in ("streaming", "automation", "remediation", "analysis", "canary", "shadow", "tickets", "retryToken"):
        del spec[name]
    del spec["gateway"]["x-kubernetes-validations"]
    for name in ("rateLimit", "tenants", "maxRequestSize", "requestTimeout", "demoPage"):
        del spec["gateway"]["properties"][name]
    del spec["engine"]["x-kubernetes-validations"]
    del spec["engine"]["properties"]["startupDeadline"]
    today = str(ROOT / "crds" / f"{POLICY.plural}.yaml")

    def apply(*arguments: str, stdin: str | None = None) -> None:
        kubectl("apply", "--server-side", "--force-conflicts", *arguments, stdin=stdin)

    def settled(known: bool) -> bool:
        answer = api.create(POLICY, {"generation": {"variantRef": {"name": "chat"}}, "streaming": {"level": 7}})
        return answer.accepted is known

    try:
        apply("-f", "-", stdin=json.dumps(older))
        assert eventually(lambda: settled(known=False))
        stored = {"rollbackLevel": 1, "engine": {"replicas": 2, "strategy": "Auto"}, "gateway": {"replicas": 3}}
        stored["generation"] = {"variantRef": {"name": "chat"}}
        assert api.create(POLICY, stored, "older", dry_run=False).accepted
        before = api.get(POLICY, "older")
    finally:
        apply("-f", today)
    assert eventually(lambda: settled(known=True))
    after = api.get(POLICY, "older")
    assert before["spec"] == stored
    added = {"maxRequestSize": "4Mi", "requestTimeout": "10m", "demoPage": False}
    scalars = {"automation": "Enforce", "remediation": "TicketOnly"}
    engine = {"replicas": 2, "strategy": "Auto", "startupDeadline": "30m"}
    assert after["spec"] == stored | scalars | {"gateway": {"replicas": 3, **added}, "engine": engine}
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert api.patch(POLICY, "older", {"spec": {"streaming": {"level": 7}}}).accepted
    assert api.get(POLICY, "older")["spec"]["streaming"] == {"compression": "Auto", "level": 7}
    api.delete(POLICY, "older")


def eventually(check) -> bool:
    """kube-apiserver swaps the handlers of a changed CRD a moment after it acknowledged the change."""
    return any(check() for _ in range(400))
