"""Mutual TLS between gateways and an engine, as processes, with certificates that openssl makes and replaces."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from sixfold_runtime.engine.protocol import PATH
from sixfold_runtime.tls import PeerContext

COMPLETION = {"model": "chat", "prompt": "hello", "max_tokens": 3}
LONG = {**COMPLETION, "max_tokens": 1500, "temperature": 0, "stream": True}


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


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authorities") / "ours", "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authorities") / "theirs", "theirs")


def free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def answer(gateway: Any) -> int:
    return int(gateway.client.post("/v1/completions", json=COMPLETION).status_code)


def shows(port: int, context: ssl.SSLContext | None) -> bool:
    """Whether the engine tells its state to a peer with this context; None speaks in the clear."""

    async def ask() -> bool:
        async with httpx.AsyncClient(verify=context or True, trust_env=False, timeout=20) as client:
            try:
                return (await client.get(f"http{'s' * bool(context)}://127.0.0.1:{port}/state")).is_success
            except httpx.TransportError:
                return False

    return asyncio.run(ask())


def test_gateway_and_engine_prove_themselves_and_rotate(
    sixfold: Callable[..., Any],
    new_gateway: Any,
    models: Path,
    ours: Authority,
    theirs: Authority,
    tmp_path: Path,
    until: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, wire = free_ports(2)
    mine, its = ours.issue(tmp_path / "gateway"), ours.issue(tmp_path / "engine")
    served = [{"name": "chat", "task": "Generation", "path": str(models / "chat")}]
    engine = sixfold(
        "serve", "--role", "engine", "--port", str(plain), SIXFOLD_ENGINE_TLS_PORT=str(wire), SIXFOLD_HOST="127.0.0.1",
        SIXFOLD_TLS_DIRECTORY=str(its), SIXFOLD_MODELS=json.dumps(served), SIXFOLD_DEVICE="cpu",
    )  # fmt: skip
    engine.wait_ready(f"http://127.0.0.1:{plain}")
    gateway = new_gateway(wire, tls=mine)
    assert answer(gateway) == 200

    observer = httpx.Client(base_url=f"http://127.0.0.1:{plain}", trust_env=False)
    assert observer.get("/healthz").status_code == observer.get("/readyz").status_code == 200
    assert observer.get("/state").json()["role"] == "engine"
    assert "sixfold_generated_tokens_total" in observer.get("/metrics").text
    for path in (PATH, "/tokenizer/00"):
        assert observer.get(path).status_code == 404, "the plain port is for observers and offers nothing else"

    def client(authority: Authority, trust: Authority, names: str = "IP:127.0.0.1") -> PeerContext:
        return PeerContext(authority.issue(tmp_path / "client", names, trust.ca), is_server=False)

    assert shows(wire, client(ours, ours))
    assert not shows(wire, None)
    assert not shows(wire, ssl.create_default_context(cafile=ours.ca)), "who has no certificate"
    assert not shows(wire, client(theirs, ours)), "who has another authority's"
    assert not shows(wire, client(ours, theirs)), "a gateway trusts no engine of another authority"
    ours.issue(its, "DNS:elsewhere")
    assert not shows(wire, client(ours, ours)), "nor one of another name"

    # Another authority takes over while a stream runs.
    with gateway.client.stream("POST", "/v1/completions", json=LONG) as stream:
        lines = stream.iter_lines()
        next(lines)
        theirs.issue(its)
        theirs.issue(mine)
        assert [line for line in lines if line][-1] == "data: [DONE]", "a connection that lives isn't touched"
    assert not shows(wire, client(ours, theirs)), "the old authority's certificates are worth nothing now"
    assert answer(new_gateway(wire, tls=mine)) == 200, "a new connection uses the new ones"
    assert answer(gateway) == 200

    (its / "tls.key").write_text("no key")
    assert shows(wire, client(theirs, theirs)), "files that don't fit leave the last good ones in use"
    assert "the last good ones stay" in engine.log.read_text()
    said = engine.log.read_text() + caplog.text
    assert not [word for word in ("PRIVATE KEY", "Traceback") if word in said]


def test_without_certificates_nobody_is_let_in(
    new_gateway: Any, engine: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, until: Callable[..., Any]
) -> None:
    gateway = new_gateway(engine.port, tls=tmp_path / "missing", ready=False)
    until(lambda: "No such file" in caplog.text, "the reason to be said")
    assert gateway.client.get("/readyz").status_code == 503
    assert answer(gateway) == 503
