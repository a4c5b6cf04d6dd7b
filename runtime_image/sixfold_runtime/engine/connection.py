"""One gateway's WebSocket, seen from the engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

import msgspec
from fastapi import WebSocket, WebSocketDisconnect

from sixfold_runtime.engine.engine import Engine
from sixfold_runtime.engine.kv_messages import erase, prefetch
from sixfold_runtime.engine.protocol import (
    Cancel,
    Chunk,
    Done,
    Prefetch,
    State,
    Step,
    Submit,
    ToGateway,
    decode_to_engine,
    encode,
)
from sixfold_runtime.engine.traces import RequestTraces
from sixfold_runtime.tracing import Tracing

log = logging.getLogger(__name__)

_UNSUPPORTED_DATA, _INVALID_PAYLOAD = 1003, 1007
_MAX_REASON_BYTES = 120
"""A close frame holds 123 bytes of reason."""


class Connection:
    """Moves frames between a WebSocket and the engine. It is the sink of all requests that came over it."""

    def __init__(self, socket: WebSocket, engine: Engine, tracing: Tracing | None = None) -> None:
        self._socket = socket
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[ToGateway] = asyncio.Queue()
        self._is_sending = False
        self._traces = RequestTraces(tracing) if tracing is not None else None

    @property
    def is_flushed(self) -> bool:
        """Whether everything queued has been handed to the socket."""
        return self._outbox.empty() and not self._is_sending

    def send(self, message: State) -> None:
        """Queue a message; from the event loop."""
        self._outbox.put_nowait(message)

    def deliver(self, chunks: Sequence[Chunk], dones: Sequence[Done]) -> None:
        """Queue a step's results; from any thread."""
        if self._traces is not None:
            self._traces.delivered(chunks, dones)
        messages: list[ToGateway] = [Step(list(chunks))] if chunks else []
        messages += dones
        self._from_thread(messages)

    async def run(self) -> None:
        """Serve until either side closes; then cancel all that came over this connection."""
        writer = asyncio.create_task(self._write())
        try:
            await self._read()
        except WebSocketDisconnect:
            pass
        finally:
            self._engine.drop(self)
            writer.cancel()

    def _from_thread(self, messages: list[ToGateway]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._put, messages)

    def _put(self, messages: list[ToGateway]) -> None:
        for message in messages:
            self._outbox.put_nowait(message)

    async def _write(self) -> None:
        try:
            while True:
                message = await self._outbox.get()
                self._is_sending = True
                await self._socket.send_bytes(encode(message))
                self._is_sending = False
        except (WebSocketDisconnect, RuntimeError) as error:
            # The reader meets the same end and cleans up.
            log.info("a gateway's connection ended while sending: %s", error)

    async def _read(self) -> None:
        while True:
            event = await self._socket.receive()
            if event["type"] == "websocket.disconnect":
                return
            frame = event.get("bytes")
            if frame is None:
                await self._refuse(_UNSUPPORTED_DATA, "text frame: the protocol is binary msgpack")
                return
            try:
                message = decode_to_engine(frame)
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                await self._refuse(_INVALID_PAYLOAD, f"malformed frame: {error}")
                return
            if isinstance(message, Submit):
                if self._traces is not None:
                    self._traces.arrived(message.requests)
                self._engine.submit(self, message.requests)
                self._engine.give_turns(set(message.swap_turns))
            elif isinstance(message, Cancel):
                if self._traces is not None:
                    self._traces.forget(message.ids)
                self._engine.cancel(self, message.ids)
            elif isinstance(message, Prefetch):
                prefetch(self._engine, message)
            else:
                erase(self._engine, message, lambda erased: self._from_thread([erased]))

    async def _refuse(self, code: int, reason: str) -> None:
        log.warning("closing a gateway's connection (%d): %s", code, reason)
        await self._socket.close(code, reason.encode()[:_MAX_REASON_BYTES].decode(errors="ignore"))
