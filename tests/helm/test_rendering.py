"""What the chart renders, without a cluster."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from sixfold_api.crdgen import crd
from sixfold_api.kinds import KINDS
from sixfold_operator.settings import OperatorSettings

CHART = Path(__file__).resolve().parents[2] / "helm" / "sixfold"


def only(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = [document for document in documents if document["kind"] == kind]
    return found


def container(documents: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = only(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    return found


def test_lint(helm_program: Path) -> None:
    done = subprocess.run([helm_program, "lint", "--strict", CHART], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "0 chart(s) failed" in done.stdout
    assert "WARNING" not in done.stdout


def test_the_crds_are_the_generated_ones(render) -> None:
    rendered = [document for document in render() if document["kind"] == "CustomResourceDefinition"]
    for document in rendered:
        assert document["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
        assert document["metadata"].pop("labels")["app.kubernetes.io/managed-by"] == "Helm"
    assert rendered == sorted((crd(kind) for kind in KINDS), key=lambda document: document["metadata"]["name"])


def test_the_crds_can_be_left_out_or_let_go(render) -> None:
    kinds = {document["kind"] for document in render("--set=crds.enabled=false")}
    assert "CustomResourceDefinition" not in kinds
    for document in render("--set=crds.keep=false"):
        if document["kind"] == "CustomResourceDefinition":
            assert "annotations" not in document["metadata"]


def test_the_operator_understands_its_environment(render, monkeypatch: pytest.MonkeyPatch) -> None:
    values = ["--set=watchNamespaces={team-a,team-b}", "--set=operator.logLevel=DEBUG", "--set=operator.workers=3"]
    images = ["--set=image.runtime.repository=example.com/runtime", "--set=image.runtime.tag=v2"]
    values += ["--set=image.runtime.pullPolicy=Always", "--set=hub.endpoint=https://hub.example.com/hf"]
    values += ["--set=tracing.otlpEndpoint=http://collector:4318"]
    values += ["--set=clusterName=east"]
    for entry in container(render(*values, *images))["env"]:
        monkeypatch.setenv(entry["name"], entry.get("value", "a-pod"))
        if entry["name"].startswith("SIXFOLD_"):
            assert entry["name"].removeprefix("SIXFOLD_").lower() in OperatorSettings.model_fields
    settings = OperatorSettings()
    assert settings.runtime_image == "example.com/runtime:v2"
    assert settings.runtime_image_pull_policy == "Always"
    assert settings.hub_endpoint == "https://hub.example.com/hf"
    assert settings.otlp_endpoint == "http://collector:4318"
    assert settings.cluster_name == "east"
    assert settings.watch_namespaces == ["team-a", "team-b"]
    assert settings.log_level == "DEBUG"
    assert settings.workers == 3
    assert settings.metrics_port == 9400
    assert settings.network_policies
    assert settings.lease_duration_seconds == OperatorSettings.model_fields["lease_duration_seconds"].default
    assert settings.resync_seconds == OperatorSettings.model_fields["resync_seconds"].default


def test_who_may_read_metrics_and_state(render, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The operator and the chart's Prometheus by the labels that their pods have, and who else is named."""
    scraper = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    values = {"networkPolicies": {"scrapers": [scraper]}, "gateway": {"ingressAnnotations": {"example.com/a": "b"}}}
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    documents = render(f"--values={tmp_path / 'values.yaml'}", "--set=prometheus.enabled=true")
    pods = {
        document["metadata"]["name"]: document["spec"]["template"]
        for document in documents
        if document["kind"] == "Deployment"
    }
    for entry in pods["sixfold-operator"]["spec"]["containers"][0]["env"]:
        monkeypatch.setenv(entry["name"], entry.get("value", ""))
    settings = OperatorSettings()
    operator, prometheus, other = settings.network_policy_observers
    for peer, pod in ((operator, "sixfold-operator"), (prometheus, "sixfold-prometheus")):
        assert peer["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "sixfold-system"}}
        assert peer["podSelector"]["matchLabels"].items() <= pods[pod]["metadata"]["labels"].items()
    assert other == scraper
    assert settings.ingress_annotations == {"example.com/a": "b"}
    operators = [
        d["spec"] for d in documents if (d["kind"], d["metadata"]["name"]) == ("NetworkPolicy", "sixfold-operator")
    ]
    ((rule,),) = [policy["ingress"] for policy in operators]
    assert (rule["from"], rule["ports"]) == (settings.network_policy_observers, [{"port": 9400}])
    off = render("--set=networkPolicies.enabled=false")
    assert "SIXFOLD_NETWORK_POLICIES" not in {entry["name"] for entry in container(off)["env"]}
    assert "NetworkPolicy" not in {document["kind"] for document in off}
    (rules,) = [d["spec"]["ingress"] for d in render("--set=alerts.enabled=true") if d["kind"] == "NetworkPolicy"]
    assert rules[1] == {"ports": [{"port": 9401}]}, "whoever sends alerts gives a token"


def test_images(render) -> None:
    digest = "sha256:" + "0" * 64
    assert container(render())["image"] == "sixfold-operator:0.2.0"
    assert container(render("--set=image.operator.tag=abc"))["image"] == "sixfold-operator:abc"
    assert container(render(f"--set=image.operator.tag={digest}"))["image"] == f"sixfold-operator@{digest}"
    repository = "--set=image.operator.repository=localhost:5000/team/sixfold-operator"
    assert container(render(repository))["image"] == "localhost:5000/team/sixfold-operator:0.2.0"


def test_the_operators_share_a_lease(render, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = render("--set=operator.leaseDurationSeconds=15")
    spec = only(documents, "Deployment")["spec"]
    assert spec["replicas"] == 1
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert "topologySpreadConstraints" not in spec["template"]["spec"]
    assert "PodDisruptionBudget" not in {document["kind"] for document in documents}
    for entry in container(documents)["env"]:
        monkeypatch.setenv(entry["name"], entry.get("value", "a-pod"))
    settings = OperatorSettings()
    assert (settings.lease, settings.lease_duration_seconds) == ("sixfold-system/sixfold-operator", 15)
    assert settings.identity == "a-pod"
    (role,) = [d for d in documents if d["kind"] == "Role" and d["metadata"]["name"] == "sixfold-operator-lease"]
    assert role["metadata"]["namespace"] == "sixfold-system"
    assert role["rules"][1]["resourceNames"] == ["sixfold-operator"]


def test_a_standby_is_kept_apart_and_kept_up(render) -> None:
    documents = render("--set=operator.replicas=2")
    deployment, budget = only(documents, "Deployment"), only(documents, "PodDisruptionBudget")
    assert deployment["spec"]["replicas"] == 2
    pod = deployment["spec"]["template"]
    selectors = [entry["labelSelector"] for entry in pod["spec"]["topologySpreadConstraints"]]
    for selector in (budget["spec"]["selector"], *selectors):
        assert selector["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert budget["spec"]["maxUnavailable"] == 1


def test_nothing_that_changes_with_the_version_is_in_a_selector(render, chart_copy: Path) -> None:
    """A Deployment's selector is immutable: a version in it would break every upgrade."""
    description = yaml.safe_load((chart_copy / "Chart.yaml").read_text())
    (chart_copy / "Chart.yaml").write_text(yaml.safe_dump(description | {"version": "9.9.9", "appVersion": "9.9.9"}))
    before, after = (only(documents, "Deployment") for documents in (render(), render(chart=chart_copy)))
    assert before["metadata"]["labels"] != after["metadata"]["labels"]
    assert before["spec"]["selector"] == after["spec"]["selector"]


def test_placement(render, tmp_path: Path) -> None:
    operator = {
        "nodeSelector": {"pool": "system"},
        "tolerations": [{"key": "system", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "system-cluster-critical",
        "podAnnotations": {"example.com/a": "b"},
        "podLabels": {"team": "ml"},
        "resources": {"limits": {"memory": "1Gi"}},
    }
    values = {"operator": operator, "imagePullSecrets": [{"name": "registry"}]}
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    documents = render(f"--values={tmp_path / 'values.yaml'}")
    template = only(documents, "Deployment")["spec"]["template"]
    for name in ("nodeSelector", "tolerations", "affinity", "priorityClassName"):
        assert template["spec"][name] == operator[name]
    assert template["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    assert template["metadata"]["annotations"] == {"example.com/a": "b"}
    assert template["metadata"]["labels"]["team"] == "ml"
    assert container(documents)["resources"]["limits"] == {"memory": "1Gi"}


def test_a_service_monitor_finds_the_service(render) -> None:
    documents = render("--set=metrics.serviceMonitor.enabled=true", "--set=metrics.serviceMonitor.labels.release=prom")
    monitor, service = only(documents, "ServiceMonitor"), only(documents, "Service")
    assert monitor["metadata"]["labels"]["release"] == "prom"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert (
        service["spec"]["selector"].items()
        <= only(documents, "Deployment")["spec"]["template"]["metadata"]["labels"].items()
    )
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    kinds = {document["kind"] for document in render("--set=metrics.service.enabled=false")}
    assert not kinds & {"Service", "ServiceMonitor"}


@pytest.mark.parametrize(
    "value, words",
    [
        ("opertor.workers=3", "additional properties 'opertor' not allowed"),
        ("operator.worker=3", "additional properties 'worker' not allowed"),
        ("operator.workers=0", "at '/operator/workers': minimum: got 0, want 1"),
        ("operator.workers=many", "at '/operator/workers': got string, want integer"),
        ("operator.logLevel=loud", "value must be one of 'DEBUG', 'INFO', 'WARNING', 'ERROR'"),
        ("operator.resyncSeconds=0", "at '/operator/resyncSeconds'"),
        ("image.operator.pullPolicy=Sometimes", "value must be one of 'IfNotPresent', 'Always', 'Never'"),
        ("image.operator.repository=sixfold:v1", "at '/image/operator/repository'"),
        ("image.runtime.tag=v1:v2", "at '/image/runtime/tag'"),
        ("image.operator.repository=", "at '/image/operator/repository'"),
        ("hub.endpoint=hub.example.com", "at '/hub/endpoint'"),
        ("tracing.otlpEndpoint=collector:4318", "at '/tracing/otlpEndpoint'"),
        ("networkPolicies.scrapers={any}", "at '/networkPolicies/scrapers/0': got string, want object"),
        ("crds.enabled=perhaps", "at '/crds/enabled': got string, want boolean"),
        ("watchNamespaces=team-a", "at '/watchNamespaces': got string, want array"),
        ("watchNamespaces={Team}", "at '/watchNamespaces/0'"),
        ("metrics.serviceMonitor.interval=often", "at '/metrics/serviceMonitor/interval'"),
    ],
)
def test_bad_values_are_refused(render, value: str, words: str) -> None:
    with pytest.raises(ValueError, match="values don't meet the specifications") as caught:
        render(f"--set={value}")
    assert words in str(caught.value)


def test_an_old_kubernetes_is_refused(render) -> None:
    with pytest.raises(ValueError, match=r"requires kubeVersion: >=1\.30"):
        render(version="1.29.9")
    assert render(version="1.30.0")


def test_every_value_is_documented() -> None:
    readme = (CHART / "README.md").read_text()
    for name, value in yaml.safe_load((CHART / "values.yaml").read_text()).items():
        assert f"`{name}" in readme
        for inner in value if isinstance(value, dict) else ():
            assert inner in readme
