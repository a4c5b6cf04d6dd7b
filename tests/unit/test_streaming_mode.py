"""Who gets which form of a stream, that each form decodes when it comes, and when tokens are sent."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from sixfold_api.runtime_config import StreamingConfig
from sixfold_api.scalars import Compression
from sixfold_runtime.gateway.dictionary import Dictionary
from sixfold_runtime.gateway.stream_encoding import Encoding, encoding_for
from sixfold_runtime.modes.streaming import SEND_INTERVAL_SECONDS, Form, asked, choose, wait_seconds

AUTO = StreamingConfig(compression=Compression.AUTO, level=3)
OFF = StreamingConfig(compression=Compression.OFF, level=3)
OURS = Dictionary(
    b'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":" a'
)
HELD = f":{base64.b64encode(bytes.fromhex(OURS.sha256)).decode()}:"


@pytest.mark.parametrize(
    ("header", "form"),
    [
        ("zstd", "zstd"),
        ("ZSTD", "zstd"),
        ("gzip, deflate, br, zstd", "zstd"),
        ("gzip, zstd;q=0.1", "gzip"),
        ("gzip;q=1.0,zstd ; q=0.5", "gzip"),
        ("gzip;q=0.5,zstd;q=0.5", "zstd"),
        ("identity, zstd;q=0.5", "identity"),
        ("identity;q=0.5, zstd;q=0.5", "zstd"),
        ("*", "zstd"),
        ("*;q=0", "identity"),
        ("zstd;q=0", "identity"),
        ("zstd;q=0.000, *", "gzip"),
        ("zstd;q=oops", "identity"),
        ("zstd;q=nan", "identity"),
        ("zstd;q=9", "identity"),
        ("identity", "identity"),
        ("xzstd", "identity"),
        ("dcz", "identity"),
        ("br", "identity"),
        ("", "identity"),
        (",,;;=", "identity"),
    ],
)
def test_accept_encoding(header: str, form: str) -> None:
    assert choose(asked(header, "", ""), 3, AUTO, OURS.sha256) == (form, False)


@given(st.text(max_size=80), st.text(max_size=80))
def test_no_header_breaks_it(accepted: str, available: str) -> None:
    choose(asked(accepted, "", available), 3, AUTO, OURS.sha256)


@pytest.mark.parametrize("header", ["zstd", "br", "sse-zstd; dictionary=a", "sse-zstd; level=3", "identity; x", ";"])
def test_unknown_forms_are_refused(header: str) -> None:
    with pytest.raises(ValueError, match="X-Stream-Compression"):
        asked("zstd", header, "")


def test_the_clients_own_header_goes_before_accept_encoding() -> None:
    assert choose(asked("zstd", " SSE-zstd ", ""), 3, AUTO, "") == (Form.SSE_ZSTD, False)
    assert choose(asked("zstd", "identity", ""), 3, AUTO, "") == (Form.IDENTITY, False)


def test_a_dictionary_is_used_only_where_the_client_holds_it() -> None:
    other = "0" * 64
    for dictionary, used in ((OURS.sha256, True), (other, False), ("", False)):
        form = Form.DCZ if used else Form.ZSTD
        assert choose(asked("zstd, dcz", "", HELD), 3, AUTO, dictionary) == (form, used)
        held = asked("zstd", f"sse-zstd; dictionary={OURS.sha256}", "")
        assert choose(held, 3, AUTO, dictionary) == (Form.SSE_ZSTD, used)
    assert choose(asked("zstd", "", HELD), 3, AUTO, OURS.sha256) == (Form.ZSTD, False)
    assert choose(asked("zstd, dcz;q=0", "", HELD), 3, AUTO, OURS.sha256) == (Form.ZSTD, False)
    assert choose(asked("zstd, dcz", "", ":not base64:"), 3, AUTO, OURS.sha256) == (Form.ZSTD, False)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("stream_compression", ["", "sse-zstd"])
def test_the_level_and_the_configuration_decide(level: int, stream_compression: str) -> None:
    wanted = asked("zstd", stream_compression, "")
    form = stream_compression or "zstd"
    assert choose(wanted, level, AUTO, "")[0] == (form if level == 3 else "identity")
    assert choose(wanted, level, OFF, "")[0] == "identity"


def test_the_answers_headers_say_what_was_used() -> None:
    plain = encoding_for(asked("", "", ""), 3, AUTO, None).headers
    assert set(plain) == {"Vary"}
    assert encoding_for(asked("gzip", "", ""), 3, AUTO, None).headers["Content-Encoding"] == "gzip"
    link = f'</v1/stream-dictionary/{OURS.sha256}>; rel="compression-dictionary"'
    sse = encoding_for(asked("gzip", "sse-zstd", ""), 3, AUTO, OURS).headers
    assert (sse["X-Stream-Compression"], sse["Link"]) == ("sse-zstd", link)
    assert "Content-Encoding" not in sse
    with_dictionary = encoding_for(asked("gzip", f"sse-zstd; dictionary={OURS.sha256}", ""), 3, AUTO, OURS).headers
    assert with_dictionary["X-Stream-Compression"] == f"sse-zstd; dictionary={OURS.sha256}"
    below = encoding_for(asked("gzip", "sse-zstd", ""), 2, AUTO, OURS).headers
    assert below == {"Vary": below["Vary"], "X-Stream-Compression": "identity"}


class Outer:
    """Decodes sse-zstd as its description says."""

    def __init__(self, dictionary: zstandard.ZstdCompressionDict | None = None) -> None:
        self._zstd = zstandard.ZstdDecompressor(dict_data=dictionary).decompressobj()

    def __call__(self, sent: bytes) -> bytes:
        assert sent.startswith(b"data: ")
        assert sent.endswith(b"\n\n")
        return self._zstd.decompress(base64.b64decode(sent[6:-2], validate=True))


class Dcz:
    """Decodes dcz as RFC 9842 says: a skippable frame with the hash, then zstd with the bytes as raw content."""

    def __init__(self) -> None:
        self._zstd = zstandard.ZstdDecompressor(dict_data=OURS.raw).decompressobj()
        self._begun = False

    def __call__(self, sent: bytes) -> bytes:
        if not self._begun:
            self._begun = True
            assert sent[:40] == bytes.fromhex("5e2a4d1820000000" + OURS.sha256)
            sent = sent[40:]
        return self._zstd.decompress(sent)


DECODERS: dict[str, tuple[Form, bool, Callable[[], Callable[[bytes], bytes]]]] = {
    "identity": (Form.IDENTITY, False, lambda: bytes),
    "gzip": (Form.GZIP, False, lambda: zlib.decompressobj(wbits=31).decompress),
    "zstd": (Form.ZSTD, False, lambda: zstandard.ZstdDecompressor().decompressobj().decompress),
    "dcz": (Form.DCZ, True, Dcz),
    "sse-zstd": (Form.SSE_ZSTD, False, Outer),
    "sse-zstd with a dictionary": (Form.SSE_ZSTD, True, lambda: Outer(OURS.trained)),
}


@pytest.mark.parametrize("name", DECODERS)
@given(events=st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=30), level=st.integers(1, 19))
def test_each_event_decodes_on_arrival(name: str, events: list[bytes], level: int) -> None:
    form, uses_dictionary, decoder = DECODERS[name]
    encoder, decode = Encoding(form, level, OURS, uses_dictionary).encoder(), decoder()
    for event in events[:-1]:
        assert decode(encoder.encode(event, is_last=False)) == event
    assert decode(encoder.encode(events[-1], is_last=True)) == events[-1]


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=30), st.integers(1, 19))
def test_a_stream_is_one_finished_frame(events: list[bytes], level: int) -> None:
    encoder = Encoding(Form.ZSTD, level).encoder()
    sent = b"".join(encoder.encode(event, is_last=False) for event in events) + encoder.encode(b"", is_last=True)
    frame = zstandard.get_frame_parameters(sent)
    assert frame.window_size <= 128 * 1024
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    assert decompressor.decompress(sent) == b"".join(events)
    assert decompressor.eof
    assert decompressor.unused_data == b""


def sends(arrivals: list[float]) -> list[tuple[float, int]]:
    """When events that arrive at these times are sent, and how many together."""
    sent: list[tuple[float, int]] = []
    waiting, due = 0, 0.0
    for now in arrivals:
        if waiting and due <= now:
            sent.append((due, waiting))
            waiting = 0
        if not waiting:
            due = now + wait_seconds(sent[-1][0] if sent else -1.0, now)
        waiting += 1
    return [*sent, (due, waiting)]


def test_slow_tokens_go_one_by_one_at_once() -> None:
    arrivals = [at * 0.010 for at in range(20)]
    assert sends(arrivals) == [(at, 1) for at in arrivals]


def test_fast_tokens_go_together() -> None:
    arrivals = [at * 0.001 for at in range(100)]
    flushes = sends(arrivals)
    assert flushes[0] == (0.0, 1)
    assert 18 <= len(flushes) <= 25


@given(st.lists(st.floats(0, 0.02), min_size=1, max_size=50))
def test_no_token_waits_longer_than_the_interval(gaps: list[float]) -> None:
    arrivals = [sum(gaps[: index + 1]) for index in range(len(gaps))]
    flushes = sends(arrivals)
    assert sum(events for _, events in flushes) == len(arrivals)
    position = 0
    for at, events in flushes:
        for arrival in arrivals[position : position + events]:
            assert -1e-9 <= at - arrival <= SEND_INTERVAL_SECONDS + 1e-9
        position += events
