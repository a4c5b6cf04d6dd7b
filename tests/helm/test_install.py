"""The chart on a real kube-apiserver: what is accepted, what the operator may do, and how an upgrade goes."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

OPERATOR = "system:serviceaccount:sixfold-system:sixfold-operator"
ALL_VERBS = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")
FOREIGN = (
    "/secrets", "/serviceaccounts", "/serviceaccounts/token", "/pods/exec", "/pods/log", "/nodes", "/namespaces",
    "/persistentvolumes", "apps/statefulsets", "apps/daemonsets", "apps/deployments/scale", "batch/cronjobs",
    "rbac.authorization.k8s.io/roles", "rbac.authorization.k8s.io/clusterroles",
    "apiextensions.k8s.io/customresourcedefinitions", "sixfold.dev/inferencepolicies/scale",
    "coordination.k8s.io/leases",
)  # fmt: skip
POLICY = {
    "apiVersion": "sixfold.dev/v1alpha1",
    "kind": "InferencePolicy",
    "metadata": {"name": "kept", "namespace": "default"},
    "spec": {"generation": {"variantRef": {"name": "chat"}}},
}


def may(http: httpx.Client, user: str, verb: str, resource: str, namespace: str = "default") -> bool:
    group, name, *sub = resource.split("/")
    attributes = {"verb": verb, "group": group, "resource": name, "namespace": namespace, "subresource": "/".join(sub)}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": user, "groups": ["system:authenticated"], "resourceAttributes": attributes},
    }
    answer = http.post("/apis/authorization.k8s.io/v1/subjectaccessreviews", json=review)
    answer.raise_for_status()
    return bool(answer.json()["status"]["allowed"])


def verbs(http: httpx.Client, user: str, resource: str, namespace: str = "default") -> set[str]:
    return {verb for verb in ALL_VERBS if may(http, user, verb, resource, namespace)}


def granted(render, *values: str) -> dict[str, set[str]]:
    """Verbs by resource of the operator's role; that each is needed, tests/control_plane/test_rights.py shows."""
    roles = [document for document in render(*values) if document["metadata"]["name"] == "sixfold-operator"]
    (role,) = (document for document in roles if document["kind"] in ("Role", "ClusterRole"))
    found: dict[str, set[str]] = {}
    for rule in role["rules"]:
        for group, resource in itertools.product(rule["apiGroups"], rule["resources"]):
            found.setdefault(f"{group}/{resource}", set()).update(rule["verbs"])
    return found


def test_the_operator_may_do_what_its_role_says_and_nothing_else(release, render, http: httpx.Client) -> None:
    release()
    for resource, needed in granted(render).items():
        assert verbs(http, OPERATOR, resource) == needed, resource
    for resource in FOREIGN:
        assert verbs(http, OPERATOR, resource) == set(), resource


def test_with_a_list_of_namespaces_it_has_rights_in_these_only(release, render, kubectl, http: httpx.Client) -> None:
    kubectl("create", "namespace", "team-a")
    release("--set=watchNamespaces={team-a}")
    for resource, needed in granted(render, "--set=watchNamespaces={team-a}").items():
        assert verbs(http, OPERATOR, resource, "team-a") == needed, resource
        assert verbs(http, OPERATOR, resource, "default") == set(), resource


def test_users_get_rights_on_the_kinds_through_the_clusters_roles(release, kubectl, http: httpx.Client) -> None:
    release()
    for role in ("view", "edit"):
        kubectl("create", "clusterrolebinding", f"test-{role}", f"--clusterrole=sixfold-{role}", f"--user={role}")
    kinds = ("sixfold.dev/inferencepolicies", "sixfold.dev/modelvariants")
    for kind in kinds:
        assert verbs(http, "view", kind) == {"get", "list", "watch"}
        assert verbs(http, "edit", kind) == {"create", "update", "patch", "delete", "deletecollection"}
        assert verbs(http, "edit", f"{kind}/status") == set()
    assert verbs(http, "edit", "sixfold.dev/inferencepolicies/scale") == {"update", "patch"}
    assert verbs(http, "view", "sixfold.dev/optimizationtickets") == {"get", "list", "watch"}
    assert verbs(http, "edit", "sixfold.dev/optimizationtickets") == {"update", "patch"}
    labels = json.loads(kubectl("get", "clusterrole", "sixfold-view", "-o", "json"))["metadata"]["labels"]
    assert {f"rbac.authorization.k8s.io/aggregate-to-{role}" for role in ("view", "edit", "admin")} <= set(labels)
    kubectl("delete", "clusterrolebinding", "test-view", "test-edit")


