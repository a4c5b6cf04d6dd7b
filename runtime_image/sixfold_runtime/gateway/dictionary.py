"""The zstd dictionary of streamed answers: a file that is followed, and the endpoint where clients get it."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import zstandard
from fastapi import APIRouter, Request
from starlette.responses import Response

from sixfold_api.names import STREAM_DICTIONARY_FILE
from sixfold_runtime.gateway.errors import ApiError

if TYPE_CHECKING:
    from sixfold_runtime.gateway.core import Gateway

log = logging.getLogger(__name__)
PATH = "/v1/stream-dictionary"
MAX_BYTES = 2**20
"""What a ConfigMap may hold."""


@dataclass(frozen=True)
class Dictionary:
    """Bytes that compressor and decompressor both know before an answer begins."""

    data: bytes

    @cached_property
    def sha256(self) -> str:
        """In hex."""
        return hashlib.sha256(self.data).hexdigest()

    @property
    def path(self) -> str:
        return f"{PATH}/{self.sha256}"

    @cached_property
    def trained(self) -> zstandard.ZstdCompressionDict:
        """With the statistics that training left in it, if it has any."""
        return zstandard.ZstdCompressionDict(self.data)

    @cached_property
    def raw(self) -> zstandard.ZstdCompressionDict:
        """As bytes that are looked back at, whatever they are: what RFC 9842 asks for."""
        return zstandard.ZstdCompressionDict(self.data, dict_type=zstandard.DICT_TYPE_RAWCONTENT)


def usable(data: bytes) -> Dictionary:
    """The dictionary in a file's bytes. Raises ValueError with what is wrong with it."""
    if not data:
        raise ValueError("it is empty")
    if len(data) > MAX_BYTES:
        raise ValueError(f"it has {len(data)} bytes; {MAX_BYTES} are the most")
    dictionary = Dictionary(data)
    try:
        zstandard.ZstdCompressor(dict_data=dictionary.trained).compress(b"data: {}")
    except zstandard.ZstdError as error:
        raise ValueError(f"zstd doesn't take it ({error}); make it with `sixfold dictionary train`") from error
    return dictionary


class DictionaryFile:
    """The file `dictionary` of a directory, or any other file itself, read again when it changed.

    Attributes:
        problem: why there is no dictionary, though one was asked for; "" where all is well. As of the last look.
    """

    def __init__(self, directory: Path | None) -> None:
        self.problem = ""
        self._path = directory
        if directory is not None and not directory.is_file():
            self._path = directory / STREAM_DICTIONARY_FILE
        self._seen: tuple[int, int, int] | None = None
        self._current: Dictionary | None = None

    @property
    def current(self) -> Dictionary | None:
        """The dictionary to use now. Asks the file system once; cheap enough for each answer."""
        if self._path is None:
            return None
        try:
            stat = self._path.stat()
        except OSError:
            if self._seen is not None:
                log.info("the stream dictionary is gone")
            self._seen = self._current = None
            self.problem = f"there is no stream dictionary: {self._path} is missing"
            return None
        seen = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        if seen != self._seen:
            self._seen = seen
            self._read(self._path)
        return self._current

    def _read(self, path: Path) -> None:
        self._current, self.problem = None, ""
        try:
            self._current = usable(path.read_bytes())
            log.info("stream dictionary of %d bytes in use: %s", len(self._current.data), self._current.sha256)
        except (OSError, ValueError) as error:
            self.problem = f"the stream dictionary can't be used: {getattr(error, 'strerror', None) or error}"
            log.error("%s", self.problem)


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter()

    @routes.get(PATH + "/{sha256}", response_class=Response)
    async def stream_dictionary(request: Request, sha256: str) -> Response:
        """The zstd dictionary with this SHA-256, if it is the one in use. It never changes, so keep it."""
        gateway.authenticate(request)
        dictionary = gateway.stream_dictionary.current
        if dictionary is None or dictionary.sha256 != sha256.lower():
            raise ApiError(404, "unknown_dictionary", "another stream dictionary is in use; answers link to it")
        headers = {"Cache-Control": "private, max-age=2592000, immutable", "Use-As-Dictionary": 'match="/v1/*"'}
        return Response(dictionary.data, headers=headers, media_type="application/octet-stream")

    return routes
