"""Traces: gateway and engine as processes, a collector that takes OTLP over HTTP, and one trace over both."""

from __future__ import annotations

import gzip
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

TRACE, CLIENT_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PROMPT = "the user says a secret thing"
COMPLETION = {"model": "chat", "prompt": PROMPT, "max_tokens": 5, "temperature": 0}


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


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    running = Collector()
    yield running
    running.server.shutdown()


def attributes(span: Any) -> dict[str, Any]:
    return {entry.key: getattr(entry.value, entry.value.WhichOneof("value")) for entry in span.attributes}


@pytest.fixture
def client(sixfold: Callable[..., Any], models: Path, collector: Collector, tmp_path: Path) -> httpx.Client:
    """Of a gateway with an engine, both traced."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        engine_port, port = one.getsockname()[1], other.getsockname()[1]
    common = {"SIXFOLD_HOST": "127.0.0.1", "SIXFOLD_POLICY": "assistant", "SIXFOLD_DRAIN_SECONDS": "3"}
    common |= {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "100"}
    served = [
        {"name": "chat", "task": "Generation", "path": str(models / "chat")},
        {"name": "sentiment", "task": "Classification", "path": str(models / "sentiment")},
    ]
    engine = sixfold(
        "serve", "--role", "engine", "--port", str(engine_port),
        SIXFOLD_MODELS=json.dumps(served), SIXFOLD_DEVICE="cpu", SIXFOLD_POD="engine-0", **common,
    )  # fmt: skip
    gateway = sixfold(
        "serve", "--role", "gateway", "--port", str(port),
        SIXFOLD_ENGINES=json.dumps([f"127.0.0.1:{engine_port}"]), SIXFOLD_POD="gateway-0", **common,
    )  # fmt: skip
    engine.wait_ready(f"http://127.0.0.1:{engine_port}")
    gateway.wait_ready(f"http://127.0.0.1:{port}")
    return httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False)


def test_both_processes_make_one_trace(client: httpx.Client, collector: Collector, until: Callable[..., Any]) -> None:
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
    assert b"secret" not in collector.raw and b"user says" not in collector.raw


def test_without_a_collector_nothing_is_imported() -> None:
    code = (
        "import sys, sixfold_runtime.gateway.app, sixfold_runtime.engine.server\n"
        "from sixfold_runtime.tracing import tracing_for\n"
        "from sixfold_runtime.settings import RuntimeSettings\n"
        "assert tracing_for('gateway', RuntimeSettings()) is None\n"
        # Not the SDK either, but redis brings that by itself where it is installed.
        "assert not [name for name in sys.modules if name.startswith('opentelemetry.exporter')]\n"
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
