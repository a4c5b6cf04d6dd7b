"""A real gateway process over an engine that says what it is told, at the pace that it is told.

The engine speaks the real protocol; only its tokens are read from a list, since no model here writes both languages.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import uvicorn
from stack import REPOSITORY
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from sixfold_api.scalars import Task
from sixfold_runtime.config import default_config
from sixfold_runtime.engine.protocol import (
    PATH,
    SUBPROTOCOL,
    Chunk,
    Done,
    FinishReason,
    Generate,
    ModelInfo,
    State,
    Step,
    Submit,
    ToGateway,
    decode_to_engine,
    encode,
)
from sixfold_runtime.engine.tokenizer import load_tokenizer

_CPU = re.compile(r"^process_cpu_seconds_total\S* (\S+)$", re.MULTILINE)


@dataclass
class Script:
    """What an answer says, how fast, and when each of its tokens left the engine."""

    pieces: list[str]
    pace_seconds: float
    sent_unix_seconds: list[float] = field(default_factory=list)


class ReplayEngine:
    """Answers a request whose prompt is N tokens long with the script of that length."""

    def __init__(self) -> None:
        self.scripts: dict[str, Script] = {}
        self._tokenizer = load_tokenizer(REPOSITORY / "examples" / "models" / "chat")
        routes = [WebSocketRoute(PATH, self._serve), Route("/tokenizer/{sha256}", self._bundle)]
        self.app = Starlette(routes=routes)

    async def _bundle(self, _: Request) -> Response:
        return Response(self._tokenizer.bundle, media_type="application/json")

    def _state(self) -> State:
        model = ModelInfo(name="chat", task=Task.GENERATION, context_tokens=32_768, tokenizer=self._tokenizer.sha256)
        return State(pod="replay", models=[model], sequence=0, level=3)

    async def _serve(self, socket: WebSocket) -> None:
        await socket.accept(SUBPROTOCOL)
        lock = asyncio.Lock()

        async def send(message: ToGateway) -> None:
            async with lock:
                await socket.send_bytes(encode(message))

        await send(self._state())
        answers: set[asyncio.Task[None]] = set()
        try:
            while True:
                message = decode_to_engine(await socket.receive_bytes())
                for request in message.requests if isinstance(message, Submit) else ():
                    if isinstance(request, Generate):
                        answers.add(asyncio.create_task(self._answer(request, send)))
        except WebSocketDisconnect:
            for answer in answers:
                answer.cancel()

    async def _answer(self, request: Generate, send: object) -> None:
        # The request's seed says which script, since nothing else of it comes through as it was.
        script = self.scripts[str(request.sampling.seed)]
        clock, start = asyncio.get_running_loop().time, asyncio.get_running_loop().time()
        for at, piece in enumerate(script.pieces):
            await asyncio.sleep(max(0.0, start + at * script.pace_seconds - clock()))
            chunk = Chunk(id=request.id, text=piece, tokens=1, level=3 if at == 0 else None)
            if piece:
                script.sent_unix_seconds.append(time.time())
            await send(Step([chunk]))  # type: ignore[operator]
        count = len(script.pieces)
        await send(Done(request.id, FinishReason.STOP, 3, len(request.token_ids), count))  # type: ignore[operator]


@dataclass(frozen=True)
class Gateway:
    """A `sixfold serve --role gateway`."""

    url: str
    engine: ReplayEngine

    def cpu_seconds(self) -> float:
        """What the process has used so far."""
        metrics = httpx.get(f"{self.url}/metrics", trust_env=False).text
        return float(_CPU.search(metrics)[1])  # type: ignore[index]


@contextmanager
def serving() -> Iterator[Gateway]:
    """The gateway's process; the engine is a thread of this one."""
    with ExitStack() as stack:
        engine = ReplayEngine()
        listener = socket.create_server(("127.0.0.1", 0))
        options = {"log_config": None, "ws_per_message_deflate": False}
        server = uvicorn.Server(uvicorn.Config(engine.app, **options))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        stack.callback(thread.join, 10)
        stack.callback(setattr, server, "should_exit", True)
        folder = Path(stack.enter_context(TemporaryDirectory()))
        (folder / "config.json").write_text(default_config(3).model_dump_json(by_alias=True))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        environment = {
            "SIXFOLD_ENGINES": json.dumps([f"127.0.0.1:{listener.getsockname()[1]}"]),
            "SIXFOLD_CONFIG_DIRECTORY": str(folder),
            "SIXFOLD_HOST": "127.0.0.1",
            "SIXFOLD_DRAIN_SECONDS": "1",
        }
        command = [sys.executable, "-m", "sixfold_runtime.cli", "serve", "--role", "gateway", "--port", str(port)]
        log = stack.enter_context((folder / "log").open("wb"))
        process = subprocess.Popen(command, env=os.environ | environment, stdout=log, stderr=log)
        stack.callback(process.wait)
        stack.callback(process.kill)
        gateway = Gateway(f"http://127.0.0.1:{port}", engine)
        _wait_ready(gateway.url, process, folder / "log")
        yield gateway


def _wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/readyz", trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"the gateway doesn't get ready:\n{log.read_text()[-2000:]}")
