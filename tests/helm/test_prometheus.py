"""The chart's Prometheus, for real: it finds pods through a kube-apiserver with the rights that the chart gives."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from control_plane import ControlPlane, free_ports

VALUES = ("--set=prometheus.enabled=true", "--set=prometheus.scrapeInterval=1s", "--set=watchNamespaces={team-a}")
ENGINE, OPERATOR = ("127.0.0.51", 8001), ("127.0.0.52", 9400)
ENGINE_SERIES = """\
# TYPE sixfold_flops counter
sixfold_flops_total{namespace="team-a",policy="bot",variant="chat",outcome="useful"} %(useful)d
sixfold_flops_total{namespace="team-b",policy="victim",variant="chat",outcome="wasted",cause="padding"} %(wasted)d
"""
OPERATOR_SERIES = """\
# TYPE sixfold_operator_policy_level gauge
sixfold_operator_policy_level{namespace="team-a",policy="bot"} 3
"""


@contextmanager
def exporter(address: tuple[str, int], text: Callable[[], str]) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/metrics"
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text().encode())

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(address, Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def exporters() -> Iterator[None]:
    """An engine, which claims to speak for someone else too, and an operator."""
    started = time.monotonic()

    def engine() -> str:
        seconds = time.monotonic() - started
        return ENGINE_SERIES % {"useful": 100 * seconds, "wasted": 300 * seconds}

    with exporter(ENGINE, engine), exporter(OPERATOR, lambda: OPERATOR_SERIES):
        yield


def pod(namespace: str, name: str, labels: dict[str, str], ports: dict[str, int], **status: Any) -> dict[str, Any]:
    ports_of_container = [{"name": port, "containerPort": number} for port, number in ports.items()]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {"containers": [{"name": "main", "image": "none", "ports": ports_of_container}]},
        "status": {"phase": "Running", **status},
    }


def pods() -> Iterator[dict[str, Any]]:
    def engine(namespace: str, name: str, ip: str = ENGINE[0], component: str = "engine", **status: Any) -> Any:
        labels = {"sixfold.dev/policy": "bot", "sixfold.dev/component": component}
        return pod(namespace, name, labels, {"http": 8001, "debug": 8002}, podIP=ip, **status)

    yield engine("team-a", "engine-1")
    yield engine("team-a", "finished", phase="Succeeded")
    yield engine("team-a", "job", component="prepare")
    yield engine("team-b", "elsewhere")
    operator = {f"app.kubernetes.io/{name}": value for name, value in OPERATOR_LABELS.items()}
    yield pod("sixfold-system", "operator-1", operator, {"metrics": 9400, "alerts": 9401}, podIP=OPERATOR[0])
    yield pod(
        "sixfold-system",
        "redis",
        operator | {"app.kubernetes.io/component": "redis"},
        {"redis": 6379},
        podIP="127.0.0.53",
    )


OPERATOR_LABELS = {"name": "sixfold", "instance": "sixfold", "component": "operator"}


def reachable_from_here(config: dict[str, Any], control_plane: ControlPlane, folder: Path) -> dict[str, Any]:
    """The rendered configuration for a process beside the cluster: it has the address, token and CA from elsewhere."""
    for job in config["scrape_configs"]:
        for discovery in job["kubernetes_sd_configs"]:
            discovery |= {
                "api_server": control_plane.url,
                "authorization": {"credentials_file": str(folder / "token")},
                "tls_config": {"ca_file": str(control_plane.ca_file)},
            }
    return config | {"rule_files": [str(folder / "rules.yaml")]}


@pytest.fixture
def prometheus(
    release, kubectl, control_plane: ControlPlane, monitoring_programs: Path, exporters, tmp_path: Path
) -> Iterator[httpx.Client]:
    """The release's Prometheus with its arguments, its files and its service account."""
    for namespace in ("team-a", "team-b"):
        manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
        kubectl("apply", "-f", "-", stdin=json.dumps(manifest))
    release(*VALUES)
    for made in pods():
        kubectl("create", "-f", "-", stdin=json.dumps(made))
        where = ("-n", made["metadata"]["namespace"], "pod", made["metadata"]["name"])
        kubectl("patch", *where, "--subresource=status", "--type=merge", "-p", json.dumps({"status": made["status"]}))

    def get(kind: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            kubectl("-n", "sixfold-system", "get", kind, "sixfold-prometheus", "-o", "json")
        )
        return found

    (tmp_path / "token").write_text(kubectl("-n", "sixfold-system", "create", "token", "sixfold-prometheus"))
    files = get("configmap")["data"]
    (tmp_path / "rules.yaml").write_text(files["rules.yaml"])
    config = reachable_from_here(yaml.safe_load(files["prometheus.yml"]), control_plane, tmp_path)
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    (container,) = get("deployment")["spec"]["template"]["spec"]["containers"]
    (port,) = free_ports(1)
    paths = {
        "/etc/sixfold-prometheus": str(tmp_path),
        "=/prometheus": f"={tmp_path / 'data'}",
        "=:9090": f"=127.0.0.1:{port}",
    }
    arguments = [replaced(argument, paths) for argument in container["args"]]
    log = (tmp_path / "log").open("w")
    running = subprocess.Popen([monitoring_programs / container["command"][0], *arguments], stdout=log, stderr=log)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=10) as client:
        yield client
    running.terminate()
    assert running.wait(20) == 0, (tmp_path / "log").read_text()
    log.close()
    for made in pods():
        kubectl("-n", made["metadata"]["namespace"], "delete", "pod", made["metadata"]["name"], "--force")


