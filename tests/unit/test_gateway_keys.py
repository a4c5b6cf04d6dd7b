"""API keys: only hashes stay in memory, and how long a comparison takes tells nothing."""

from __future__ import annotations

import gc
import hashlib
import hmac
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sixfold_runtime.gateway.keys import ApiKeys, read_keys


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "alice").write_text("alice-old\nalice-new\n")
    (tmp_path / "bob").write_text("bob-key")
    return tmp_path


def test_only_hashes_are_kept(folder: Path) -> None:
    keys = ApiKeys(folder)
    assert read_keys(folder)["bob"] == (hashlib.sha256(b"bob-key").digest(),)
    held, seen = [keys.__dict__], set()
    while held:
        entry = held.pop()
        if id(entry) not in seen:
            seen.add(id(entry))
            assert b"-key" not in (entry if isinstance(entry, bytes) else str(entry).encode())
            held += gc.get_referents(entry) if isinstance(entry, dict | list | tuple) else []


def test_every_key_is_compared_whichever_is_meant(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, compared = ApiKeys(folder), []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda *pair: compared.append(pair) or compare(*pair))
    for key, tenant in (("alice-old", "alice"), ("bob-key", "bob"), ("nobody", None), ("", None), ("x" * 9999, None)):
        compared.clear()
        assert keys.tenant(f"Bearer {key}") == tenant
        assert len(compared) == 3
        assert {len(side) for pair in compared for side in pair} == {32}, "digests, of one length"


@given(st.text(max_size=40).map(lambda text: text.encode("utf-8", "surrogatepass").decode("latin-1")))
def test_no_header_gets_in_or_breaks_it(header: str) -> None:
    keys = ApiKeys(Path("/nowhere/at/all"))
    assert keys.tenant(header) is None
    assert keys.tenant(f"Bearer {header}") is None
