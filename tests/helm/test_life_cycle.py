"""From the previous version of the chart to this one and back, and what is left when it is uninstalled."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
PREVIOUS = HERE / "previous" / "sixfold-0.1.0.tgz"
FULL = HERE.parent / "api"
KINDS = {"policy": "InferencePolicy", "variant": "ModelVariant"}
CRDS = [f"crd/{plural}.sixfold.dev" for plural in ("inferencepolicies", "modelvariants", "optimizationtickets")]
EVERYTHING = (
    *("--set=redis.enabled=true", "--set=redis.urlSecret.namespaces={default}", "--set=prometheus.enabled=true"),
    *("--set=alerts.enabled=true", "--set=dashboards.enabled=true", "--set=operator.replicas=2"),
    *("--set=signals[0].name=TTFTP95", "--set=signals[0].threshold=1"),
)
Kubectl = Callable[..., str]


def write(kubectl: Kubectl, name: str, folder: Path, prefix: str = "") -> None:
    """Policies and variants with every field that the CRDs of a version know, and what an operator says about them."""
    for part, kind in KINDS.items():
        specs = yaml.safe_load_all((folder / f"{prefix}{part}.yaml").read_text())
        head = {"apiVersion": "sixfold.dev/v1alpha1", "kind": kind}
        metadata = [{"name": f"{name}-{number}", "labels": {"version": name}} for number in range(9)]
        items = [{**head, "metadata": entry, "spec": spec} for entry, spec in zip(metadata, specs, strict=False)]
        manifests = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
        kubectl("apply", "--server-side", "--validate=strict", "-f", "-", stdin=manifests)
        status = json.dumps({"status": {"observedGeneration": 1}})
        kubectl("patch", "-f", "-", "--subresource=status", "--type=merge", "-p", status, stdin=manifests)


def read(kubectl: Kubectl, name: str) -> dict[str, list[Any]]:
    """These objects without what every write of the API changes."""
    found = {kind: json.loads(kubectl("get", kind, "-l", f"version={name}", "-o", "json")) for kind in KINDS.values()}
    for manifest in (manifest for listed in found.values() for manifest in listed["items"]):
        for field in ("resourceVersion", "managedFields"):
            manifest["metadata"].pop(field, None)
    return {kind: listed["items"] for kind, listed in found.items()}


def covers(now: Any, before: Any) -> bool:
    """Whether all that there was is still there: a newer schema adds defaults."""
    if isinstance(before, dict):
        return isinstance(now, dict) and all(key in now and covers(now[key], before[key]) for key in before)
    if isinstance(before, list):
        return isinstance(now, list) and len(now) == len(before) and all(map(covers, now, before))
    return bool(now == before)


def of_the_release(kubectl: Kubectl) -> dict[str, str]:
    """uid of each object of the release, by kind, namespace and name."""
    kinds = "deployment,service,serviceaccount,secret,configmap,clusterrole,clusterrolebinding,networkpolicy,crd"
    found = json.loads(kubectl("get", kinds, "-A", "-l", "app.kubernetes.io/instance=sixfold", "-o", "json"))["items"]
    keys = [(item["kind"], item["metadata"].get("namespace", ""), item["metadata"]["name"]) for item in found]
    return {"/".join(key): item["metadata"]["uid"] for key, item in zip(keys, found, strict=True)}


def eventually(check: Callable[[], None]) -> None:
    """kube-apiserver swaps the handlers of a changed CRD a moment after it acknowledged the change."""
    for _ in range(60):
        try:
            return check()
        except AssertionError as error:
            last = error
    raise last


def test_to_this_version_and_back_and_here_again(release: Any, helm: Any, kubectl: Kubectl) -> None:
    redis = EVERYTHING[:2]
    release(*redis, chart=PREVIOUS)
    eventually(lambda: write(kubectl, "old", HERE / "previous"))
    old, objects = read(kubectl, "old"), of_the_release(kubectl)
    password = kubectl("-n", "sixfold-system", "get", "secret", "sixfold-redis", "-o", "jsonpath={.data.password}")

    release(*EVERYTHING)
    assert objects.items() <= of_the_release(kubectl).items(), "an upgrade replaces nothing"
    eventually(lambda: write(kubectl, "new", FULL, "full-"))
    new = read(kubectl, "new")
    assert covers(read(kubectl, "old"), old)

    helm("rollback", "sixfold", "1")
    left = of_the_release(kubectl)
    left.pop("CustomResourceDefinition//optimizationtickets.sixfold.dev")
    assert left == objects, "what the previous version doesn't know has gone, but for CRDs; the rest is the same"

    def has_the_previous_schema() -> None:
        assert not covers(read(kubectl, "new"), new)

    eventually(has_the_previous_schema)
    assert read(kubectl, "old") == old
    eventually(lambda: write(kubectl, "old", HERE / "previous"))

    release(*EVERYTHING)
    eventually(lambda: write(kubectl, "newer", FULL, "full-"))
    assert covers(read(kubectl, "old"), old)
    assert read(kubectl, "new") == new, "what nobody wrote in between has kept its new fields"
    kept = kubectl("-n", "sixfold-system", "get", "secret", "sixfold-redis", "-o", "jsonpath={.data.password}")
    assert kept == password


def everything(kubectl: Kubectl) -> set[str]:
    """Every object of the cluster, without what kube-apiserver makes for itself."""
    kinds = kubectl("api-resources", "--verbs=list", "-o", "name").split()
    own = ("events", "events.events.k8s.io", "componentstatuses", "apiservices.apiregistration.k8s.io")
    wanted = ",".join(kind for kind in kinds if kind not in own)
    found = json.loads(kubectl("get", wanted, "-A", "-o", "json"))["items"]
    finalized = [item["metadata"]["name"] for item in found if item["metadata"].get("finalizers")]
    assert set(finalized) <= {name.removeprefix("crd/") for name in CRDS}, "of CRDs, kube-apiserver's own"
    keys = [(item["kind"], item["metadata"].get("namespace", ""), item["metadata"]["name"]) for item in found]
    return {"/".join(key) for key in keys if not key[2].startswith("apiserver-")}


def test_uninstalling_leaves_the_users_objects_and_no_others(release: Any, helm: Any, kubectl: Kubectl) -> None:
    before = everything(kubectl)
    release(*EVERYTHING)
    kubectl("wait", "--for=condition=Established", "--timeout=30s", *CRDS)
    eventually(lambda: write(kubectl, "kept", FULL, "full-"))
    objects = read(kubectl, "kept")
    assert len(everything(kubectl) - before) > 25
    helm("uninstall", "sixfold")
    left = everything(kubectl) - before - {"Namespace//sixfold-system"}
    crds = {f"CustomResourceDefinition//{name.removeprefix('crd/')}" for name in CRDS}
    kept = {f"{kind}/default/{item['metadata']['name']}" for kind, items in objects.items() for item in items}
    assert left == crds | kept
