"""Who gets a compressed stream, and that each event decodes when it comes."""

from __future__ import annotations

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from sixfold_api.runtime_config import StreamingConfig
from sixfold_api.scalars import Compression
from sixfold_runtime.modes.streaming import StreamCompressor, accepts, content_encoding

AUTO = StreamingConfig(compression=Compression.AUTO, level=3)
OFF = StreamingConfig(compression=Compression.OFF, level=3)


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        ("zstd", True),
        ("ZSTD", True),
        ("gzip, zstd;q=0.1", True),
        ("gzip;q=1.0,zstd ; q=0.5", True),
        ("*", True),
        ("*;q=0", False),
        ("zstd;q=0", False),
        ("zstd;q=0.000, *", False),
        ("zstd;q=oops", False),
        ("identity", False),
        ("xzstd", False),
        ("", False),
        (",,;;=", False),
    ],
)
def test_accept_encoding(header: str, accepted: bool) -> None:
    assert accepts(header, "zstd") is accepted


@given(st.text(max_size=80))
def test_no_header_breaks_it(header: str) -> None:
    accepts(header, "zstd")


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_the_level_and_the_configuration_decide(level: int) -> None:
    assert content_encoding("zstd", level, AUTO) == ("zstd" if level == 3 else None)
    assert content_encoding("zstd", level, OFF) is None
    assert content_encoding("gzip", level, AUTO) is None


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=30), st.integers(1, 19))
def test_each_event_decodes_on_arrival_and_all_are_one_frame(events: list[bytes], level: int) -> None:
    compressor = StreamCompressor(level)
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    sent = b""
    for event in events:
        part = compressor.event(event)
        assert decompressor.decompress(part) == event
        sent += part
    end = compressor.end()
    assert decompressor.decompress(end) == b""
    assert decompressor.eof
    assert zstandard.ZstdDecompressor().decompressobj().decompress(sent + end) == b"".join(events)
