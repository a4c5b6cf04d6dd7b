"""Tiny real models written by transformers, and a server that speaks the part of the hub's API that a fetch needs."""

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
import transformers
import typer
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from sixfold_api.variant import PreparationSummary
from sixfold_runtime.prepare.cli import prepare

WORDS = 60


def write_tokenizer(folder: Path, words: int = WORDS) -> None:
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{index}": index for index in range(3, words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 10**30}))


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal language model of 2 layers; its output matrix is tied to the embedding."""
    folder = tmp_path_factory.mktemp("chat")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sequence classifier with three labels."""
    folder = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=40,
        id2label={0: "billing", 1: "technical", 2: "other"},
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture
def claims(tmp_path: Path) -> Path:
    """Where claims are mounted, with the empty claim `models`."""
    (tmp_path / "claims" / "models").mkdir(parents=True)
    return tmp_path / "claims"


@pytest.fixture
def model(claims: Path, chat_model: Path) -> Path:
    """A copy of the causal model at pvc://models/chat that a test may spoil."""
    return Path(shutil.copytree(chat_model, claims / "models" / "chat"))


class Prepared:
    """What one run of the command did."""

    def __init__(self, exit_code: int, log: str, summary: Path) -> None:
        self.exit_code = exit_code
        self.log = log
        self.raw = summary.read_bytes() if summary.exists() else b""
        self.summary = PreparationSummary.model_validate_json(self.raw) if self.raw else PreparationSummary()

    @property
    def facts(self):
        assert self.exit_code == 0, self.log
        assert self.summary.facts is not None
        return self.summary.facts

    @property
    def failure(self):
        """A failure that another try would not heal."""
        assert self.exit_code == 2, self.log
        assert self.summary.failure is not None
        return self.summary.failure

    @property
    def transient_failure(self):
        """A failure after which another try is worth it."""
        assert self.exit_code == 1, self.log
        assert self.summary.failure is not None
        return self.summary.failure


@pytest.fixture
def run_prepare(tmp_path: Path, claims: Path) -> Callable[..., Prepared]:
    """Run `prepare` with a source and a task, and read its termination message."""
    app = typer.Typer()
    app.command()(prepare)

    def run(source: str, task: str = "Generation", *arguments: str) -> Prepared:
        summary = tmp_path / "termination-log"
        summary.unlink(missing_ok=True)
        options = ["--source", source, "--task", task, "--claims", str(claims), "--summary", str(summary)]
        credentials = ["--credentials", str(tmp_path / "credentials")]
        result = CliRunner().invoke(app, [*options, *credentials, *arguments])
        return Prepared(result.exit_code, result.output, summary)

    return run


class TinyHub:
    """A hub on the loopback address: repositories are folders, each with one commit."""

    COMMIT = "0123456789abcdef0123456789abcdef01234567"

    def __init__(self) -> None:
        self.repositories: dict[str, Path] = {}
        self.token: str | None = None
        self.broken_status: int | None = None
        self.listed_sizes: dict[str, int] = {}
        self.served_bytes: dict[str, bytes] = {}
        self.downloads: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *arguments: object) -> None: ...

            def do_HEAD(self) -> None:
                hub.answer(self)

            def do_GET(self) -> None:
                hub.answer(self)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlparse(request.path).path)
        if self.broken_status is not None:
            return self._send(request, self.broken_status, b"broken")
        if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
            return self._send(request, 401, b"", {"X-Error-Code": "RepoNotFound"})
        kind, repository, revision, name = self._parse(path)
        if repository not in self.repositories:
            return self._send(request, 404, b"", {"X-Error-Code": "RepoNotFound"})
        if revision != self.COMMIT:
            return self._send(request, 404, b"", {"X-Error-Code": "RevisionNotFound"})
        folder = self.repositories[repository]
        if kind == "tree":
            listing = [self._entry(file) for file in sorted(folder.iterdir()) if file.is_file()]
            return self._send(request, 200, json.dumps(listing).encode(), {"Content-Type": "application/json"})
        if request.command == "GET":
            self.downloads.append(name)
        content = self.served_bytes.get(name, (folder / name).read_bytes())
        headers = {"X-Repo-Commit": self.COMMIT, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        return self._send(request, 200, content, headers)

    def _parse(self, path: str) -> tuple[str, str, str, str]:
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            return "tree", "/".join(parts[2:4]), parts[5], ""
        return "file", "/".join(parts[:2]), parts[3], "/".join(parts[4:])

    def _entry(self, file: Path) -> dict[str, object]:
        content = file.read_bytes()
        size = self.listed_sizes.get(file.name, len(content))
        entry: dict[str, object] = {"type": "file", "path": file.name, "size": size, "oid": "0" * 40}
        if file.suffix == ".safetensors":
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": size, "pointerSize": 134}
        return entry

    def _send(
        self, request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str] | None = None
    ) -> None:
        request.send_response(status)
        for key, value in (headers or {}).items():
            request.send_header(key, value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)


@pytest.fixture
def hub(chat_model: Path) -> Iterator[TinyHub]:
    """A running hub that has the causal model as acme/chat."""
    hub = TinyHub()
    hub.repositories["acme/chat"] = chat_model
    try:
        yield hub
    finally:
        hub.close()