@pytest.mark.parametrize(
    "values",
    [
        (),
        ("--set=watchNamespaces={default}", "--set=operator.replicas=2"),
        ("--set=serviceAccount.create=false", "--set=rbac.aggregate=false", "--set=crds.keep=false"),
        ("--set=prometheus.enabled=true", "--set=prometheus.storage.persistent=true", "--set=alerts.enabled=true"),
        ("--set=dashboards.enabled=true", "--set=signals[0].name=Spend", "--set=prometheus.bearerTokenSecret.name=a"),
    ],
)
def test_every_manifest_is_accepted(render, kubectl, values: tuple[str, ...]) -> None:
    documents = render(*values)
    for document in documents:
        if document["metadata"].get("namespace") == "sixfold-system":
            document["metadata"]["namespace"] = "default"
    stream = yaml.safe_dump_all(documents)
    shown = kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=stream)
    assert len(shown.splitlines()) == len(documents)


def test_the_pod_satisfies_the_restricted_standard(render, kubectl) -> None:
    (deployment,) = [document for document in render() if document["kind"] == "Deployment"]
    kubectl("create", "namespace", "restricted")
    kubectl("label", "namespace", "restricted", "pod-security.kubernetes.io/enforce=restricted")
    pod = deployment["spec"]["template"] | {"apiVersion": "v1", "kind": "Pod"}
    pod["metadata"] |= {"name": "operator", "namespace": "restricted"}
    assert "created" in kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))


def test_the_notes_say_what_works(release, kubectl) -> None:
    notes = release("--set=watchNamespaces={default}")
    assert "serves the namespaces default" in notes
    (manifests,) = re.findall(r"<<EOF\n(.*?)\nEOF\n", notes, flags=re.DOTALL)
    kubectl("wait", "--for=condition=Established", "--timeout=30s", "crd/modelvariants.sixfold.dev")
    shown = kubectl("apply", "--dry-run=server", "-o", "name", "-f", "-", stdin=manifests)
    assert shown.split() == ["modelvariant.sixfold.dev/chat", "inferencepolicy.sixfold.dev/assistant"]
    assert kubectl("-n", "sixfold-system", "get", "deployment/sixfold-operator", "-o", "name")


def without_streaming(chart: Path) -> None:
    """Make the chart one of a version that did not know `spec.streaming` yet."""
    path = chart / "crd-files" / "inferencepolicies.yaml"
    document = yaml.safe_load(path.read_text())
    root = document["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    del root["spec"]["properties"]["streaming"]
    path.write_text(yaml.safe_dump(document))


def apply(kubectl: Any, **spec: Any) -> str:
    document = POLICY | {"spec": POLICY["spec"] | spec}
    return str(kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(document)))


def eventually(check: Any) -> None:
    """kube-apiserver swaps the handlers of a changed CRD a moment after it acknowledged the change."""
    for _ in range(100):
        try:
            check()
        except AssertionError as error:
            last = error
        else:
            return
    raise last


def test_an_upgrade_brings_new_fields_and_keeps_what_is_there(release, helm, kubectl, chart_copy: Path) -> None:
    without_streaming(chart_copy)
    release(chart=chart_copy)
    eventually(lambda: apply(kubectl))
    with pytest.raises(AssertionError, match=r"\.spec\.streaming: field not declared in schema"):
        apply(kubectl, streaming={"level": 7})

    release()
    eventually(lambda: apply(kubectl, streaming={"level": 7}))
    uid = kubectl("get", "ipol", "kept", "-o", "jsonpath={.metadata.uid}")
    assert kubectl("get", "ipol", "kept", "-o", "jsonpath={.spec.streaming.level}") == "7"

    helm("uninstall", "sixfold")
    assert kubectl("get", "ipol", "kept", "-o", "jsonpath={.metadata.uid}") == uid
    release()
    assert kubectl("get", "ipol", "kept", "-o", "jsonpath={.metadata.uid}") == uid


def test_crds_that_are_not_kept_go_with_the_release_and_take_policies_along(release, helm, kubectl) -> None:
    release("--set=crds.keep=false")
    eventually(lambda: apply(kubectl))
    helm("uninstall", "sixfold")
    kubectl("wait", "--for=delete", "--timeout=30s", "crd/inferencepolicies.sixfold.dev")
