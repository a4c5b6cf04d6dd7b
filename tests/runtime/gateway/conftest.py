"""Real gateways and a real engine on loopback ports. The models are tiny and random, made with transformers."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from sixfold_api.runtime_config import ServedModel
from sixfold_api.scalars import Task
from sixfold_runtime.config import ConfigStore
from sixfold_runtime.gateway.app import create_gateway_app
from sixfold_runtime.http_server import server_config
from sixfold_runtime.settings import RuntimeSettings

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n\n{% endfor %}"
    "{% if messages[0]['content'] == 'refuse' %}{{ raise_exception('not this one') }}{% endif %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CONTEXT_TOKENS = 4096


def wait_until(
    condition: Callable[[], Any], what: str, timeout_seconds: float = 300, pause_seconds: float = 0.02
) -> Any:
    """Poll until `condition` gives something true; fail with `what` was awaited."""
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(pause_seconds)
    pytest.fail(f"waited {timeout_seconds:.0f} s for {what}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def until() -> Callable[..., Any]:
    """`until(condition, what)`."""
    return wait_until


@pytest.fixture
def free_port() -> int:
    return _free_port()


class ThreadedServer:
    """uvicorn in a thread, for an application of ours."""

    def __init__(self, app: Any, config: ConfigStore) -> None:
        self.port = _free_port()
        self._config = config
        self.server = uvicorn.Server(server_config(app, drain_seconds=2, host="127.0.0.1", port=self.port))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        wait_until(lambda: self.server.started, "the server to start")

    def _run(self) -> None:
        import asyncio

        async def main() -> None:
            follow = asyncio.create_task(self._config.run())
            await self.server.serve()
            follow.cancel()

        asyncio.run(main())

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(30)


def effective(
    level: int = 3,
    rate_limit: dict[str, float] | None = None,
    compression: str = "Auto",
    modes: Sequence[str] = (),
    **more: Any,
) -> dict[str, Any]:
    """`modes` are on beside streaming; `more` are fields of the configuration."""
    config: dict[str, Any] = {
        "level": level,
        "activeModes": [*modes, *(["CompressedStreaming"] if level == 3 else [])],
        "streaming": {"compression": compression if level == 3 else "Off", "level": 3},
        **more,
    }
    return config | ({"rateLimit": rate_limit} if rate_limit else {})


@dataclass
class ConfigDirectory:
    """A mounted ConfigMap: `set` writes the next config.json."""

    path: Path
    sequence: int = 0

    def set(self, canary: dict[str, Any] | None = None, **stable: Any) -> int:
        """`stable` are arguments of `effective`; so are the canary's, beside `percent` and `hashBy`."""
        self.sequence += 1
        config: dict[str, Any] = {"sequence": self.sequence, "stable": effective(**stable)}
        if canary is not None:
            share = {name: canary[name] for name in ("percent", "hashBy") if name in canary}
            rest = {name: value for name, value in canary.items() if name not in share}
            config["canary"] = {**share, "config": effective(**rest)}
        partial = self.path / ".partial"
        partial.write_text(json.dumps(config))
        partial.rename(self.path / "config.json")
        return self.sequence


@dataclass
class Served:
    """A running gateway or engine."""

    url: str
    config: ConfigDirectory
    port: int
    app: Any = None
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    def openai(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the series of a metric that have these labels."""
        total = 0.0
        for line in self.client.get("/metrics").text.splitlines():
            series, _, value = line.rpartition(" ")
            if series.split("{")[0] == name and all(f'{key}="{text}"' in series for key, text in labels.items()):
                total += float(value)
        return total

    def apply(self, **config: Any) -> None:
        """Write a configuration and wait until it is in use."""
        sequence = self.config.set(**config)
        wait_until(lambda: self.client.get("/state").json()["sequence"] == sequence, "the configuration to be in use")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `chat` and `sentiment`."""
    import torch
    from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
    from tokenizers.models import BPE
    from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(3)
    root = tmp_path_factory.mktemp("models")
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the user and the assistant say hello to the other user"], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    llama = LlamaConfig(
        **sizes,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
        bos_token_id=0,
        eos_token_id=None,
        initializer_range=0.3,
    )
    LlamaForCausalLM(llama).save_pretrained(root / "chat")
    bert = BertConfig(
        **sizes,
        num_attention_heads=4,
        max_position_embeddings=128,
        id2label={0: "negative", 1: "neutral", 2: "positive"},
        label2id={"negative": 0, "neutral": 1, "positive": 2},
        initializer_range=0.3,
    )
    BertForSequenceClassification(bert).save_pretrained(root / "sentiment")
    for name in ("chat", "sentiment"):
        tokenizer.save(str(root / name / "tokenizer.json"))
        settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE if name == "chat" else ""}
        (root / name / "tokenizer_config.json").write_text(json.dumps(settings))
    return root


def served_models(models: Path) -> list[ServedModel]:
    return [
        ServedModel(name="chat", task=Task.GENERATION, path=str(models / "chat")),
        ServedModel(name="sentiment", task=Task.CLASSIFICATION, path=str(models / "sentiment")),
    ]


@contextlib.contextmanager
def running_engine(directory: Path, models: list[ServedModel], limits: Any = None) -> Iterator[Served]:
    from sixfold_runtime.engine.server import create_engine_app

    config = ConfigDirectory(directory)
    config.set()
    store = ConfigStore.watching(config.path)
    settings = RuntimeSettings(
        policy="assistant", models=models, config_directory=config.path, device="cpu", drain_seconds=1
    )
    server = ThreadedServer(create_engine_app(settings, store, limits=limits), store)
    yield Served(f"http://127.0.0.1:{server.port}", config, server.port)
    server.stop()


