"""GET /: a page to try the endpoint with, for development. It holds no key: whoever opens it types one in."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from sixfold_runtime.gateway.core import Gateway

_DIRECTORY = Path(__file__).parent / "demo_page"
_ASSETS = "/demo/"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".wasm": "application/wasm",
}
_HEADERS = {
    # Nothing from elsewhere and nothing inline. The decoder of compressed streams is WebAssembly.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; img-src 'self';"
        " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
        " require-trusted-types-for 'script'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class _File:
    data: bytes
    media_type: str
    etag: str


def router(gateway: Gateway) -> APIRouter:
    """The page's routes; they answer as unknown paths do while the configuration has the page off."""
    routes = APIRouter(include_in_schema=False)
    files = {path.relative_to(_DIRECTORY).as_posix(): _read(path) for path in _page_files()}

    def respond(request: Request, name: str) -> Response:
        file = files.get(name)
        if file is None or not gateway.config.current.stable.demo_page:
            raise HTTPException(404)
        headers = _HEADERS | {"ETag": file.etag}
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        return Response(file.data, headers=headers, media_type=file.media_type)

    @routes.get("/")
    async def page(request: Request) -> Response:
        return respond(request, "index.html")

    @routes.get(_ASSETS + "{name:path}")
    async def asset(request: Request, name: str) -> Response:
        return respond(request, name)

    return routes


def _page_files() -> list[Path]:
    # The client module's folder is a link in the source tree and a copy in the wheel.
    folders = [_DIRECTORY, _DIRECTORY / "stream-client"]
    return [path for folder in folders for path in folder.iterdir() if path.suffix in _TYPES]


def _read(path: Path) -> _File:
    data = path.read_bytes()
    return _File(data, _TYPES[path.suffix], f'"{hashlib.sha256(data).hexdigest()[:32]}"')
