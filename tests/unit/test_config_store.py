"""ConfigStore against real files: the kubelet's way of swapping a mounted ConfigMap, plain edits, and bad content."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sixfold_runtime.config import ConfigStore, default_config


def content(sequence: int, level: int = 2, **more: object) -> dict[str, object]:
    stable = {"level": level, "activeModes": [], "streaming": {"compression": "Off", "level": 3}}
    return {"sequence": sequence, "stable": stable, **more}


class MountedConfigMap:
    """Writes like the kubelet's AtomicWriter: a new timestamped folder, then `..data` renamed onto it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.generation = 0

    def write(self, text: str) -> None:
        old = self.directory / f"..{self.generation}"
        self.generation += 1
        new = self.directory / f"..{self.generation}"
        new.mkdir()
        (new / "config.json").write_text(text)
        link = self.directory / "..data_tmp"
        link.symlink_to(new.name)
        link.rename(self.directory / "..data")
        entry = self.directory / "config.json"
        if not entry.is_symlink():
            entry.symlink_to("..data/config.json")
        shutil.rmtree(old, ignore_errors=True)


def test_defaults_without_a_directory_are_those_of_an_empty_spec() -> None:
    store = ConfigStore.watching(None)
    assert (store.current.sequence, store.current.stable.level, store.error) == (0, 3, "")


def test_until_the_first_good_file_the_level_is_0(tmp_path: Path) -> None:
    store = ConfigStore.watching(tmp_path)
    assert store.current.stable.level == 0
    assert "can't read" in store.error


def test_a_swapped_link_is_taken(tmp_path: Path) -> None:
    mounted = MountedConfigMap(tmp_path)
    mounted.write(json.dumps(content(1, level=1)))
    store = ConfigStore.watching(tmp_path)
    seen: list[int] = []
    store.subscribe(lambda config: seen.append(config.sequence))
    mounted.write(json.dumps(content(2, level=3)))
    store.poll()
    store.poll()
    assert (store.current.stable.level, seen) == (3, [2])


def test_a_plain_edit_is_taken_even_if_size_and_time_stay(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content(1, level=1)))
    store = ConfigStore.watching(tmp_path)
    before = path.stat().st_mtime
    path.write_text(json.dumps(content(2, level=3)))
    os.utime(path, (before, before))
    store.poll()
    assert store.current.stable.level == 3


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "[]",
        '{"sequence": 9}',
        json.dumps(content(-1)),
        json.dumps(content(9, level=4)),
        '{"sequence": NaN}',
        "\x00",
    ],
)
def test_a_bad_file_is_reported_and_the_last_good_one_stays(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content(1)))
    store = ConfigStore.watching(tmp_path)
    path.write_text(text)
    store.poll()
    assert (store.current.sequence, store.refused) == (1, 1)
    assert str(path) in store.error
    path.write_text(json.dumps(content(10)))
    store.poll()
    assert (store.current.sequence, store.error) == (10, "")


def test_a_file_that_goes_away_is_reported_once_and_taken_again(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content(1)))
    store = ConfigStore.watching(tmp_path)
    path.unlink()
    store.poll()
    store.poll()
    assert (store.current.sequence, store.refused) == (1, 1)
    path.write_text(json.dumps(content(1)))
    store.poll()
    assert store.error == ""


def test_bytes_that_are_not_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    assert ConfigStore.watching(tmp_path).error


def test_an_older_sequence_is_ignored_and_reported(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content(5, level=1)))
    store = ConfigStore.watching(tmp_path)
    path.write_text(json.dumps(content(4, level=3)))
    store.poll()
    assert store.current.stable.level == 1
    assert "sequence 4 is older than 5" in store.error


def test_unknown_fields_are_reported_not_refused(tmp_path: Path) -> None:
    newer = content(1, rehearsal=None)
    newer["stable"] = {
        "level": 1,
        "activeModes": ["Telepathy"],
        "streaming": {"compression": "Off", "level": 3, "dictionary": "d"},
        "newBlock": {},
    }
    newer["provenance"] = [{"path": "/x", "value": "1", "setBy": "Tuned", "ticket": "t1"}]
    (tmp_path / "config.json").write_text(json.dumps(newer))
    store = ConfigStore.watching(tmp_path)
    assert store.error == ""
    assert set(store.unknown_fields) == {
        "/rehearsal",
        "/stable/newBlock",
        "/stable/streaming/dictionary",
        "/provenance/0/ticket",
    }


async def test_run_follows_the_directory_until_cancelled(tmp_path: Path) -> None:
    mounted = MountedConfigMap(tmp_path)
    mounted.write(json.dumps(content(1)))
    store = ConfigStore.watching(tmp_path)
    arrived = asyncio.Event()
    store.subscribe(lambda config: arrived.set() if config.sequence == 3 else None)
    task = asyncio.create_task(store.run())
    mounted.write("{ broken")
    mounted.write(json.dumps(content(3)))
    await asyncio.wait_for(arrived.wait(), 30)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert store.current.sequence == 3


FILES = st.lists(
    st.one_of(
        st.integers(0, 20).map(lambda sequence: json.dumps(content(sequence, level=sequence % 4)).encode()),
        st.binary(max_size=40),
        st.none(),
    ),
    max_size=12,
)


@given(files=FILES)
def test_whatever_comes_the_current_one_is_the_highest_good_one(files: list[bytes | None]) -> None:
    """`None` removes the file. The sequence in use never falls, and it is that of some good file or the default."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "config.json"
        store = ConfigStore.watching(Path(directory))
        highest = 0
        for file in files:
            if file is None:
                path.unlink(missing_ok=True)
            else:
                path.write_bytes(file)
            store.poll()
            if file is not None and file.startswith(b'{"sequence"'):
                sequence = json.loads(file)["sequence"]
                refused = sequence < highest
                highest = max(highest, sequence)
                assert bool(store.error) is refused
            assert store.current.sequence == highest
        assert store.current.stable.level == (highest % 4 if highest else store.current.stable.level)


def test_fixed_never_changes() -> None:
    store = ConfigStore.fixed(default_config(target_level=1))
    store.poll()
    assert store.current.stable.level == 1
