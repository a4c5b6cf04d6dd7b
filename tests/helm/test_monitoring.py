"""The chart's part in watching: what is rendered, what the schema refuses, and tokens that outlive upgrades."""

from __future__ import annotations

import base64
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from sixfold_operator.control import signals
from sixfold_operator.settings import OperatorSettings
from sixfold_operator.sinks import parse_sinks

CHART = Path(__file__).resolve().parents[2] / "helm" / "sixfold"
ON = "--set=prometheus.enabled=true"
ALL: dict[str, Any] = {
    "prometheus": {"enabled": True},
    "signals": [{"name": "TTFTP95", "threshold": 1.5, "window": "2m"}],
    "alerts": {"enabled": True},
    "sinks": [
        {"name": "hook", "type": "Webhook", "url": "https://a.example/t", "secretRef": {"name": "hook", "key": "key"}},
        {"name": "issues", "type": "GitHub", "repository": "team/models", "secretRef": {"name": "gh", "key": "token"}},
        {
            **{"name": "board", "type": "Jira", "url": "https://jira.example", "project": "ML", "issueType": "Bug"},
            **{"user": "bot", "labels": ["cost"], "secretRef": {"name": "jira", "key": "token"}},
        },
    ],
    "rules": {"enabled": True, "labels": {"release": "prom"}},
    "podMonitor": {"enabled": True, "interval": "5s", "labels": {"release": "prom"}},
    "dashboards": {"enabled": True, "annotations": {"folder": "ML"}},
    "metrics": {"serviceMonitor": {"enabled": True}},
}


@pytest.fixture
def everything(render, tmp_path: Path) -> list[dict[str, Any]]:
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(ALL))
    return list(render(f"--values={tmp_path / 'values.yaml'}"))


