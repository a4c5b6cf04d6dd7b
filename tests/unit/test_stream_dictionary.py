"""The file with the stream dictionary: in a mounted folder or by itself, followed while it changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from sixfold_runtime.gateway.dictionary import DictionaryFile

WORDS = b"what the king said to the queen of the court " * 20


@pytest.mark.parametrize("mounted", [True, False])
def test_it_is_followed(tmp_path: Path, mounted: bool) -> None:
    path = tmp_path / "dictionary"
    path.write_bytes(WORDS)
    followed = DictionaryFile(tmp_path if mounted else path)
    first = followed.current
    assert first is not None
    assert first.data == WORDS
    assert followed.current is first, "read once"
    path.write_bytes(WORDS * 2)
    assert followed.current is not None
    assert followed.current.sha256 != first.sha256
    path.write_bytes(b"")
    assert followed.current is None
    assert "it is empty" in followed.problem
    path.unlink()
    assert followed.current is None
    assert followed.problem == f"there is no stream dictionary: {path} is missing"


def test_a_missing_one_may_come_later(tmp_path: Path) -> None:
    followed = DictionaryFile(tmp_path / "mounted")
    assert followed.current is None
    assert "is missing" in followed.problem
    (tmp_path / "mounted").mkdir()
    (tmp_path / "mounted" / "dictionary").write_bytes(WORDS)
    assert followed.current is not None
    assert followed.problem == ""
    never = DictionaryFile(None)
    assert (never.current, never.problem) == (None, "")
