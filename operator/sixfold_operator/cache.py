"""What the watches said last: objects by kind, kept as JSON text.

Text takes a fifth of the memory of dicts, and a caller who changes what it got changes only its own copy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

Manifest = dict[str, Any]
Place = tuple[str, str]
"""Namespace and name."""

_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_POD_STATUS = ("phase", "podIP", "conditions", "containerStatuses", "reason", "message")


class _Entry(NamedTuple):
    uid: str
    version: int
    tags: frozenset[str]
    text: bytes
    hides_news: bool
    """A write of ours brought along somebody else's change, whose own event will look old."""


def no_tags(_: Manifest) -> Iterable[str]:
    return ()


class Cache:
    """Newest known version of each object. `tags(object)` names the index entries under which `tagged` finds it."""

    def __init__(self, tags: Callable[[Manifest], Iterable[str]] = no_tags) -> None:
        self._tags = tags
        self._kinds: dict[str, dict[Place, _Entry]] = {}
        self._index: dict[tuple[str, str, str], set[str]] = {}

    def put(self, manifest: Manifest, written: Collection[str] = ()) -> bool:
        """Remember an object that the API returned. True if it is news: nobody has acted on what it says.

        The answer to a write of ours names the top-level parts that we wrote. It is no news itself, but it may
        carry what somebody else changed just before; then the next event about the object counts as news,
        although its version is known.
        """
        kind, place = manifest["kind"], place_of(manifest)
        metadata = manifest["metadata"]
        old = self._kinds.get(kind, {}).get(place)
        version = int(metadata["resourceVersion"])
        if old is not None and old.version >= version:
            if old.hides_news and not written:
                self._kinds[kind][place] = old._replace(hides_news=False)
                return True
            return False
        self._drop(kind, place)
        trimmed = _trim(manifest)
        hides_news = bool(written) and (
            old is None or old.hides_news or _rest(json.loads(old.text), written) != _rest(trimmed, written)
        )
        tags = frozenset(self._tags(trimmed))
        entry = _Entry(metadata["uid"], version, tags, json.dumps(trimmed).encode(), hides_news)
        self._kinds.setdefault(kind, {})[place] = entry
        for tag in entry.tags:
            self._index.setdefault((kind, place[0], tag), set()).add(place[1])
        return not written

    def remove(self, manifest: Manifest) -> bool:
        """Forget an object that was deleted. False if it wasn't known, or another one has its name now."""
        kind, place = manifest["kind"], place_of(manifest)
        old = self._kinds.get(kind, {}).get(place)
        if old is None or old.uid != manifest["metadata"]["uid"]:
            return False
        self._drop(kind, place)
        return True

    def replace(self, kind: str, namespace: str | None, manifests: Iterable[Manifest], version: int) -> list[Place]:
        """Bring a kind in line with a complete list of `version`; returns what was missed (changed or gone)."""
        missed, seen = [], set()
        for manifest in manifests:
            seen.add(place_of(manifest))
            if self.put(manifest):
                missed.append(place_of(manifest))
        return missed + self.keep(kind, namespace, seen, version)

    def keep(self, kind: str, namespace: str | None, seen: Collection[Place], version: int) -> list[Place]:
        """Forget what isn't among all that a list of `version` had; returns what that was."""
        gone = [
            place
            for place, entry in self._kinds.get(kind, {}).items()
            if place not in seen and namespace in (None, place[0]) and entry.version <= version
        ]
        for place in gone:
            self._drop(kind, place)
        return gone

    def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        entry = self._kinds.get(kind, {}).get((namespace, name))
        return None if entry is None else json.loads(entry.text)

    def tagged(self, kind: str, namespace: str, tag: str) -> Iterator[Manifest]:
        """Objects of a namespace with a tag, by name."""
        for name in sorted(self._index.get((kind, namespace, tag), ())):
            manifest = self.get(kind, namespace, name)
            if manifest is not None:
                yield manifest

    def places(self, kind: str) -> list[Place]:
        """All known objects of a kind."""
        return list(self._kinds.get(kind, ()))

    def _drop(self, kind: str, place: Place) -> None:
        entry = self._kinds.get(kind, {}).pop(place, None)
        for tag in entry.tags if entry else ():
            names = self._index[kind, place[0], tag]
            names.discard(place[1])
            if not names:
                del self._index[kind, place[0], tag]


def place_of(manifest: Manifest) -> Place:
    """Where an object is."""
    return manifest["metadata"]["namespace"], manifest["metadata"]["name"]


def _rest(manifest: Manifest, written: Collection[str]) -> Manifest:
    """What is left of an object without the parts that we wrote and the marks that every write changes."""
    rest = {key: value for key, value in manifest.items() if key not in written}
    if "metadata" in rest:
        rest["metadata"] = {key: value for key, value in rest["metadata"].items() if key != "resourceVersion"}
    return rest


def _trim(manifest: Manifest) -> Manifest:
    """Without what nothing here reads: managed fields, kubectl's copy, most of a pod."""
    metadata = {key: value for key, value in manifest["metadata"].items() if key != "managedFields"}
    annotations = {key: value for key, value in metadata.get("annotations", {}).items() if key != _LAST_APPLIED}
    if annotations:
        metadata["annotations"] = annotations
    else:
        metadata.pop("annotations", None)
    trimmed = {**manifest, "metadata": metadata}
    if manifest["kind"] == "Pod":
        trimmed.pop("spec", None)
        status = manifest.get("status", {})
        trimmed["status"] = {key: status[key] for key in _POD_STATUS if key in status}
    return trimmed