def replaced(text: str, words: dict[str, str]) -> str:
    for old, new in words.items():
        text = text.replace(old, new)
    return text


def eventually(what: str, check: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if answer := check():
                return answer
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"{what}: not within a minute")


def test_it_finds_the_pods_and_says_whose_series_they_are(prometheus: httpx.Client) -> None:
    def query(expr: str) -> list[dict[str, Any]]:
        answer = prometheus.get("/api/v1/query", params={"query": expr})
        found: list[dict[str, Any]] = answer.raise_for_status().json()["data"]["result"]
        return found

    def all_up() -> bool:
        return len(query("up == 1")) == 2

    eventually("both pods answer", all_up)
    labels = {found["metric"]["pod"]: found["metric"] for found in query("up")}
    assert labels.keys() == {"engine-1", "operator-1"}, "no other pod of the namespaces, and none of team-b"
    whose = {"namespace": "team-a", "policy": "bot", "component": "engine"}
    assert labels["engine-1"].items() >= (whose | {"job": "sixfold-pods", "instance": "127.0.0.51:8001"}).items()
    assert labels["operator-1"]["job"] == "sixfold-operator"
    (level,) = query("sixfold_operator_policy_level")
    assert (level["metric"]["namespace"], level["metric"]["policy"]) == ("team-a", "bot")

    series = eventually("two series of the engine", lambda: query("sixfold_flops_total"))
    for found in series:
        assert found["metric"].items() >= whose.items(), "a pod can't speak for another policy"
        assert not [name for name in found["metric"] if name.startswith("exported_")]
    (ratio,) = eventually("a recorded ratio", lambda: query("policy:sixfold_wasted_flops:ratio10m"))
    assert ratio["metric"] == {
        "__name__": "policy:sixfold_wasted_flops:ratio10m",
        "namespace": "team-a",
        "policy": "bot",
    }
    assert float(ratio["value"][1]) == pytest.approx(0.75, abs=0.02)

    def evaluated() -> list[dict[str, Any]]:
        groups = prometheus.get("/api/v1/rules").json()["data"]["groups"]
        found = [rule for group in groups for rule in group["rules"]]
        return [] if any(rule["health"] == "unknown" for rule in found) else found

    rules = eventually("all rules evaluated", evaluated)
    assert len(rules) > 30
    assert {rule["health"] for rule in rules} == {"ok"}


def test_it_may_look_at_pods_and_at_nothing_else(release, http: httpx.Client) -> None:
    def may(verb: str, resource: str, namespace: str) -> bool:
        user = "system:serviceaccount:sixfold-system:sixfold-prometheus"
        attributes = {"verb": verb, "group": "", "resource": resource, "namespace": namespace}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": user, "groups": ["system:authenticated"], "resourceAttributes": attributes},
        }
        answer = http.post("/apis/authorization.k8s.io/v1/subjectaccessreviews", json=review)
        return bool(answer.raise_for_status().json()["status"]["allowed"])

    release(*VALUES)
    for namespace, allowed in (("team-a", True), ("sixfold-system", True), ("team-b", False)):
        assert {may(verb, "pods", namespace) for verb in ("get", "list", "watch")} == {allowed}
    release("--set=prometheus.enabled=true")
    assert may("list", "pods", "team-b")
    for namespace in ("team-a", "sixfold-system"):
        for resource in ("secrets", "configmaps", "services", "nodes"):
            assert not may("list", resource, namespace)
        assert not may("create", "pods", namespace)


def test_every_configuration_is_a_valid_one(render, promtool, tmp_path: Path) -> None:
    dcgm = {"job_name": "dcgm", "honor_labels": True, "static_configs": [{"targets": ["dcgm-exporter.gpu.svc:9400"]}]}
    full = {
        "alertmanagers": ["alertmanager.monitoring.svc:9093"],
        "extraScrapeConfigs": [dcgm],
        "scrapeInterval": "1m30s",
    }
    for values in ({}, full):
        (tmp_path / "values.yaml").write_text(yaml.safe_dump({"prometheus": {"enabled": True, **values}}))
        (files,) = [
            document["data"]
            for document in render(f"--values={tmp_path / 'values.yaml'}")
            if (document["kind"], document["metadata"]["name"]) == ("ConfigMap", "sixfold-prometheus")
        ]
        (tmp_path / "rules.yaml").write_text(files["rules.yaml"])
        config = files["prometheus.yml"].replace("/etc/sixfold-prometheus", str(tmp_path))
        (tmp_path / "prometheus.yml").write_text(config)
        assert "is valid prometheus config file" in promtool("check", "config", tmp_path / "prometheus.yml")
