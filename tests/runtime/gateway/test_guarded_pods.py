"""Gateway and engine as pods run them, with all that guards them: keys, TLS, traces, Redis, and logs at DEBUG.

They prove themselves to each other, make one trace of a request, and let out no secret.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from sixfold_runtime.engine.protocol import PATH
from sixfold_runtime.tls import PeerContext

sys.path.insert(0, str(Path(__file__).parents[3] / "e2e"))

from redis_server import RedisServer, free_port, write_directory

KEYS = {"alice": "alice-key-7f3d9c", "bob": "bob-key-55aa10"}
REDIS_PASSWORD, WRONG_PASSWORD = "redis-password-9b1e44", "redis-password-wrong-0c"
PROMPT = "the secret plan of the user is a very private matter " * 4
CONVERSATION = "conversation-of-alice-4411"
SECRETS = [*KEYS.values(), REDIS_PASSWORD, WRONG_PASSWORD, "private matter", CONVERSATION, "PRIVATE KEY"]
COMPLETION = {"model": "chat", "prompt": PROMPT, "max_tokens": 5, "temperature": 0}
LONG = {**COMPLETION, "max_tokens": 1500, "stream": True}
REUSE = {"store": "Redis", "ttlSeconds": 600, "maxBytes": 0, "memoryBytes": 2**26, "blockTokens": 16}
CONFIG = {
    "sequence": 1,
    "stable": {
        "level": 3,
        "activeModes": ["KVCacheReuse", "CompressedStreaming", "DynamicBatching"],
        "streaming": {"compression": "Auto", "level": 3},
        "kvReuse": {**REUSE, "minPromptTokens": 1},
    },
}
TRACE, CLIENT_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Decodes what it is sent; a span is (service, span)."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        self.raw = b""
        collector = self

        class Receive(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
                collector.take(self.path, body)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Receive)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def take(self, path: str, body: bytes) -> None:
        assert path == "/v1/traces"
        self.raw += body
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            about = {attribute.key: attribute.value.string_value for attribute in group.resource.attributes}
            self.spans += [(about["service.name"], span) for scope in group.scope_spans for span in scope.spans]

    def of(self, trace: str) -> dict[str, tuple[str, Any]]:
        """The spans of a trace by name."""
        return {span.name: (service, span) for service, span in self.spans if span.trace_id.hex() == trace}


class Authority:
    """Signs certificates that look like cert-manager's."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir()
        self.folder, self.ca = folder, folder / "ca.crt"
        self._new("-x509", "-days", "2", "-subj", f"/CN={name}", "-keyout", folder / "ca.key", "-out", self.ca)

    def _new(self, *arguments: Any) -> None:
        new = ["openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        subprocess.run([*new, *map(str, arguments)], check=True, capture_output=True)

    def issue(self, folder: Path, names: str = "IP:127.0.0.1", trust: Path | None = None) -> Path:
        """ca.crt, tls.crt and tls.key in a folder, replaced at once as the kubelet does; `trust` is another ca.crt."""
        made = self.folder / f"{folder.name}-{len(list(self.folder.iterdir()))}"
        made.mkdir()
        self._new(
            "-x509", "-days", "2", "-subj", "/CN=sixfold", "-addext", f"subjectAltName={names}",
            "-addext", "basicConstraints=critical,CA:FALSE", "-addext", "extendedKeyUsage=serverAuth,clientAuth",
            "-CA", self.ca, "-CAkey", self.folder / "ca.key", "-keyout", made / "tls.key", "-out", made / "tls.crt",
        )  # fmt: skip
        shutil.copy(trust or self.ca, made / "ca.crt")
        folder.mkdir(exist_ok=True)
        for file in made.iterdir():
            file.rename(folder / file.name)
        return folder


@dataclass
class Pods:
    """A gateway, an engine, and the folders that are mounted into them."""

    folder: Path
    collector: Collector
    ours: Authority
    theirs: Authority
    redis_url: str
    plain: int = field(default_factory=free_port)
    wire: int = field(default_factory=free_port)
    port: int = field(default_factory=free_port)
    engine: Any = None
    gateway: Any = None

    def __post_init__(self) -> None:
        for name in ("config", "keys"):
            (self.folder / name).mkdir()
        (self.folder / "config" / "config.json").write_text(json.dumps(CONFIG))
        for tenant, key in KEYS.items():
            (self.folder / "keys" / tenant).write_text(key)
        write_directory(self.folder / "address", self.redis_url)
        self.ours.issue(self.folder / "gateway-tls")
        self.ours.issue(self.folder / "engine-tls")
        headers = {"Authorization": f"Bearer {KEYS['alice']}", "X-Conversation-Id": CONVERSATION}
        self.client = httpx.Client(base_url=self.url, timeout=60, trust_env=False, headers=headers)
        self.observer = httpx.Client(base_url=f"http://127.0.0.1:{self.plain}", trust_env=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, sixfold: Callable[..., Any], models: Path) -> None:
        common = {"SIXFOLD_HOST": "127.0.0.1", "SIXFOLD_POLICY": "assistant", "SIXFOLD_LOG_LEVEL": "DEBUG"}
        common |= {"SIXFOLD_CONFIG_DIRECTORY": str(self.folder / "config"), "OTEL_BSP_SCHEDULE_DELAY": "100"}
        common |= {"OTEL_EXPORTER_OTLP_ENDPOINT": self.collector.url}
        tasks = {"chat": "Generation", "sentiment": "Classification"}
        served = [{"name": name, "task": task, "path": str(models / name)} for name, task in tasks.items()]
        self.engine = sixfold(
            "serve", "--role", "engine", "--port", str(self.plain), "--redis", str(self.folder / "address"),
            SIXFOLD_MODELS=json.dumps(served), SIXFOLD_DEVICE="cpu", SIXFOLD_POD="engine-0",
            SIXFOLD_TLS_DIRECTORY=str(self.folder / "engine-tls"), SIXFOLD_ENGINE_TLS_PORT=str(self.wire), **common,
        )  # fmt: skip
        self.gateway = sixfold(
            "serve", "--role", "gateway", "--port", str(self.port), "--api-keys", str(self.folder / "keys"),
            SIXFOLD_ENGINES=json.dumps([f"127.0.0.1:{self.wire}"]), SIXFOLD_POD="gateway-0",
            SIXFOLD_TLS_DIRECTORY=str(self.folder / "gateway-tls"), **common,
        )  # fmt: skip
        self.engine.wait_ready(f"http://127.0.0.1:{self.plain}")
        self.gateway.wait_ready(self.url)

    def engine_metric(self, name: str) -> float:
        lines = self.observer.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@pytest.fixture(scope="module")
def pods(shared_sixfold: Callable[..., Any], models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    folder = tmp_path_factory.mktemp("pods")
    collector = Collector()
    with RedisServer(folder / "redis") as redis:
        redis.cli("CONFIG", "SET", "requirepass", REDIS_PASSWORD)
        url = redis.url.replace("redis://", f"redis://:{REDIS_PASSWORD}@")
        running = Pods(
            folder, collector, Authority(folder / "ours", "ours"), Authority(folder / "theirs", "theirs"), url
        )
        running.start(shared_sixfold, models)
        yield running
    collector.server.shutdown()


def attributes(span: Any) -> dict[str, Any]:
    return {entry.key: getattr(entry.value, entry.value.WhichOneof("value")) for entry in span.attributes}


def shows(port: int, context: ssl.SSLContext | None) -> bool:
    """Whether the engine tells its state to a peer with this context; None speaks in the clear."""

    async def ask() -> bool:
        async with httpx.AsyncClient(verify=context or True, trust_env=False, timeout=20) as client:
            try:
                return (await client.get(f"http{'s' * bool(context)}://127.0.0.1:{port}/state")).is_success
            except httpx.TransportError:
                return False

    return asyncio.run(ask())


def test_both_processes_make_one_trace(pods: Pods, until: Callable[..., Any]) -> None:
    client, collector = pods.client, pods.collector
    headers = {"traceparent": f"00-{TRACE}-{CLIENT_SPAN}-01", "X-Request-ID": "id-7"}
    assert client.post("/v1/completions", json=COMPLETION, headers=headers).status_code == 200
    expected = {"request", "batch", "queue", "prefill", "decode"}
    until(lambda: collector.of(TRACE).keys() >= expected, "all spans", 30)
    found = collector.of(TRACE)
    assert {name: service for name, (service, _) in found.items()} == {
        "request": "sixfold-gateway",
        "batch": "sixfold-gateway",
        "queue": "sixfold-engine",
        "prefill": "sixfold-engine",
        "decode": "sixfold-engine",
    }
    spans = {name: span for name, (_, span) in found.items()}
    request = spans.pop("request")
    assert request.parent_span_id.hex() == CLIENT_SPAN
    assert {span.parent_span_id for span in spans.values()} == {request.span_id}
    for span in spans.values():
        assert request.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
    assert spans["queue"].end_time_unix_nano == spans["prefill"].start_time_unix_nano
    assert spans["prefill"].end_time_unix_nano == spans["decode"].start_time_unix_nano
    about = attributes(request)
    assert (about["http.response.status_code"], about["gen_ai.usage.output_tokens"]) == (200, 5)
    assert (about["sixfold.request_id"], about["sixfold.level"]) == ("id-7", 3)
    assert attributes(spans["decode"])["gen_ai.usage.output_tokens"] == 5
    assert attributes(spans["batch"])["sixfold.engine"] == "engine-0"

    assert client.post("/v1/classify", json={"input": "hello"}).status_code == 200
    mine = lambda: [span for _, span in collector.spans if span.trace_id.hex() != TRACE]  # noqa: E731
    until(lambda: {span.name for span in mine()} >= {"request", "batch", "queue", "classify"}, "the text's spans", 30)
    assert len({span.trace_id for span in mine()}) == 1
    assert [span.parent_span_id for span in mine() if span.name == "request"] == [b""], "it begins a trace"

    wrong = {**headers, "traceparent": f"00-{'1' * 32}-{CLIENT_SPAN}-01"}
    assert client.post("/v1/completions", json={**COMPLETION, "max_tokens": 0}, headers=wrong).status_code == 400
    until(lambda: "request" in collector.of("1" * 32), "the refused one", 30)
    refused = collector.of("1" * 32)["request"][1]
    assert attributes(refused)["error.type"] == "invalid_value"
    assert refused.status.code == refused.status.STATUS_CODE_ERROR

    # Not sampled by the client, or not a header: no spans of the first, a trace of its own for the second.
    before = len(collector.spans)
    for header in (f"00-{'2' * 32}-{CLIENT_SPAN}-00", "00-nonsense", f"00-{'0' * 32}-{CLIENT_SPAN}-01"):
        assert client.post("/v1/completions", json=COMPLETION, headers={"traceparent": header}).status_code == 200
    until(lambda: len(collector.spans) == before + 10, "two traces of five spans", 30)
    assert not collector.of("2" * 32)
    assert client.get("/healthz").status_code == 200
    assert not [secret for secret in SECRETS if secret.encode() in collector.raw]


def test_gateway_and_engine_prove_themselves_and_rotate(
    pods: Pods, new_gateway: Any, tmp_path: Path, until: Callable[..., Any]
) -> None:
    ours, theirs, wire = pods.ours, pods.theirs, pods.wire
    mine, its = pods.folder / "gateway-tls", pods.folder / "engine-tls"
    assert pods.observer.get("/healthz").status_code == pods.observer.get("/readyz").status_code == 200
    assert pods.observer.get("/state").json()["role"] == "engine"
    for path in (PATH, "/tokenizer/00"):
        assert pods.observer.get(path).status_code == 404, "the plain port is for observers and offers nothing else"

    def client(authority: Authority, trust: Authority) -> PeerContext:
        return PeerContext(authority.issue(tmp_path / "client", trust=trust.ca), is_server=False)

    assert shows(wire, client(ours, ours))
    assert not shows(wire, None)
    assert not shows(wire, ssl.create_default_context(cafile=ours.ca)), "who has no certificate"
    assert not shows(wire, client(theirs, ours)), "who has another authority's"
    assert not shows(wire, client(ours, theirs)), "a gateway trusts no engine of another authority"
    ours.issue(its, "DNS:elsewhere")
    assert not shows(wire, client(ours, ours)), "nor one of another name"

    # Another authority takes over while a stream runs.
    with pods.client.stream("POST", "/v1/completions", json=LONG) as stream:
        lines = stream.iter_lines()
        next(lines)
        theirs.issue(its)
        theirs.issue(mine)
        assert [line for line in lines if line][-1] == "data: [DONE]", "a connection that lives isn't touched"
    assert not shows(wire, client(ours, theirs)), "the old authority's certificates are worth nothing now"
    newer = new_gateway(wire, tls=mine)
    assert newer.client.post("/v1/completions", json=COMPLETION).status_code == 200, (
        "a new connection uses the new ones"
    )
    assert pods.client.post("/v1/completions", json=COMPLETION).status_code == 200

    key = (its / "tls.key").read_text()
    (its / "tls.key").write_text("no key")
    assert shows(wire, client(theirs, theirs)), "files that don't fit leave the last good ones in use"
    assert "the last good ones stay" in pods.engine.log.read_text()
    (its / "tls.key").write_text(key)
    assert shows(wire, client(theirs, theirs))


def test_no_secret_is_in_what_they_say(pods: Pods, until: Callable[..., Any]) -> None:
    """Runs last: it breaks their configuration, their Redis and their keys, since faults say most."""
    said: list[str] = []

    def ask(key: str, path: str = "/v1/completions", **more: Any) -> httpx.Response:
        answer = pods.client.post(path, json={**COMPLETION, **more}, headers={"Authorization": f"Bearer {key}"})
        said.append(f"{answer.headers} {'' if answer.is_success else answer.text}")
        return answer

    until(lambda: pods.engine_metric("sixfold_kv_redis_up") == 1, "Redis to be used", 60, 0.2)
    assert ask(KEYS["alice"]).status_code == 200
    assert ask(KEYS["bob"], stream=True).status_code == 200
    assert ask(KEYS["alice"] + "x").status_code == 401
    assert ask(KEYS["alice"], max_tokens=0).status_code == 400
    assert ask(KEYS["alice"], "/v1/chat/completions").status_code == 400
    assert ask(KEYS["alice"], stop=KEYS["bob"] * 50).status_code == 400
    assert ask(KEYS["alice"], "/v1/nowhere").status_code == 404
    assert pods.client.delete("/v1/kv-cache", headers={"Authorization": f"Bearer {KEYS['bob']}"}).status_code == 200
    address = pods.folder / "address" / "url"
    address.write_text(pods.redis_url.replace(REDIS_PASSWORD, WRONG_PASSWORD))

    def is_refused() -> bool:
        assert ask(KEYS["alice"], prompt=f"{len(said)} {PROMPT}").status_code == 200, "without Redis it works too"
        return pods.engine_metric("sixfold_kv_redis_up") == 0

    until(is_refused, "Redis to refuse", 60, 0.2)
    address.write_text(f"redis://:{REDIS_PASSWORD}@127.0.0.1:{free_port()}/not-a-number")
    (pods.folder / "keys" / "alice").write_text(f"{KEYS['alice']}\n{KEYS['bob']}-2\n")
    broken = {**CONFIG, "sequence": 2, "stable": {"level": 9}}
    (pods.folder / "config" / "config.json").write_text(json.dumps(broken))
    for client in (pods.client, pods.observer):
        until(lambda client=client: client.get("/state").json()["configError"], "the fault's report")
        said += [client.get(path).text for path in ("/metrics", "/state", "/readyz", "/healthz")]
    said += [pods.client.get(path).text for path in ("/openapi.json", "/v1/models", "/demo")]
    logs = [command.log.read_text() for command in (pods.engine, pods.gateway)]
    assert all('"severity": "debug"' in log for log in logs), "at DEBUG there is more to look through"
    assert '"input_length"' in logs[1], "the request log is in it"
    assert not [log for log in logs if "Traceback" in log]
    everything = "\n".join([*said, *logs, pods.collector.raw.decode(errors="replace")])
    assert {secret for secret in SECRETS if secret in everything} == set()


def test_without_a_collector_nothing_is_imported() -> None:
    code = (
        "import sys, sixfold_runtime.gateway.app\n"
        "from sixfold_runtime.tracing import tracing_for\n"
        "from sixfold_runtime.settings import RuntimeSettings\n"
        "assert tracing_for('gateway', RuntimeSettings()) is None\n"
        "parts = ('opentelemetry.exporter', 'opentelemetry.sdk')\n"
        "assert not [name for name in sys.modules if name.startswith(parts)]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_collector_that_is_gone_costs_nothing_but_spans(
    new_gateway: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = f"http://127.0.0.1:{gone.getsockname()[1]}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
    gateway = new_gateway(engine.port)
    for _ in range(5):
        assert gateway.client.post("/v1/completions", json=COMPLETION).status_code == 200


def test_without_certificates_nobody_is_let_in(
    new_gateway: Any, engine: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, until: Callable[..., Any]
) -> None:
    gateway = new_gateway(engine.port, tls=tmp_path / "missing", ready=False)
    until(lambda: "No such file" in caplog.text, "the reason to be said")
    assert gateway.client.get("/readyz").status_code == 503
    (reason,) = gateway.client.get("/state").json()["notFound"]
    assert reason.startswith("spec.tls names a Secret whose certificates can't be used") and "missing" in reason
    assert gateway.client.post("/v1/completions", json=COMPLETION).status_code == 503
