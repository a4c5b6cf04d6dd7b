"""Streams: bytes on the wire and CPU a token in each form, and whether each event can be read when it is sent.

A real gateway process streams 2,000 English and 2,000 Chinese tokens (`stream_texts.py`) that an engine says at the
pace of a model (`stream_replay.py`), in OpenAI's chunks, one token an event. Bytes are all that comes over the socket
after the answer's head; the ratio is plain events over the form. A busy machine bunches tokens, which then travel
together and take less; so the ratio that counts has each event flushed alone, and HTTP's framing counted as it is sent.

The goals: sse-zstd, the source's framing, 4.2 for English and 3.1 for Chinese; zstd as Content-Encoding 10 for both;
under 20 µs of CPU a token for encoding a hundred streams in turn. Beside them: the source's own recipe, a frame a
token; tokens every millisecond, which travel together; a dictionary for short answers; and when each event was readable
in httpx, openai and Chromium.
"""

from __future__ import annotations

import base64
import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import stream_readers
import zstandard
from stream_readers import Wire, over_the_wire, text_of
from stream_replay import Gateway, Script, serving
from stream_texts import TEXTS, TOKENS, editorials, pieces

from sixfold_runtime import dictionary_cli
from sixfold_runtime.gateway.stream_encoding import Encoding
from sixfold_runtime.modes.streaming import Form
from sixfold_runtime.stream_client import decode

GOALS = {
    ("zstd", "English"): 10.0,
    ("zstd", "Chinese"): 10.0,
    ("sse-zstd", "English"): 4.2,
    ("sse-zstd", "Chinese"): 3.1,
}
GOAL_MICROSECONDS = 20.0
HEADERS = {
    "identity": {"Accept-Encoding": "identity"},
    "gzip": {"Accept-Encoding": "gzip"},
    "zstd": {"Accept-Encoding": "zstd"},
    "sse-zstd": {"X-Stream-Compression": "sse-zstd"},
}
DECODED: dict[str, Callable[[bytes], bytes]] = {
    "identity": bytes,
    "gzip": lambda content: zlib.decompress(content, wbits=31),
    "zstd": lambda content: zstandard.ZstdDecompressor().decompressobj().decompress(content),
    "sse-zstd": lambda content: b"".join(decode([content])),
}
MODEL_PACE_SECONDS = 0.012
"""A token every 12 ms, 83 a second: slower than what travels together."""
FAST_PACE_SECONDS = 0.001
ARRIVAL_PACE_SECONDS = 0.025
ARRIVAL_TOKENS = 120
STREAMS = 3
"""Of each language at once while the gateway's CPU is measured."""
ENCODED_STREAMS = 100
"""In turn while the encoders' is."""


class Bench:
    def __init__(self, gateway: Gateway, tokens: int) -> None:
        self._gateway = gateway
        self._pieces = {language: pieces(language, tokens) for language in TEXTS}
        self._scripts = count()

    def script(self, language: str, pace_seconds: float, tokens: int | None = None) -> int:
        number = next(self._scripts)
        self._gateway.engine.scripts[str(number)] = Script(self._pieces[language][:tokens], pace_seconds)
        return number

    def stream(self, form: str, pace_seconds: float, streams: int) -> tuple[dict[str, Wire], float]:
        """So many answers of each language at once: one of each, and the gateway's CPU in µs a token."""
        languages = [language for language in self._pieces for _ in range(streams)]
        scripts = [self.script(language, pace_seconds) for language in languages]
        before = self._gateway.cpu_seconds()
        with ThreadPoolExecutor(len(scripts)) as pool:
            wires = list(pool.map(lambda script: over_the_wire(self._gateway.url, script, HEADERS[form]), scripts))
        spent = self._gateway.cpu_seconds() - before
        for language, wire in zip(languages, wires, strict=True):
            if text_of(DECODED[form](wire.content)) != "".join(self._pieces[language]):
                raise SystemExit(f"{form}: what came isn't the {language} text that was sent")
        tokens = sum(len(self._pieces[language]) for language in languages)
        return dict(zip(languages, wires, strict=True)), spent / tokens * 1e6

    def arrivals(self, name: str, read: Callable[[str, int], tuple[list[float], str]]) -> dict[str, Any]:
        """Milliseconds from the engine's sending of a token to its event, decoded, in the client."""
        number = self.script("English", ARRIVAL_PACE_SECONDS, ARRIVAL_TOKENS)
        seen, encoding = read(self._gateway.url, number)
        sent = self._gateway.engine.scripts[str(number)].sent_unix_seconds
        if len(seen) != len(sent):
            raise SystemExit(f"{name}: {len(seen)} events with text, {len(sent)} were sent")
        delays = sorted((at - left) * 1e3 for at, left in zip(seen, sent, strict=True))
        after_next = sum(at > following for at, following in zip(seen, sent[1:], strict=False))
        return {
            "form": encoding,
            "median_ms": round(statistics.median(delays), 2),
            "p95_ms": round(delays[int(len(delays) * 0.95)], 2),
            "after_the_next_token": after_next,
            "of": len(seen),
        }


def one_by_one(events: Sequence[bytes]) -> dict[str, float]:
    """Plain over compressed, each event flushed alone: what the gateway sends however busy this machine is."""

    def framed(sizes: Sequence[int]) -> int:
        return sum(size + len(f"{size:x}") + 4 for size in sizes)

    ratios = {}
    for form in (Form.ZSTD, Form.SSE_ZSTD):
        encoder = Encoding(form).encoder()
        sizes = [len(encoder.encode(event, False)) for event in events]
        ratios[form.value] = round(framed([len(event) for event in events]) / framed(sizes), 2)
    return ratios


