"""HTTP for kubelet and Prometheus: /metrics, /healthz (fails when the loop stalls), /readyz."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

log = logging.getLogger(__name__)

Check = Callable[[], str]
"""Returns what is wrong; empty if nothing is."""


async def serve(port: int, stalled: Check, unready: Check, role: Callable[[], str]) -> tuple[web.AppRunner, int]:
    """Start listening on all addresses; returns the runner (`await runner.cleanup()` ends it) and the port.

    A standby is ready too: `role` is what /readyz then says.
    """
    app = web.Application()
    app.add_routes(
        [
            web.get("/metrics", _metrics),
            web.get("/healthz", _handler(stalled, lambda: "ok")),
            web.get("/readyz", _handler(unready, role)),
        ]
    )
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, None, port)
    await site.start()
    bound: int = runner.addresses[0][1]
    return runner, bound


def _handler(check: Check, well: Callable[[], str]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_: web.Request) -> web.Response:
        problem = check()
        return web.Response(text=problem or well(), status=503 if problem else 200)

    return answer


async def _metrics(_: web.Request) -> web.Response:
    return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})