def named(documents: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = [document for document in documents if (document["kind"], document["metadata"]["name"]) == (kind, name)]
    return found


def container(documents: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = named(documents, "Deployment", "sixfold-operator")["spec"]["template"]["spec"]["containers"]
    return dict(found)


def environment(documents: list[dict[str, Any]]) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in container(documents)["env"]}


def test_nothing_of_it_is_there_unless_it_is_asked_for(render, everything) -> None:
    plain = render()
    kinds = sorted(document["kind"] for document in plain if document["kind"] != "CustomResourceDefinition")
    roles = [*("ClusterRole", "ClusterRole", "ClusterRole", "ClusterRoleBinding"), *("Role", "RoleBinding")]
    assert kinds == sorted(["ServiceAccount", *roles, "Service", "Deployment", "Lease", "NetworkPolicy"])
    new = environment(everything).keys() - environment(plain).keys()
    assert new == {
        f"SIXFOLD_{name}"
        for name in (
            *("PROMETHEUS_URL", "PROMETHEUS_TIMEOUT_SECONDS", "SIGNALS_FILE", "SINKS_FILE"),
            *("ALERTS_PORT", "ALERTS_TOKEN_FILE"),
        )
    }
    assert "volumeMounts" not in container(plain)
    assert [port["name"] for port in container(plain)["ports"]] == ["metrics"]


def test_a_prometheus_of_ones_own(render) -> None:
    own = "--set=prometheus.url=https://prometheus.example:9090/team"
    secrets = ("--set=prometheus.bearerTokenSecret.name=reader", "--set=prometheus.caConfigMap.name=authorities")
    documents = render(own, *secrets)
    found = environment(documents)
    assert found["SIXFOLD_PROMETHEUS_URL"] == "https://prometheus.example:9090/team"
    assert found["SIXFOLD_PROMETHEUS_BEARER_TOKEN_FILE"] == "/etc/sixfold/prometheus/token"
    assert found["SIXFOLD_PROMETHEUS_CA_FILE"] == "/etc/sixfold/prometheus/ca.crt"
    (volume,) = named(documents, "Deployment", "sixfold-operator")["spec"]["template"]["spec"]["volumes"]
    secret, config_map = volume["projected"]["sources"]
    assert secret["secret"]["name"] == "reader"
    assert config_map["configMap"]["name"] == "authorities"
    assert not [document for document in documents if "prometheus" in document["metadata"]["name"]]


def test_the_operator_reads_the_charts_prometheus(everything) -> None:
    assert environment(everything)["SIXFOLD_PROMETHEUS_URL"] == "http://sixfold-prometheus.sixfold-system.svc:9090"
    service = named(everything, "Service", "sixfold-prometheus")["spec"]
    template = named(everything, "Deployment", "sixfold-prometheus")["spec"]["template"]
    assert service["selector"].items() <= template["metadata"]["labels"].items()
    for name in ("sixfold-operator-metrics", "sixfold-operator-alerts"):
        selector = named(everything, "Service", name)["spec"]["selector"]
        assert not selector.items() <= template["metadata"]["labels"].items()


def test_files_are_where_the_environment_says(everything) -> None:
    found = environment(everything)
    spec = named(everything, "Deployment", "sixfold-operator")["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container(everything)["volumeMounts"]}
    control = named(everything, "ConfigMap", mounts["/etc/sixfold/control"]["configMap"]["name"])["data"]
    for variable in ("SIXFOLD_SIGNALS_FILE", "SIXFOLD_SINKS_FILE"):
        folder, _, file = found[variable].rpartition("/")
        assert folder == "/etc/sixfold/control"
        assert file in control
    assert mounts["/etc/sixfold/alerts"]["secret"]["secretName"] == "sixfold-alerts"
    assert found["SIXFOLD_ALERTS_TOKEN_FILE"] == "/etc/sixfold/alerts/token"
    secrets = {
        f"/etc/sixfold/sink-secrets/{source['secret']['items'][0]['path']}": source["secret"]["name"]
        for source in mounts["/etc/sixfold/sink-secrets"]["projected"]["sources"]
    }
    sinks = yaml.safe_load(control["sinks.yaml"])
    assert {sink["secretFile"]: sink["name"] for sink in sinks}.keys() == secrets.keys()
    assert sorted(secrets.values()) == ["gh", "hook", "jira"]
    assert "secretRef" not in control["sinks.yaml"]
    understood = parse_sinks(control["sinks.yaml"])
    assert {name: str(sink.secret_file) for name, sink in understood.items()} == {
        sink["name"]: sink["secretFile"] for sink in sinks
    }


def test_two_sinks_have_two_names(render, tmp_path: Path) -> None:
    hook = ALL["sinks"][0]
    (tmp_path / "values.yaml").write_text(yaml.safe_dump({"sinks": [hook, hook]}))
    with pytest.raises(ValueError, match="sinks: two have the name hook"):
        render(f"--values={tmp_path / 'values.yaml'}")


def test_the_operator_understands_its_environment(everything, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(everything).items():
        monkeypatch.setenv(name, value)
        if name.startswith("SIXFOLD_"):
            assert name.removeprefix("SIXFOLD_").lower() in OperatorSettings.model_fields
    settings = OperatorSettings()
    assert settings.prometheus_url == "http://sixfold-prometheus.sixfold-system.svc:9090"
    assert settings.prometheus_timeout_seconds == OperatorSettings.model_fields["prometheus_timeout_seconds"].default
    assert settings.sinks_file == Path("/etc/sixfold/control/sinks.yaml")
    assert settings.alerts_port == 9401


def test_the_operator_understands_the_signals(everything) -> None:
    document = yaml.safe_load(named(everything, "ConfigMap", "sixfold-control")["data"]["signals.yaml"])
    (signal,) = [signal for signal in signals.load(document) if signal.name == "TTFTP95"]
    assert (signal.threshold, signal.window_seconds) == (1.5, 120)


def test_who_may_query(render) -> None:
    ((rule,),) = [
        named(render(ON, *more), "NetworkPolicy", "sixfold-prometheus")["spec"]["ingress"]
        for more in [("--set=prometheus.clientNamespaces={grafana}",)]
    ]
    own, others = rule["from"]
    assert own == {"podSelector": {}}, "of the release's namespace"
    assert others["namespaceSelector"]["matchExpressions"][0]["values"] == ["grafana"]
    assert [port["port"] for port in rule["ports"]] == [9090]
    open_ = render(ON, "--set=prometheus.networkPolicy=false")
    assert ("NetworkPolicy", "sixfold-prometheus") not in {(d["kind"], d["metadata"]["name"]) for d in open_}


def test_storage_and_retention(render) -> None:
    def pod(*values: str) -> dict[str, Any]:
        return dict(named(render(ON, *values), "Deployment", "sixfold-prometheus")["spec"]["template"]["spec"])

    kept = ("--set=prometheus.retention.time=30d", "--set=prometheus.retention.size=8GB")
    arguments = pod(*kept)["containers"][0]["args"]
    assert {"--storage.tsdb.retention.time=30d", "--storage.tsdb.retention.size=8GB"} <= set(arguments)
    assert pod()["volumes"][1]["emptyDir"] == {"sizeLimit": "4Gi"}
    persistent = ("--set=prometheus.storage.persistent=true", "--set=prometheus.storage.storageClassName=fast")
    claim = named(render(ON, *persistent), "PersistentVolumeClaim", "sixfold-prometheus")["spec"]
    assert claim["storageClassName"] == "fast"
    assert claim["resources"]["requests"]["storage"] == "4Gi"
    assert pod(*persistent)["volumes"][1]["persistentVolumeClaim"]["claimName"] == "sixfold-prometheus"


def test_a_changed_configuration_restarts_prometheus(render) -> None:
    def annotations(*values: str) -> Any:
        return named(render(ON, *values), "Deployment", "sixfold-prometheus")["spec"]["template"]["metadata"][
            "annotations"
        ]

    assert annotations("--set=operator.workers=3") == annotations()
    assert annotations("--set=prometheus.scrapeInterval=1s") != annotations()


def test_monitors_give_series_the_same_labels_as_the_charts_prometheus(everything) -> None:
    config = yaml.safe_load(named(everything, "ConfigMap", "sixfold-prometheus")["data"]["prometheus.yml"])
    own, operator = config["scrape_configs"]
    monitor = named(everything, "PodMonitor", "sixfold-pods")
    assert monitor["metadata"]["labels"]["release"] == "prom"
    assert monitor["spec"]["namespaceSelector"] == {"any": True}
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["interval"]) == ("http", "5s")
    *relabelings, job = endpoint["relabelings"]
    assert job == {"targetLabel": "job", "replacement": own["job_name"]}
    names = {"source_labels": "sourceLabels", "target_label": "targetLabel"}
    assert relabelings == [
        {"action": "replace", **{names.get(key, key): value for key, value in rule.items()}}
        for rule in own["relabel_configs"]
    ]
    assert endpoint["metricRelabelings"] == own["metric_relabel_configs"]
    (service,) = named(everything, "ServiceMonitor", "sixfold-operator")["spec"]["endpoints"]
    assert service["honorLabels"] is operator["honor_labels"] is True
    assert service["relabelings"] == [{"targetLabel": "job", "replacement": operator["job_name"]}]


def test_rules_and_dashboards_arrive_as_they_are(everything) -> None:
    rules = yaml.safe_load((CHART / "monitoring" / "rules.yaml").read_text())
    rule = named(everything, "PrometheusRule", "sixfold")
    assert rule["spec"] == rules
    assert rule["metadata"]["labels"]["release"] == "prom"
    own = named(everything, "ConfigMap", "sixfold-prometheus")["data"]
    assert yaml.safe_load(own["rules.yaml"]) == rules
    for path in (CHART / "monitoring" / "dashboards").glob("*.json"):
        board = named(everything, "ConfigMap", f"sixfold-dashboard-{path.stem}")
        assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert board["metadata"]["annotations"] == {"folder": "ML"}
        assert json.loads(board["data"][f"sixfold-{path.name}"]) == json.loads(path.read_text())


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("prometheus.url=prometheus:9090", "at '/prometheus/url'"),
        ("prometheus.url=http://a:9090,prometheus.enabled=true", "at '/prometheus/url'"),
        ("prometheus.scrapeInterval=0s", "at '/prometheus/scrapeInterval'"),
        ("prometheus.retention.time=forever", "at '/prometheus/retention/time'"),
        ("prometheus.retention.size=2Gi", "at '/prometheus/retention/size'"),
        ("prometheus.storage.size=2GB", "at '/prometheus/storage/size'"),
        ("prometheus.alertmanagers={http://a:9093}", "at '/prometheus/alertmanagers/0'"),
        ("prometheus.timeoutSeconds=0", "at '/prometheus/timeoutSeconds'"),
        ("prometheus.extraScrapeConfigs[0].job_name=sixfold-pods", "at '/prometheus/extraScrapeConfigs/0/job_name'"),
        ("prometheus.replicas=2", "additional properties 'replicas' not allowed"),
        ("signals[0].threshold=1", "missing property 'name'"),
        ("signals[0].name=errors", "at '/signals/0/name'"),
        ("signals[0].name=Errors,signals[0].query=up", "properties 'samples', 'threshold' required"),
        ("alerts.token=abc", "additional properties 'token' not allowed"),
        ("sinks[0].name=hook,sinks[0].type=Mail", "at '/sinks/0/type'"),
        ("sinks[0].name=hook,sinks[0].type=Webhook,sinks[0].url=https://a.example", "missing property 'secretRef'"),
        ("sinks[0].name=gh,sinks[0].type=GitHub,sinks[0].repository=team", "at '/sinks/0/repository'"),
        ("sinks[0].name=hook,sinks[0].type=Webhook,sinks[0].user=bot", "at '/sinks/0/user'"),
        (
            "sinks[0].name=board,sinks[0].type=Jira,sinks[0].project=ML,sinks[0].url=https://team.atlassian.net",
            "missing property 'user'",
        ),
        ("clusterName=East_1", "at '/clusterName'"),
        ("dashboards.enabled=yes", "at '/dashboards/enabled'"),
        ("podMonitor.interval=often", "at '/podMonitor/interval'"),
    ],
)
def test_bad_values_are_refused(render, value: str, words: str) -> None:
    with pytest.raises(ValueError, match="values don't meet the specifications") as caught:
        render(f"--set={value}")
    assert words in str(caught.value)


