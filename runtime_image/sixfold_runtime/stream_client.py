"""Reads streams in the form `sse-zstd` (see `modes/streaming.py`) with httpx, and so with `openai`.

    client = OpenAI(base_url=..., http_client=httpx.Client(transport=SseZstdTransport()))
    client = AsyncOpenAI(base_url=..., http_client=httpx.AsyncClient(transport=AsyncSseZstdTransport()))

`openai` takes a client of httpx as it does one of httpx2. Only for clients behind proxies that strip encodings: others
get zstd from httpx itself where `zstandard` is installed, and gzip or zstd from httpx2.
Needs httpx and zstandard, nothing else of this package.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator

import httpx
import zstandard

HEADER = "X-Stream-Compression"
FORM = "sse-zstd"


class StreamDecodeError(Exception):
    """What came isn't a whole sse-zstd stream."""


class SseZstdDecoder:
    """Of one answer. Bytes may be fed as they come, cut anywhere."""

    def __init__(self, dictionary: bytes | None = None) -> None:
        held = None if dictionary is None else zstandard.ZstdCompressionDict(dictionary)
        self._zstd = zstandard.ZstdDecompressor(dict_data=held).decompressobj()
        self._line = b""

    def decode(self, data: bytes) -> bytes:
        """The text that has arrived whole. Raises StreamDecodeError."""
        *lines, self._line = (self._line + data).split(b"\n")
        text = b""
        for line in lines:
            if line.startswith(b"data:"):
                text += self._decode_event(line.removeprefix(b"data:").strip())
        return text

    def _decode_event(self, event: bytes) -> bytes:
        try:
            return self._zstd.decompress(base64.b64decode(event, validate=True))
        except (ValueError, EOFError, zstandard.ZstdError) as error:
            raise StreamDecodeError(f"an event of the {FORM} stream doesn't decode: {error}") from error

    def end(self) -> None:
        """To be called after the last bytes. Raises StreamDecodeError if more should have come."""
        if not self._zstd.eof:
            raise StreamDecodeError(f"the {FORM} stream was cut before its end")


def decode(parts: Iterable[bytes], dictionary: bytes | None = None) -> Iterator[bytes]:
    """The text of an answer, from its bytes as they come. Raises StreamDecodeError."""
    decoder = SseZstdDecoder(dictionary)
    for part in parts:
        if text := decoder.decode(part):
            yield text
    decoder.end()


async def decode_async(parts: AsyncIterable[bytes], dictionary: bytes | None = None) -> AsyncIterator[bytes]:
    """As `decode`."""
    decoder = SseZstdDecoder(dictionary)
    async for part in parts:
        if text := decoder.decode(part):
            yield text
    decoder.end()


class _Form:
    """What a transport asks for, and how it reads an answer."""

    def __init__(self, dictionary: bytes | None) -> None:
        self._dictionary = dictionary
        digest = None if dictionary is None else hashlib.sha256(dictionary).hexdigest()
        self._asked = FORM if digest is None else f"{FORM}; dictionary={digest}"

    def ask(self, request: httpx.Request) -> None:
        request.headers[HEADER] = self._asked
        request.headers["Accept-Encoding"] = "identity"

    def dictionary(self, answer: httpx.Response) -> bytes | None:
        return self._dictionary if "dictionary=" in answer.headers[HEADER] else None

    @staticmethod
    def is_used(answer: httpx.Response) -> bool:
        return str(answer.headers.get(HEADER, "")).split(";")[0].strip() == FORM

    @staticmethod
    def decoded(answer: httpx.Response, stream: httpx.SyncByteStream | httpx.AsyncByteStream) -> httpx.Response:
        gone = ("content-encoding", "content-length", "transfer-encoding")
        headers = [(name, value) for name, value in answer.headers.multi_items() if name not in gone]
        return httpx.Response(answer.status_code, headers=headers, stream=stream, extensions=answer.extensions)


class SseZstdTransport(httpx.BaseTransport):
    """Asks for sse-zstd and reads it; other answers pass as they are.

    A stream that ends too early is an httpx.RemoteProtocolError, so no caller takes it for a whole answer.
    """

    def __init__(self, transport: httpx.BaseTransport | None = None, dictionary: bytes | None = None) -> None:
        """`transport` carries it, by default over HTTP; `dictionary` is the file that the gateway uses, if it does."""
        self._transport = transport or httpx.HTTPTransport()
        self._form = _Form(dictionary)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self._form.ask(request)
        answer = self._transport.handle_request(request)
        if not self._form.is_used(answer):
            return answer
        answer.request = request
        return self._form.decoded(answer, _Decoded(answer, self._form.dictionary(answer)))

    def close(self) -> None:
        self._transport.close()


class AsyncSseZstdTransport(httpx.AsyncBaseTransport):
    """As SseZstdTransport, for httpx.AsyncClient."""

    def __init__(self, transport: httpx.AsyncBaseTransport | None = None, dictionary: bytes | None = None) -> None:
        self._transport = transport or httpx.AsyncHTTPTransport()
        self._form = _Form(dictionary)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self._form.ask(request)
        answer = await self._transport.handle_async_request(request)
        if not self._form.is_used(answer):
            return answer
        answer.request = request
        return self._form.decoded(answer, _AsyncDecoded(answer, self._form.dictionary(answer)))

    async def aclose(self) -> None:
        await self._transport.aclose()


class _Decoded(httpx.SyncByteStream):
    def __init__(self, answer: httpx.Response, dictionary: bytes | None) -> None:
        self._answer = answer
        self._dictionary = dictionary

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from decode(self._answer.iter_bytes(), self._dictionary)
        except StreamDecodeError as error:
            raise httpx.RemoteProtocolError(str(error), request=self._answer.request) from error

    def close(self) -> None:
        self._answer.close()


class _AsyncDecoded(httpx.AsyncByteStream):
    def __init__(self, answer: httpx.Response, dictionary: bytes | None) -> None:
        self._answer = answer
        self._dictionary = dictionary

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for text in decode_async(self._answer.aiter_bytes(), self._dictionary):
                yield text
        except StreamDecodeError as error:
            raise httpx.RemoteProtocolError(str(error), request=self._answer.request) from error

    async def aclose(self) -> None:
        await self._answer.aclose()
