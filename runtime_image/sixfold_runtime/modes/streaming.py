"""Compressed streaming: who gets it, and the compressor. Pure."""

from __future__ import annotations

import zstandard

from sixfold_api.modes import LEVEL_FROM, Mode
from sixfold_api.runtime_config import StreamingConfig
from sixfold_api.scalars import Compression

ZSTD = "zstd"


def accepts(accept_encoding: str, coding: str) -> bool:
    """Whether an Accept-Encoding header (RFC 9110, 12.5.3) names `coding`, or `*`, with a weight above 0."""
    weights: dict[str, float] = {}
    for item in accept_encoding.lower().split(","):
        name, *parameters = (part.strip() for part in item.split(";"))
        weights[name] = _weight(parameters)
    return weights.get(coding, weights.get("*", 0.0)) > 0.0


def _weight(parameters: list[str]) -> float:
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return float(parameter.removeprefix("q="))
            except ValueError:
                return 0.0
    return 1.0


def content_encoding(accept_encoding: str, level: int, config: StreamingConfig) -> str | None:
    """`zstd` or None for a stream whose request was admitted at rollback level `level`."""
    if level < LEVEL_FROM[Mode.COMPRESSED_STREAMING] or config.compression is not Compression.AUTO:
        return None
    return ZSTD if accepts(accept_encoding, ZSTD) else None


class StreamCompressor:
    """One zstd frame for the whole stream, flushed after every event so that each decodes on arrival.

    One frame keeps the history: events of one stream are alike, so an event costs a few bytes. The flush is
    COMPRESSOBJ_FLUSH_BLOCK; `zstandard.FLUSH_BLOCK` has the value of FINISH and would end the frame.
    """

    def __init__(self, level: int) -> None:
        self._compressor = zstandard.ZstdCompressor(level=level).compressobj()

    def event(self, data: bytes) -> bytes:
        return self._compressor.compress(data) + self._compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)

    def end(self) -> bytes:
        return self._compressor.flush(zstandard.COMPRESSOBJ_FLUSH_FINISH)
