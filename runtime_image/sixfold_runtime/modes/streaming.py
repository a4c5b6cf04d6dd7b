"""Compressed streaming: who gets which form, and when tokens are sent. Pure.

A streamed answer is a text of server-sent events. It travels in one of these forms:

- `zstd`, `gzip`: a Content-Encoding over the text, for clients that accept one (Accept-Encoding).
- `dcz`: the same with zstd and a dictionary that the client holds (RFC 9842: Available-Dictionary).
- `identity`: the text as it is.
- `sse-zstd`: for clients behind proxies that strip encodings or hold back what isn't plain events. The client sends
  `X-Stream-Compression: sse-zstd`; the answer has the header `X-Stream-Compression: sse-zstd`, no Content-Encoding, and
  Content-Type `text/event-stream`. Its events, the outer ones, are all of this shape and nothing else::

      data: <base64>\\n\\n

  The base64 (RFC 4648, 4: alphabet with + and /, padded) is decoded for each outer event by itself. The bytes of all
  outer events, put together, are ONE zstd frame (RFC 8878) without content size and checksum, window at most 128 KiB.
  It is flushed at each outer event, so what has arrived always decodes to one or several whole inner events. The last
  outer event ends the frame: a stream that ends before its frame was cut. The decoded bytes are exactly the text that
  an uncompressed answer would have been, `data: [DONE]` included; there is no outer `[DONE]`.

  A client that holds a dictionary says so: `X-Stream-Compression: sse-zstd; dictionary=<SHA-256, hex>`. If it is the
  gateway's current one, it is used and the answer's header is the same as the request's; otherwise the header is
  `sse-zstd` and no dictionary is used. A client that names none never gets one. To get it for the next answers: each
  answer has `Link: </v1/stream-dictionary/<SHA-256, hex>>; rel="compression-dictionary"` while the gateway has one.

`X-Stream-Compression: identity` asks for plain text whatever Accept-Encoding says: browsers set that by themselves. An
answer to a request with X-Stream-Compression says in the same header which was used; without the request's header it
isn't there. Below rollback level 3 and with compression Off all answers are `identity`.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from enum import StrEnum

from sixfold_api.modes import LEVEL_FROM, Mode
from sixfold_api.runtime_config import StreamingConfig
from sixfold_api.scalars import Compression

SEND_INTERVAL_SECONDS = 0.005
"""Tokens that come faster than this are sent together."""


class Form(StrEnum):
    """How a streamed answer travels."""

    IDENTITY = "identity"
    GZIP = "gzip"
    ZSTD = "zstd"
    DCZ = "dcz"
    SSE_ZSTD = "sse-zstd"


@dataclass(frozen=True)
class Asked:
    """What the client's headers ask for.

    Attributes:
        accept_encoding: Accept-Encoding, or "".
        form: of X-Stream-Compression; None without that header.
        dictionary: hex SHA-256 of the dictionary that the client holds, or "".
    """

    accept_encoding: str = ""
    form: Form | None = None
    dictionary: str = ""


def asked(accept_encoding: str, stream_compression: str, available_dictionary: str) -> Asked:
    """From the values of Accept-Encoding, X-Stream-Compression and Available-Dictionary, each "" where it is absent.

    Raises ValueError with a message for the caller if X-Stream-Compression can't be understood.
    """
    if not stream_compression.strip():
        return Asked(accept_encoding, dictionary=_byte_sequence(available_dictionary).hex())
    name, *parameters = (part.strip() for part in stream_compression.lower().split(";"))
    if name not in (Form.SSE_ZSTD, Form.IDENTITY):
        raise ValueError("X-Stream-Compression may be sse-zstd or identity; other codings go into Accept-Encoding")
    held = ""
    for parameter in parameters:
        match = re.fullmatch(r'dictionary="?([0-9a-f]{64})"?', parameter)
        if match is None or name != Form.SSE_ZSTD:
            raise ValueError("X-Stream-Compression: expected `sse-zstd; dictionary=<SHA-256 in hex>`")
        held = match[1]
    return Asked(accept_encoding, Form(name), held)


def _byte_sequence(item: str) -> bytes:
    """A structured field's byte sequence (RFC 9651): base64 between colons. b"" where it isn't one."""
    match = re.fullmatch(r":([A-Za-z0-9+/=]*):", item.strip())
    try:
        return base64.b64decode(match[1]) if match else b""
    except binascii.Error:
        return b""


def choose(asked: Asked, level: int, config: StreamingConfig, dictionary: str) -> tuple[Form, bool]:
    """The form of a stream that was admitted at rollback level `level`, and whether it uses the dictionary.

    `dictionary` is the hex SHA-256 of the gateway's, or "".
    """
    if level < LEVEL_FROM[Mode.COMPRESSED_STREAMING] or config.compression is not Compression.AUTO:
        return Form.IDENTITY, False
    is_held = dictionary != "" and asked.dictionary == dictionary
    if asked.form is not None:
        return asked.form, is_held and asked.form is Form.SSE_ZSTD
    weights = _weights(asked.accept_encoding)
    # The client's weights first, then ours: the order of this list. A dictionary coding must be named.
    ranked = [(Form.DCZ, weights.get(Form.DCZ, 0.0) if is_held else 0.0)]
    ranked += [(form, weights.get(form, weights.get("*", 0.0))) for form in (Form.ZSTD, Form.GZIP)]
    form, weight = max(ranked, key=lambda entry: entry[1])
    if weight == 0.0 or weight < weights.get(Form.IDENTITY, 0.0):
        return Form.IDENTITY, False
    return form, form is Form.DCZ


def _weights(accept_encoding: str) -> dict[str, float]:
    """Coding -> weight, from an Accept-Encoding header (RFC 9110, 12.5.3). A weight that isn't one counts as 0."""
    weights: dict[str, float] = {}
    for item in accept_encoding.lower().split(","):
        name, *parameters = (part.strip() for part in item.split(";"))
        weights[name] = _weight(parameters)
    return weights


def _weight(parameters: list[str]) -> float:
    for parameter in parameters:
        if parameter.startswith("q="):
            match = re.fullmatch(r"[01](\.\d{0,3})?", parameter.removeprefix("q="))
            return min(1.0, float(match[0])) if match else 0.0
    return 1.0


def wait_seconds(last_sent_seconds: float, now_seconds: float) -> float:
    """How long events that are waiting are held back for more of them, by a monotonic clock.

    The first token, and tokens that come slower than SEND_INTERVAL_SECONDS, go at once; faster ones wait until that
    long after what was sent last, so no token waits longer.
    """
    return max(0.0, min(SEND_INTERVAL_SECONDS, last_sent_seconds + SEND_INTERVAL_SECONDS - now_seconds))
