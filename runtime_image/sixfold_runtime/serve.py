"""Runs a gateway, an engine, or both in one process, and stops them so that no request fails."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import prometheus_client

from sixfold_api.runtime_config import Role
from sixfold_runtime.config import ConfigStore
from sixfold_runtime.http_server import Server, server_config
from sixfold_runtime.settings import RuntimeSettings
from sixfold_runtime.tls import PeerContext

log = logging.getLogger(__name__)
LAME_DUCK_SECONDS = 2.5
"""How long a stopping gateway, already unready, still takes new requests: load balancers learn of it a moment
later."""
LAST_WORDS_SECONDS = 1.0
"""Before a stopping gateway's time is over, what still runs ends with an error that says so."""

DEAF_PEER_MILLISECONDS = 90_000
"""After so long the kernel ends a connection whose peer acknowledges or reads nothing. A little more than the gateway's
own limit for streams, which ends the work."""


class ServeError(Exception):
    """Why nothing can be served, for the person who started it."""


@dataclass(frozen=True)
class _Part:
    """A server, and how it stops taking work; its running requests end after that."""

    server: Server
    listener: socket.socket
    quiesce: Callable[[], Awaitable[None]]

    async def run(self) -> None:
        await self.server.serve(sockets=[self.listener])

    async def stop(self) -> None:
        await self.quiesce()
        self.server.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one. Raises ServeError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; each connection inherits it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAF_PEER_MILLISECONDS)
        listener.bind((host, port))
    except OSError as error:
        advice = "; choose another with --port" if error.errno == errno.EADDRINUSE else ""
        raise ServeError(f"can't listen on {host}:{port}: {error.strerror}{advice}") from error
    return listener


def _url(listener: socket.socket, scheme: str = "http") -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def serve(settings: RuntimeSettings, role: Role, config: ConfigStore) -> None:
    """Serve until SIGTERM or SIGINT; a second one ends at once. Raises ServeError."""
    # They are a second series for each counter, which nobody reads.
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    # A port that is taken is known at once, an engine takes seconds to import.
    public = listen(settings.host, settings.engine_port if role is Role.ENGINE else settings.gateway_port)
    parts = []
    if role is Role.ALL:
        listener = listen("127.0.0.1", 0)
        update = {"engines": [f"127.0.0.1:{listener.getsockname()[1]}"], "tls_directory": None}
        settings = settings.model_copy(update=update)
        parts += _engine(settings, config, listener)
    parts += (_engine if role is Role.ENGINE else _gateway)(settings, config, public)
    asyncio.run(_run(parts, config))


def _gateway(settings: RuntimeSettings, config: ConfigStore, listener: socket.socket) -> list[_Part]:
    from sixfold_runtime.gateway.app import create_gateway_app

    try:
        app = create_gateway_app(settings, config)
    except ValueError as error:
        raise ServeError(str(error)) from error
    lame_duck_seconds = min(LAME_DUCK_SECONDS, settings.drain_seconds)

    async def quiesce() -> None:
        app.state.gateway.drain(max(lame_duck_seconds, settings.drain_seconds - LAST_WORDS_SECONDS))
        await asyncio.sleep(lame_duck_seconds)

    log.info("gateway of %s/%s at %s", settings.namespace, settings.policy, _url(listener))
    return [_Part(Server(server_config(app, settings.drain_seconds - lame_duck_seconds)), listener, quiesce)]


def _engine(settings: RuntimeSettings, config: ConfigStore, listener: socket.socket) -> list[_Part]:
    """One server; two where gateways have to prove themselves, which observers can't."""
    from sixfold_runtime.engine.server import create_engine_app, create_observer_app

    app = create_engine_app(settings, config)

    async def quiesce() -> None:
        await app.state.drain()

    log.info("engine of %s/%s at %s", settings.namespace, settings.policy, _url(listener))
    if settings.tls_directory is None:
        return [_Part(Server(server_config(app, settings.drain_seconds)), listener, quiesce)]
    wire = listen(settings.host, settings.engine_tls_port)
    log.info("gateways are served at %s", _url(wire, "https"))
    context = PeerContext(settings.tls_directory, is_server=True)
    observers = Server(server_config(create_observer_app(app), settings.drain_seconds))
    return [
        _Part(observers, listener, _at_once),
        _Part(Server(server_config(app, settings.drain_seconds, context)), wire, quiesce),
    ]


async def _at_once() -> None:
    """Nothing has to end before."""


async def _run(parts: list[_Part], config: ConfigStore) -> None:
    """Run all parts; on a signal stop the last one first, since it sends its requests to those before it."""
    stop = asyncio.Event()

    def on_signal(name: str) -> None:
        if stop.is_set():
            for part in parts:
                part.server.should_exit = part.server.force_exit = True
        log.info("%s: finishing running requests", name)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number.name)
    follow = asyncio.create_task(config.run())
    running = [asyncio.create_task(part.run()) for part in parts]
    stopping = asyncio.create_task(_stop(stop, parts, running))
    try:
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        stop.set()
        await asyncio.gather(*running)
    finally:
        for task in (follow, stopping):
            task.cancel()


async def _stop(stop: asyncio.Event, parts: list[_Part], running: list[asyncio.Task[None]]) -> None:
    await stop.wait()
    for part, task in zip(reversed(parts), reversed(running), strict=True):
        await part.stop()
        await asyncio.wait({task})