def encoder_microseconds(events: Sequence[bytes], streams: int) -> dict[str, float]:
    """CPU a token of the encoders alone, each token flushed; so many streams in turn, so that caches don't flatter."""
    spent = {}
    tokens = min(len(events), TOKENS // 20)
    for form in (Form.GZIP, Form.ZSTD, Form.SSE_ZSTD):
        started, encoders = time.thread_time(), [Encoding(form).encoder() for _ in range(streams)]
        for event in events[:tokens]:
            for encoder in encoders:
                encoder.encode(event, False)
        spent[form.value] = round((time.thread_time() - started) / tokens / streams * 1e6, 2)
    return spent


def frame_a_token(plain: Wire, events: Sequence[bytes]) -> float:
    """The source's recipe: each event its own zstd frame, as base64 in an event."""
    compressor = zstandard.ZstdCompressor(level=3)
    bodies = [len(base64.b64encode(compressor.compress(event))) + len(b"data: \n\n") for event in events]
    return round(plain.bytes / sum(size + len(f"{size:x}") + 4 for size in bodies), 2)


def short_answers() -> dict[str, int]:
    """Bytes of an answer's first 20 tokens, without and with a dictionary trained on texts of the same kind."""
    texts = editorials(1600)
    dictionary = dictionary_cli.trained(texts[:1400], dictionary_cli.DEFAULT_BYTES, "chat")
    return {
        "without": dictionary_cli.sent_bytes(texts[1400:], "chat", None),
        "with": dictionary_cli.sent_bytes(texts[1400:], "chat", dictionary),
        "dictionary": len(dictionary),
    }


def run(quick: bool) -> dict[str, Any]:
    with serving() as gateway:
        bench = Bench(gateway, 300 if quick else TOKENS)
        bench.stream("zstd", FAST_PACE_SECONDS, 1)  # imports and caches
        plain, plain_cpu = bench.stream("identity", MODEL_PACE_SECONDS, STREAMS)
        events = {language: _events(wire.content) for language, wire in plain.items()}
        ratios: dict[str, Any] = {}
        cpu = {"identity": round(plain_cpu, 1)}
        for form in ("zstd", "sse-zstd", "gzip"):
            wires, spent = bench.stream(form, MODEL_PACE_SECONDS, STREAMS)
            cpu[form] = round(spent, 1)
            for language, wire in wires.items():
                ratios[f"{form} {language}"] = round(plain[language].bytes / wire.bytes, 2)
                print(f"{language}, {form}: {plain[language].bytes} -> {wire.bytes} bytes", flush=True)
        for language, wire in plain.items():
            ratios[f"frame a token {language}"] = frame_a_token(wire, events[language])
        fast, fast_cpu = bench.stream("zstd", FAST_PACE_SECONDS, 1)
        together = {language: round(plain[language].bytes / wire.bytes, 2) for language, wire in fast.items()}
        encoders = {streams: encoder_microseconds(events["English"], streams) for streams in (1, ENCODED_STREAMS)}
        print(f"plain over compressed: {ratios}", flush=True)
        print(f"a token every ms, zstd: {together}; {fast_cpu:.1f} µs of the gateway a token", flush=True)
        print(f"µs of CPU a token, encoders by streams: {encoders}; the whole gateway: {cpu}", flush=True)
        arrivals = _arrivals(bench, gateway.url)
    alone = {language: one_by_one(events[language]) for language in events}
    for language, each in alone.items():
        ratios |= {f"{form} {language}, one by one": ratio for form, ratio in each.items()}
    print(f"plain over compressed, each event flushed alone: {alone}", flush=True)
    worst = min(alone[language][form] / goal for (form, language), goal in GOALS.items())
    busy = encoders[ENCODED_STREAMS]
    worst = min(worst, GOAL_MICROSECONDS / max(busy["zstd"], busy["sse-zstd"]))
    short = short_answers()
    print(f"bytes of 20 tokens: {short}", flush=True)
    return {
        "ratio": round(worst, 3),
        "goal": 1.0,
        "goals": {f"{form} {language}": goal for (form, language), goal in GOALS.items()},
        "plain_bytes": {language: wire.bytes for language, wire in plain.items()},
        "ratios": ratios,
        "token_every_ms": together,
        "encoder_us": encoders,
        "gateway_us": cpu,
        "short_answers": short,
        "arrivals": arrivals,
    }


def _events(content: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in content.split(b"\n\n")[:-1]]


def _arrivals(bench: Bench, url: str) -> dict[str, Any]:
    readers: dict[str, Callable[[str, int], tuple[list[float], str]]] = {
        "httpx": stream_readers.httpx_arrivals,
        "openai": stream_readers.openai_arrivals,
        "openai over httpx": stream_readers.openai_httpx_arrivals,
        "openai over SseZstdTransport": stream_readers.openai_sse_arrivals,
    }
    with stream_readers.chromium(url) as browser:
        if browser is None:
            print("Chromium isn't installed: not measured", flush=True)
        else:
            readers["Chromium"] = browser
        results = {}
        for name, read in readers.items():
            results[name] = bench.arrivals(name, read)
            print(f"from the engine to {name}: {results[name]}", flush=True)
    return results
