"""One WebSocket to one engine pod, carrying all requests that this gateway has there."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

import msgspec
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from sixfold_runtime.engine.protocol import (
    Cancel,
    Chunk,
    Done,
    Erase,
    Erased,
    Prefetch,
    Request,
    State,
    Step,
    Submit,
    decode_to_gateway,
    encode,
)

log = logging.getLogger(__name__)


class EngineLostError(Exception):
    """The connection to the engine ended before the request did."""


@dataclass(frozen=True)
class _Turn:
    model: str


Event = Chunk | Done
_Outgoing = Request | str | _Turn | Prefetch | Erase
"""A string is the id of a request to cancel."""
OnAnswer = Callable[[str, Event | None], None]


class Stream:
    """One submitted request: iterate over its events up to the Done, then close it.

    Closing it earlier cancels the request at the engine. The iteration raises EngineLostError if the socket closes.
    """

    def __init__(self, request_id: str, on_answer: OnAnswer, leave: Callable[[str, bool], None]) -> None:
        self.id = request_id
        self._on_answer = on_answer
        self._leave = leave
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._is_answered = self._is_done = self._is_closed = False

    def put(self, event: Event | None) -> None:
        """The next event; None is that there will be none."""
        self._events.put_nowait(event)
        self._answer(event)

    async def __aiter__(self) -> AsyncGenerator[Event, None]:
        while not self._is_done:
            event = await self._events.get()
            if event is None:
                raise EngineLostError
            self._is_done = isinstance(event, Done)
            yield event

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._leave(self.id, self._is_done)
            self._answer(None)

    def _answer(self, event: Event | None) -> None:
        if not self._is_answered:
            self._is_answered = True
            self._on_answer(self.id, event)


class Session:
    """A live connection. It ends with the socket; a new connection is a new session.

    Attributes:
        state: what the engine said last; None until it said something.
        last_used: grows with each request, over all sessions: breaks ties between equally busy engines.
    """

    _uses = itertools.count(1)

    def __init__(self, socket: ClientConnection, on_state: Callable[[], None]) -> None:
        self.state: State | None = None
        self.last_used = 0
        self._socket = socket
        self._on_state = on_state
        self._streams: dict[str, Stream] = {}
        self._outgoing: asyncio.Queue[_Outgoing] = asyncio.Queue()
        self._turns: set[str] = set()
        self._erasures: dict[str, asyncio.Future[Erased]] = {}
        self._open = True

    @property
    def in_flight(self) -> int:
        return len(self._streams)

    @property
    def is_open(self) -> bool:
        return self._open

    async def run(self) -> None:
        """Read and write until the socket closes. Raises what broke it, if it broke."""
        writer = asyncio.create_task(self._write())
        try:
            async for frame in self._socket:
                self._receive(frame if isinstance(frame, bytes) else frame.encode())
        finally:
            self._open = False
            writer.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionClosed):
                await writer
            for stream in list(self._streams.values()):
                stream.put(None)
            for erasure in self._erasures.values():
                erasure.cancel()

    def give_turn(self, model: str) -> None:
        """Let the engine exchange a model's weights; once for each time that it waits for that."""
        if model not in self._turns:
            self._turns.add(model)
            self._outgoing.put_nowait(_Turn(model))

    def _receive(self, frame: bytes) -> None:
        message = decode_to_gateway(frame)
        if isinstance(message, Step):
            for chunk in message.chunks:
                self._deliver(chunk)
        elif isinstance(message, Done):
            self._deliver(message)
        elif isinstance(message, Erased):
            erasure = self._erasures.get(message.id)
            if erasure is not None and not erasure.done():
                erasure.set_result(message)
        else:
            self.state = message
            self._turns &= {model.name for model in message.models if model.swap_pending}
            self._on_state()

    def _deliver(self, event: Event) -> None:
        stream = self._streams.get(event.id)
        if stream is not None:  # else the client left a moment ago
            stream.put(event)

    async def _write(self) -> None:
        """Requests that wait together travel in one Submit, cancellations in one Cancel."""
        while True:
            items = [await self._outgoing.get()]
            while not self._outgoing.empty():
                items.append(self._outgoing.get_nowait())
            requests = [item for item in items if isinstance(item, Request)]
            turns = [item.model for item in items if isinstance(item, _Turn)]
            cancelled = [item for item in items if isinstance(item, str)]
            if requests or turns:
                await self._socket.send(encode(Submit(requests, turns)))
            if cancelled:
                await self._socket.send(encode(Cancel(cancelled)))
            for item in items:
                if isinstance(item, Prefetch | Erase):
                    await self._socket.send(encode(item))

    def prefetch(self, model: str, tenant: str, conversation: str) -> None:
        """Tell the engine that a request of this conversation is on its way."""
        self._outgoing.put_nowait(Prefetch(model, tenant, conversation))

    async def erase(self, tenant: str, timeout_seconds: float) -> Erased:
        """Have the engine forget a tenant's keys and values. What goes wrong is in the answer's `error`."""
        pod = self.state.pod if self.state is not None else "an engine"
        if not self._open:
            return Erased("", error=f"{pod} was lost")
        erase_id = secrets.token_hex(12)
        answer = self._erasures[erase_id] = asyncio.get_running_loop().create_future()
        self._outgoing.put_nowait(Erase(erase_id, tenant))
        try:
            await asyncio.wait([answer], timeout=timeout_seconds)
        finally:
            del self._erasures[erase_id]
        if not answer.done():
            return Erased(erase_id, error=f"{pod} did not answer within {timeout_seconds:.0f} s")
        return Erased(erase_id, error=f"{pod} was lost") if answer.cancelled() else answer.result()

    def submit(self, requests: Sequence[Request], on_answer: OnAnswer) -> list[Stream]:
        """Send requests together and in this order. Whoever gets the streams closes them.

        Args:
            on_answer: called once for each request: with its first event, or with None if it ends without one.

        Raises:
            EngineLostError: the socket is closed.
        """
        if not self._open:
            raise EngineLostError
        streams = [Stream(request.id, on_answer, self._leave) for request in requests]
        self._streams.update((stream.id, stream) for stream in streams)
        self.last_used = next(self._uses)
        for request in requests:
            self._outgoing.put_nowait(request)
        return streams

    def _leave(self, request_id: str, is_done: bool) -> None:
        self._streams.pop(request_id, None)
        if not is_done and self._open:
            self._outgoing.put_nowait(request_id)


PROTOCOL_ERRORS = (msgspec.DecodeError, msgspec.ValidationError)