def test_upgrades_keep_the_alerts_token(release, kubectl) -> None:
    def token() -> str:
        found = json.loads(kubectl("-n", "sixfold-system", "get", "secret", "sixfold-alerts", "-o", "json"))
        return base64.b64decode(found["data"]["token"]).decode()

    notes = release("--set=alerts.enabled=true")
    first = token()
    assert re.fullmatch("[A-Za-z0-9]{48}", first)
    assert first not in notes
    release("--set=alerts.enabled=true", "--set=operator.workers=3", ON)
    assert token() == first
    release("--set=alerts.enabled=true", "--set=alerts.tokenSecret.name=mine")
    assert kubectl("-n", "sixfold-system", "get", "secret", "sixfold-alerts", "--ignore-not-found") == ""


def test_alertmanager_takes_what_the_notes_say(release, tmp_path: Path) -> None:
    assert "no Prometheus" in release()
    notes = release("--set=alerts.enabled=true", ON)
    assert "no Prometheus" not in notes
    (tmp_path / "config.yaml").write_text(notes[notes.index("receivers:") : notes.index("\nAn alert must")])
    done = subprocess.run(
        ["amtool", "check-config", tmp_path / "config.yaml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    (readme,) = re.findall(r"```yaml\n(receivers:.*?)```", (CHART / "README.md").read_text(), flags=re.DOTALL)
    shown = yaml.safe_load((tmp_path / "config.yaml").read_text())["receivers"]
    assert yaml.safe_load(readme)["receivers"] == shown


def test_the_apiserver_takes_prometheus_in_a_restricted_namespace(render, kubectl) -> None:
    kubectl("create", "namespace", "prometheus-restricted")
    kubectl("label", "namespace", "prometheus-restricted", "pod-security.kubernetes.io/enforce=restricted")
    pod = named(render(ON), "Deployment", "sixfold-prometheus")["spec"]["template"] | {
        "apiVersion": "v1",
        "kind": "Pod",
    }
    pod["metadata"] |= {"name": "prometheus", "namespace": "prometheus-restricted"}
    assert "created" in kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))
