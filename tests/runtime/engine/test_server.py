"""The engine through its real server: WebSocket frames, probes, state, metrics, draining."""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from sixfold_api.kv_reuse import KVStore
from sixfold_api.modes import Mode
from sixfold_api.runtime_config import (
    CanaryConfig,
    KVReuseConfig,
    ServedModel,
    ShadowConfig,
    SubgraphsConfig,
    TaskConfig,
    WeightSet,
)
from sixfold_api.scalars import FullWeights, Task
from sixfold_runtime.config import ConfigStore, default_config
from sixfold_runtime.engine.protocol import (
    PATH,
    SUBPROTOCOL,
    Cancel,
    Chunk,
    Classify,
    Done,
    Erase,
    Erased,
    FinishReason,
    Generate,
    Prefetch,
    Sampling,
    State,
    Step,
    Submit,
    TaskInfo,
    decode_to_gateway,
    encode,
)
from sixfold_runtime.engine.server import create_engine_app
from sixfold_runtime.settings import RuntimeSettings

SECONDS = 60.0
"""Most that a test waits for anything; only a hang comes near it."""


class Served:
    """A running engine server and a client of it."""

    def __init__(self, app: FastAPI, port: int, config_file: Path) -> None:
        self.app = app
        self.port = port
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=SECONDS)
        self._config_file = config_file

    def set_level(self, level: int, sequence: int) -> None:
        config = default_config(level).model_copy(update={"sequence": sequence})
        self.write_config(config.model_dump_json(by_alias=True))

    def write_config(self, content: str) -> None:
        self._config_file.write_text(content)

    def connect(self) -> connect:
        # Without a bound on frames that a test hasn't read, so that closing doesn't wait for them.
        return connect(f"ws://127.0.0.1:{self.port}{PATH}", subprotocols=[SUBPROTOCOL], max_queue=None)

    async def until(self, holds: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(SECONDS):
            while not await holds():  # noqa: ASYNC110 - what is waited for is in another thread or process
                await asyncio.sleep(0.01)

    async def is_ready(self) -> bool:
        return (await self.http.get("/readyz")).status_code == 200

    async def has_applied(self, sequence: int) -> bool:
        return bool((await self.http.get("/state")).json()["sequence"] == sequence)

    async def metric(self, name: str) -> float:
        """Value of the one series with this name and these labels."""
        for line in (await self.http.get("/metrics")).text.splitlines():
            if line.startswith(name):
                return float(line.rsplit(" ", 1)[1])
        return 0.0


@asynccontextmanager
async def serving(config_file: Path, *models: ServedModel, ready: bool = True) -> AsyncIterator[Served]:
    settings = RuntimeSettings(models=list(models), device="cpu", pod="pod-0", drain_seconds=SECONDS)
    store = ConfigStore.watching(config_file.parent)
    listener = socket.create_server(("127.0.0.1", 0))
    app = create_engine_app(settings, store)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on", ws_per_message_deflate=False))
    running = asyncio.create_task(server.serve(sockets=[listener]))
    watching = asyncio.create_task(store.run())
    served = Served(app, listener.getsockname()[1], config_file)
    try:
        await served.until(lambda: asyncio.sleep(0, server.started))
        if ready:
            await served.until(served.is_ready)
        yield served
    finally:
        await served.http.aclose()
        server.should_exit = True
        await running
        watching.cancel()


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(default_config(3).model_copy(update={"sequence": 7}).model_dump_json(by_alias=True))
    return path


@pytest.fixture
async def served(config_file: Path, chat: ServedModel, intent: ServedModel) -> AsyncIterator[Served]:
    async with serving(config_file, chat, intent) as running:
        yield running


def generate(request_id: str, max_tokens: int = 6, **sampling: Any) -> Generate:
    return Generate(request_id, "chat", [5, 6, 7], Sampling(max_tokens=max_tokens, temperature=0, **sampling))


async def receive(gateway: ClientConnection) -> Any:
    async with asyncio.timeout(SECONDS):
        frame = await gateway.recv()
    assert isinstance(frame, bytes)
    return decode_to_gateway(frame)


async def read_until(gateway: ClientConnection, holds: Callable[[Any], bool]) -> list[Any]:
    """All messages up to the first for which `holds`."""
    messages = [await receive(gateway)]
    while not holds(messages[-1]):
        messages.append(await receive(gateway))
    return messages


async def results(gateway: ClientConnection, *ids: str) -> tuple[dict[str, list[Chunk]], dict[str, Done]]:
    """Chunks and Dones up to the last Done of these requests."""
    chunks: dict[str, list[Chunk]] = {}
    dones: dict[str, Done] = {}
    while not dones.keys() >= set(ids):
        message = await receive(gateway)
        if isinstance(message, Step):
            for chunk in message.chunks:
                chunks.setdefault(chunk.id, []).append(chunk)
        elif isinstance(message, Done):
            dones[message.id] = message
    return chunks, dones


async def test_a_connection_begins_with_the_state(served: Served) -> None:
    async with served.connect() as gateway:
        state = await receive(gateway)
        assert isinstance(state, State)
        assert (state.pod, state.sequence, state.level, state.draining) == ("pod-0", 7, 3, False)
        chat, intent = state.models
        assert (chat.name, chat.task, chat.context_tokens, chat.ready) == ("chat", "Generation", 256, True)
        assert chat.stop == ("\n\n",)
        assert (intent.name, intent.task, intent.context_tokens) == ("intent", "Classification", 64)


async def test_the_tokenizer_is_served_under_its_digest(served: Served) -> None:
    async with served.connect() as gateway:
        digest = (await receive(gateway)).models[0].tokenizer
    response = await served.http.get(f"/tokenizer/{digest}")
    assert hashlib.sha256(response.content).hexdigest() == digest
    assert response.json()["special_tokens"] == {"bos_token": "<s>", "eos_token": "</s>"}
    missing = await served.http.get("/tokenizer/00")
    assert missing.status_code == 404 and "00" in missing.json()["error"]


async def test_a_batch_of_requests_streams_and_ends(served: Served) -> None:
    async with served.connect() as gateway:
        await gateway.send(encode(Submit([generate("a"), generate("b", 9), Classify("c", "intent", [5, 6])])))
        chunks, dones = await results(gateway, "a", "b", "c")
    assert [sum(chunk.tokens for chunk in chunks[name]) for name in "ab"] == [6, 9]
    assert [chunk.level for chunk in chunks["a"]] == [3] + [None] * 5
    text_a, text_b = ("".join(chunk.text for chunk in chunks[name]) for name in "ab")
    assert text_b.startswith(text_a.rstrip("\N{REPLACEMENT CHARACTER}"))
    assert (dones["a"].finish_reason, dones["a"].prompt_tokens) == (FinishReason.LENGTH, 3)
    assert sum(score.score for score in dones["c"].scores) == pytest.approx(1)


async def test_failures_travel_and_the_next_request_works(served: Served) -> None:
    async with served.connect() as gateway:
        bad = [Generate("long", "chat", [5] * 256, Sampling(5)), Generate("none", "nope", [5], Sampling(5))]
        await gateway.send(encode(Submit([*bad, generate("good")])))
        _, dones = await results(gateway, "long", "none", "good")
    assert {name: (done.failure.status, done.failure.code) for name, done in dones.items() if done.failure} == {
        "long": (400, "context_length_exceeded"),
        "none": (404, "model_not_found"),
    }


async def test_cancelling_stops_a_stream_without_a_done(served: Served) -> None:
    async with served.connect() as gateway:
        await gateway.send(encode(Submit([generate("a", 250)])))
        await read_until(gateway, lambda message: isinstance(message, Step))
        await gateway.send(encode(Cancel(["a"])))
        await served.until(lambda: asyncio.sleep(0, served.app.state.server.engine.is_idle))
        await gateway.send(encode(Submit([generate("b")])))
        _, dones = await results(gateway, "b")
    assert list(dones) == ["b"]
    assert await served.metric('sixfold_engine_requests_total{level="3",namespace="default",outcome="cancelled"') == 1


async def test_a_closed_connection_cancels_its_requests_and_no_others(served: Served) -> None:
    async with served.connect() as stays:
        async with served.connect() as leaves:
            await stays.send(encode(Submit([generate("a", 120)])))
            await leaves.send(encode(Submit([generate("a", 250), generate("b", 250)])))
            await read_until(leaves, lambda message: isinstance(message, Step))
        _, dones = await results(stays, "a")
        assert dones["a"].completion_tokens == 120
    await served.until(lambda: asyncio.sleep(0, served.app.state.server.engine.is_idle))
    assert await served.metric('sixfold_engine_requests_total{level="3",namespace="default",outcome="cancelled"') == 2


@pytest.mark.parametrize(
    ("frame", "code", "reason"),
    [
        (b"", 1007, "malformed frame"),
        (b"\xc1", 1007, "malformed frame"),
        (b"\x81\xa4type\xa4nope", 1007, "malformed frame"),
        (b"\x82\xa4type\xa6submit\xa8requests\x01", 1007, "Expected `array`"),
        (encode(Step([])), 1007, "Invalid value 'step'"),
        ("text", 1003, "the protocol is binary msgpack"),
        (b"\x00" * 1000, 1007, "malformed frame"),
    ],
)
async def test_a_malformed_frame_closes_that_connection_with_the_reason(
    frame: bytes | str, code: int, reason: str, served: Served
) -> None:
    async with served.connect() as other, served.connect() as gateway:
        await gateway.send(frame)
        with pytest.raises(ConnectionClosed) as caught:
            await read_until(gateway, lambda _: False)
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == code and reason in caught.value.rcvd.reason
        await other.send(encode(Submit([generate("a")])))
        await results(other, "a")


async def test_another_protocol_is_refused(served: Served) -> None:
    async with connect(f"ws://127.0.0.1:{served.port}{PATH}") as gateway:
        with pytest.raises(ConnectionClosed) as caught:
            await gateway.recv()
    assert caught.value.rcvd is not None and SUBPROTOCOL in caught.value.rcvd.reason


async def test_a_change_of_level_reaches_gateways_and_state_but_not_running_requests(served: Served) -> None:
    async with served.connect() as gateway:
        await gateway.send(encode(Submit([generate("before", 200)])))
        await read_until(gateway, lambda message: isinstance(message, Step))
        served.set_level(1, sequence=8)
        await read_until(gateway, lambda message: isinstance(message, State) and message.level == 1)
        await gateway.send(encode(Submit([generate("after")])))
        chunks, dones = await results(gateway, "before", "after")
    assert (dones["before"].level, dones["after"].level, chunks["after"][0].level) == (3, 1, 1)
    state = (await served.http.get("/state")).json()
    assert (state["role"], state["pod"], state["ready"]) == ("engine", "pod-0", True)
    assert (state["sequence"], state["level"]) == (8, 1)
    assert await served.metric("sixfold_config_sequence") == 8
    assert await served.metric("sixfold_level") == 1


async def test_the_operator_is_told_what_swap_keeps_a_canary_and_comparisons_from(
    config_file: Path, chat: ServedModel, intent: ServedModel
) -> None:
    swapped = chat.model_copy(
        update={"quantized": WeightSet(name="chat-int4", path=chat.path), "full_weights": FullWeights.SWAP}
    )
    stable = default_config(0).stable.model_copy(update={"shadow": ShadowConfig(sample_rate=0.5)})
    active = (*default_config(1).stable.active_modes, Mode.QUANTIZED)
    canary = CanaryConfig(percent=5, config=stable.model_copy(update={"level": 1, "active_modes": active}))
    config = default_config(0).model_copy(update={"sequence": 8, "stable": stable, "canary": canary})
    async with serving(config_file, swapped, intent) as served:
        assert not (await served.http.get("/state")).json().get("shadowOff"), "nothing was asked for"
        served.write_config(config.model_dump_json(by_alias=True))
        await served.until(partial(served.has_applied, 8))
        state = (await served.http.get("/state")).json()
    assert "the canary of model chat" in state["unsupported"]["Quantized"]
    assert "answers of model chat aren't computed again" in state["shadowOff"]


async def test_a_refused_config_is_reported(served: Served) -> None:
    served.write_config("{")

    async def is_reported() -> bool:
        return bool((await served.http.get("/state")).json()["configError"])

    await served.until(is_reported)
    assert (await served.http.get("/state")).json()["level"] == 3


async def test_state_tells_of_running_requests(served: Served) -> None:
    async with served.connect() as watcher, served.connect() as gateway:
        await gateway.send(encode(Submit([generate("a", 250)])))
        await read_until(watcher, lambda message: isinstance(message, State) and message.running == 1)
        await gateway.send(encode(Cancel(["a"])))
        await read_until(watcher, lambda message: isinstance(message, State) and message.running == 0)


async def test_metrics_count_what_happened(served: Served) -> None:
    async with served.connect() as gateway:
        await gateway.send(encode(Submit([generate("a"), generate("b")])))
        await results(gateway, "a", "b")
        await gateway.send(encode(Submit([Classify("c", "intent", [5] * 9), Classify("d", "intent", [5])])))
        await results(gateway, "c", "d")
    labels = 'namespace="default",{}policy="local",variant="{}"'
    chat, intent = labels.format('phase="prefill",', "chat"), labels.format('phase="classify",', "intent")
    assert await served.metric(f'sixfold_tokens_total{{kind="actual",{chat}}}') == 6
    assert await served.metric(f'sixfold_tokens_total{{kind="actual",{intent}}}') == 10
    assert await served.metric(f'sixfold_tokens_total{{kind="padded",{intent}}}') in (10, 18), "alone or as one batch"
    ended = 'sixfold_engine_requests_total{level="3",namespace="default",outcome="'
    assert (await served.metric(ended + "length"), await served.metric(ended + "classified")) == (2, 2)
    assert await served.metric(f"sixfold_queue_wait_seconds_count{{{labels.format('', 'chat')}}}") == 2
    assert await served.metric(f'sixfold_engine_busy_seconds_total{{level="3",{labels.format("", "chat")}}}') > 0
    useful = 'level="3",namespace="default",outcome="useful",policy="local",variant="chat"'
    assert await served.metric(f'sixfold_flops_total{{arm="stable",cause="",estimated="false",{useful}}}') > 0
    assert await served.metric('sixfold_memory_bytes{kind="reserved"') == 0, "nothing runs"
    assert await served.metric('sixfold_memory_bytes{kind="weights"') > 100_000


async def test_draining_finishes_streams_refuses_new_work_and_says_so(served: Served) -> None:
    async with served.connect() as gateway:
        await gateway.send(encode(Submit([generate("running", 120)])))
        await read_until(gateway, lambda message: isinstance(message, Step))
        draining = asyncio.create_task(served.app.state.drain())
        await read_until(gateway, lambda message: isinstance(message, State) and message.draining)
        response = await served.http.get("/readyz")
        assert response.status_code == 503 and "draining" in response.text
        await gateway.send(encode(Submit([generate("late")])))
        _, dones = await results(gateway, "running", "late")
        await draining
    assert dones["running"].completion_tokens == 120
    assert dones["late"].failure is not None and dones["late"].failure.code == "engine_draining"


async def test_a_model_that_cannot_load_leaves_the_server_up_and_unready(
    config_file: Path, chat: ServedModel, tmp_path: Path
) -> None:
    broken = ServedModel(name="broken", task=Task.GENERATION, path=str(tmp_path / "absent"))
    async with serving(config_file, broken, chat, ready=False) as served:

        async def is_settled() -> bool:
            models = (await served.http.get("/state")).json()["models"]
            return models[0]["error"] != "" and models[1]["ready"]

        await served.until(is_settled)
        assert (await served.http.get("/healthz")).status_code == 200
        response = await served.http.get("/readyz")
        assert response.status_code == 503 and "is no folder" in response.text
        async with served.connect() as gateway:
            await gateway.send(encode(Submit([generate("a")])))
            _, dones = await results(gateway, "a")
            assert dones["a"].failure is None


async def test_without_models_it_says_so(config_file: Path) -> None:
    async with serving(config_file, ready=False) as served:
        response = await served.http.get("/readyz")
        assert response.status_code == 503 and "SIXFOLD_MODELS" in response.text


async def test_gateways_are_told_of_tasks_as_the_configuration_changes(config_file: Path, classifiers: Path) -> None:
    def offering(sequence: int, *tasks: str) -> str:
        section = SubgraphsConfig(tasks=tuple(TaskConfig(name=task) for task in tasks), on_demand=True)
        config = default_config(3)
        stable = config.stable.model_copy(update={"classification_subgraphs": section})
        return config.model_copy(update={"sequence": sequence, "stable": stable}).model_dump_json(by_alias=True)

    intent = ServedModel(name="intent", task=Task.CLASSIFICATION, path=str(classifiers / "intent"))
    async with serving(config_file, intent) as served, served.connect() as gateway, asyncio.timeout(SECONDS):
        served.write_config(offering(8, "topic", "nothing"))
        tasks: list[TaskInfo] = []
        while not tasks:
            state = await receive(gateway)
            assert isinstance(state, State)
            assert state.models[0].labels == ["bad", "so-so", "good"]
            tasks = state.models[0].tasks
        assert [(task.name, task.labels) for task in tasks] == [
            ("topic", ["sport", "music", "war", "food"]),
            ("nothing", []),
        ]
        pod = (await served.http.get("/state")).json()
        assert "nothing.safetensors is missing" in pod["models"][0]["sliceErrors"]["nothing"]


async def test_a_gateway_learns_of_kept_blocks_and_has_them_erased(config_file: Path, chat: ServedModel) -> None:
    kv = KVReuseConfig(store=KVStore.MEMORY, ttl_seconds=60, max_bytes=2**20, memory_bytes=2**20, block_tokens=8)
    config = default_config(3)
    stable = config.stable.model_copy(update={"kv_reuse": kv})
    on, off = (
        config.model_copy(update={"sequence": sequence, "stable": section}).model_dump_json(by_alias=True)
        for sequence, section in ((8, stable), (9, config.stable))
    )
    prompt = [*range(5, 45)]
    async with serving(config_file, chat) as served, served.connect() as gateway:
        state = await receive(gateway)
        assert state.models[0].kv_block_tokens == 0
        served.write_config(on)
        await read_until(gateway, lambda m: isinstance(m, State) and m.models[0].kv_block_tokens == 8)
        store = served.app.state.server.engine.shelf.store
        for name, cached in (("a", 0), ("b", 32)):
            request = Generate(name, "chat", prompt, Sampling(4, temperature=0.0), tenant="alice")
            await gateway.send(encode(Submit([request])))
            _, dones = await results(gateway, name)
            assert dones[name].cached_tokens == cached
            assert await asyncio.to_thread(store.settle, SECONDS)
        await gateway.send(encode(Prefetch("chat", "alice", "a conversation")))
        await gateway.send(encode(Erase("e1", "bob")))
        await gateway.send(encode(Erase("e2", "alice")))
        erased = [message for message in await read_until(gateway, _is_erased("e2")) if isinstance(message, Erased)]
        assert erased == [Erased("e1"), Erased("e2", 43 // 8)]
        served.write_config(off)
        await read_until(gateway, lambda m: isinstance(m, State) and m.models[0].kv_block_tokens == 0)


def _is_erased(request_id: str) -> Callable[[Any], bool]:
    return lambda message: isinstance(message, Erased) and message.id == request_id