@pytest.fixture(scope="session")
def engine(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One engine with both models, for all tests."""
    with running_engine(tmp_path_factory.mktemp("engine-config"), served_models(models)) as served:
        wait_until(lambda: served.client.get("/readyz").status_code == 200, "the engine to load its models")
        yield served


@pytest.fixture
def new_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Served]]:
    """Starts engines, loaded or not, that stop with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda *models, limits=None: stack.enter_context(
            running_engine(tmp_path_factory.mktemp("engine-config"), list(models), limits)
        )


@pytest.fixture(scope="module")
def shared_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Served]]:
    """As `new_engine`, loaded, for all tests of a module."""
    with contextlib.ExitStack() as stack:

        def start(*models: ServedModel, limits: Any = None) -> Served:
            served = stack.enter_context(running_engine(tmp_path_factory.mktemp("engine-config"), list(models), limits))
            wait_until(lambda: served.client.get("/readyz").status_code == 200, "the engine to load its models")
            return served

        yield start


@dataclass
class GatewayFactory:
    directory: Path
    stack: contextlib.ExitStack

    def __call__(
        self,
        *engines: str | int,
        keys: Path | None = None,
        dictionary: Path | None = None,
        tls: Path | None = None,
        ready: bool = True,
    ) -> Served:
        config = ConfigDirectory(self.directory / f"gateway-{_free_port()}")
        config.path.mkdir()
        config.set()
        store = ConfigStore.watching(config.path)
        settings = RuntimeSettings(
            policy="assistant",
            engines=[f"127.0.0.1:{engine}" if isinstance(engine, int) else engine for engine in engines],
            config_directory=config.path,
            api_keys_directory=keys,
            stream_dictionary_directory=dictionary,
            tls_directory=tls,
        )
        app = create_gateway_app(settings, store)
        server = ThreadedServer(app, store)
        self.stack.callback(server.stop)
        served = Served(f"http://127.0.0.1:{server.port}", config, server.port, app)
        if ready:
            wait_until(lambda: served.client.get("/readyz").status_code == 200, "the gateway to be ready")
        return served


@pytest.fixture
def new_gateway(tmp_path: Path) -> Iterator[GatewayFactory]:
    """Starts gateways that stop with the test."""
    with contextlib.ExitStack() as stack:
        yield GatewayFactory(tmp_path, stack)


@pytest.fixture(scope="module")
def shared_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayFactory]:
    """As `new_gateway`, for all tests of a module."""
    with contextlib.ExitStack() as stack:
        yield GatewayFactory(tmp_path_factory.mktemp("gateways"), stack)


@pytest.fixture(scope="session")
def gateway(engine: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One open gateway at level 3, for tests that change nothing."""
    with contextlib.ExitStack() as stack:
        yield GatewayFactory(tmp_path_factory.mktemp("gateway"), stack)(engine.port)


class Wire:
    """Forwards TCP from a port of its own to `target`, and can be cut like a network cable."""

    def __init__(self, target: int, port: int = 0) -> None:
        self._target = target
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [client, server]
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    @staticmethod
    def _copy(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def cut(self, for_good: bool = False) -> None:
        if for_good:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._sockets.clear()


@pytest.fixture
def wire_at(engine: Served) -> Iterator[Callable[[int], Wire]]:
    """Lays cables to the engine from ports."""
    cables: list[Wire] = []

    def lay(port: int) -> Wire:
        cables.append(Wire(engine.port, port))
        return cables[-1]

    yield lay
    for cable in cables:
        cable.cut(for_good=True)


@pytest.fixture
def wire(engine: Served) -> Iterator[Wire]:
    """A cable to the engine."""
    cable = Wire(engine.port)
    yield cable
    with contextlib.suppress(OSError):
        cable.cut(for_good=True)


@dataclass
class Command:
    """A running `sixfold` command."""

    process: subprocess.Popen[bytes]
    log: Path

    def wait_ready(self, url: str) -> None:
        client = httpx.Client(base_url=url, trust_env=False)

        def ready() -> bool:
            if self.process.poll() is not None:
                pytest.fail(f"sixfold ended with {self.process.returncode}:\n{self.log.read_text()[-3000:]}")
            with contextlib.suppress(httpx.HTTPError):
                return client.get("/readyz").status_code == 200
            return False

        wait_until(ready, f"{url}/readyz", pause_seconds=0.5)


@contextlib.contextmanager
def running_commands(folder: Path) -> Iterator[Callable[..., Command]]:
    commands: list[Command] = []

    def start(*arguments: str, **environment: str) -> Command:
        log = folder / f"log-{len(commands)}"
        process = subprocess.Popen(
            [sys.executable, "-m", "sixfold_runtime.cli", *arguments],
            env={**os.environ, **environment},
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
        )
        commands.append(Command(process, log))
        return commands[-1]

    try:
        yield start
    finally:
        for command in commands:
            command.process.kill()
            command.process.wait()


@pytest.fixture
def sixfold(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Runs `sixfold ...` in the background; ends it with the test."""
    with running_commands(tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def shared_sixfold(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Command]]:
    """As `sixfold`, for all tests of a module."""
    with running_commands(tmp_path_factory.mktemp("commands")) as start:
        yield start
