"""The URL of a Redis: what is understood, and what is said where it isn't."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sixfold_runtime.engine.kv_address import AddressError, RedisAddress, parse_url, read_address

HOST = (("redis", 6379),)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://redis", RedisAddress("", False, HOST)),
        ("redis://redis:7000/3", RedisAddress("", False, (("redis", 7000),), database=3)),
        ("rediss://kv:a%2Fb%40c@redis", RedisAddress("", True, HOST, username="kv", password="a/b@c")),
        ("redis://:secret@redis:6379/", RedisAddress("", False, HOST, password="secret")),
        ("redis://[::1]:7000", RedisAddress("", False, (("::1", 7000),))),
        ("redis+cluster://a,b:7001", RedisAddress("cluster", False, (("a", 6379), ("b", 7001)))),
        (
            "rediss+sentinel://kv:s@a,b:7/main/2?sentinel_username=u&sentinel_password=p%2B",
            RedisAddress(
                "sentinel", True, (("a", 26379), ("b", 7)), "main", 2, "kv", "s",
                sentinel_username="u", sentinel_password="p+",
            ),
        ),
    ],
)  # fmt: skip
def test_urls_that_are_understood(url: str, address: RedisAddress) -> None:
    assert parse_url(url) == address


@pytest.mark.parametrize(
    ("url", "about"),
    [
        ("", "must begin with"),
        ("http://redis", "must begin with"),
        ("redis+other://redis", "must begin with"),
        ("redis+://redis", "must begin with"),
        ("redis://", "host or port"),
        ("redis://kv:topsecret/x@redis", "host or port"),
        ("redis://redis:topsecret", "host or port"),
        ("redis://a,b", "several hosts"),
        ("redis://redis/topsecret", "database"),
        ("redis+cluster://redis/1", "database"),
        ("redis+sentinel://redis", "service"),
        ("redis://redis?ssl_cert_reqs=topsecret", "options"),
        ("redis://[topsecret", "can't be read"),
    ],
)
def test_others_are_refused_and_the_message_shows_no_part_of_them(url: str, about: str) -> None:
    with pytest.raises(AddressError, match=about) as refusal:
        parse_url(url)
    assert "topsecret" not in str(refusal.value)


@given(st.text(max_size=60) | st.builds("redis://kv:topsecret@{}".format, st.text(max_size=40)))
def test_any_text_is_understood_or_refused(url: str) -> None:
    try:
        assert "topsecret" not in repr(parse_url(url))
    except AddressError as refusal:
        assert "topsecret" not in str(refusal)


def test_the_folder_is_read_anew_and_what_is_missing_is_said(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        with pytest.raises(AddressError):
            read_address(folder)
    (tmp_path / "url").write_text("redis://redis\n")
    assert read_address(tmp_path) == RedisAddress("", False, HOST)
    (tmp_path / "ca.crt").write_text("PEM")
    assert read_address(tmp_path).authority == "PEM"
    (tmp_path / "url").write_bytes(b"\xff")
    with pytest.raises(AddressError, match="can't be read"):
        read_address(tmp_path)
