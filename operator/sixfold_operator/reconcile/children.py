"""Bringing a child to what was asked for: never a foreign object, never a write that changes nothing."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from sixfold_operator.builders.common import SPEC_HASH_ANNOTATION, Manifest, with_hash
from sixfold_operator.cache import Cache
from sixfold_operator.kube import ApiError, Kube

_SUFFIXES = {
    "m": Decimal("0.001"),
    "": Decimal(1),
    **{unit: Decimal(1000) ** power for power, unit in enumerate("kMGTPE", 1)},
    **{f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", 1)},
}


class ForeignObjectError(Exception):
    """An object with the name of a child exists, and this owner doesn't control it."""

    def __init__(self, manifest: Manifest) -> None:
        owner = controller(manifest)
        whose = f"is controlled by {owner['kind']} {owner['name']}" if owner else "has no controller"
        super().__init__(
            f"{manifest['kind']} {manifest['metadata']['name']} exists already and {whose}; it is left alone. "
            "Delete or rename it, or give this resource another name"
        )


def controller(manifest: Manifest) -> Manifest | None:
    """The owner reference of the object's controller."""
    references = manifest["metadata"].get("ownerReferences", [])
    return next((reference for reference in references if reference.get("controller")), None)


def is_controlled_by(manifest: Manifest, owner_uid: str) -> bool:
    reference = controller(manifest)
    return reference is not None and reference["uid"] == owner_uid


def covers(live: Any, wanted: Any) -> bool:
    """Whether `live` has all that is `wanted`. Defaults that the API filled in don't count, quantities compare by
    value, and what the API doesn't store (empty values) may be absent."""
    if isinstance(wanted, dict):
        live = {} if live is None else live
        return isinstance(live, dict) and all(covers(live.get(key), value) for key, value in wanted.items())
    if isinstance(wanted, list):
        live = [] if live is None else live
        return isinstance(live, list) and len(live) == len(wanted) and all(map(covers, live, wanted))
    if live is None:
        return wanted in (None, "", False)
    return bool(live == wanted) or _same_quantity(live, wanted)


def has_drifted(live: Manifest, wanted: Manifest) -> bool:
    """Whether `live` must be applied again to become `wanted` (with its hash)."""
    metadata, wish = live["metadata"], wanted["metadata"]
    for part in ("annotations", "labels"):  # texts, the hash among them: no two are the same quantity
        has = metadata.get(part) or {}
        if any(has.get(key) != value for key, value in wish[part].items()):
            return True
    return any(not covers(live.get(part), wanted[part]) for part in ("spec", "data") if part in wanted)


class Children:
    """Applies manifests that have a hash of their own and an owner."""

    def __init__(self, kube: Kube, cache: Cache) -> None:
        self._kube = kube
        self._cache = cache
        self._settled: dict[tuple[str, str, str], tuple[str, str]] = {}

    async def ensure(self, manifest: Manifest) -> Manifest:
        """The child as it is after making sure that it is as wanted.

        Raises ForeignObjectError if the name is taken, ApiError as the API does.
        """
        wanted = with_hash(manifest)
        live = await self.find(manifest)
        if live is None:
            return await self._create(wanted)
        if "deletionTimestamp" in live["metadata"] or not self._needs_apply(live, wanted):
            return live
        return await self._change(live, wanted)

    async def find(self, manifest: Manifest) -> Manifest | None:
        """The live child of that name; ForeignObjectError if it is someone else's."""
        metadata = manifest["metadata"]
        kind, namespace, name = manifest["kind"], metadata["namespace"], metadata["name"]
        live = self._cache.get(kind, namespace, name)
        if live is None:
            # Only labelled objects are watched: what isn't in the cache can still be a foreign one.
            live = await self._kube.get(kind, namespace, name)
        if live is not None and not is_controlled_by(live, metadata["ownerReferences"][0]["uid"]):
            raise ForeignObjectError(live)
        return live

    async def _create(self, wanted: Manifest) -> Manifest:
        try:
            created = await self._kube.apply(wanted, force=False)
        except ApiError as error:
            if error.status == 409 and (taken := await self.find(wanted)) is not None:
                return taken
            raise
        self._remember(created, wanted)
        return created

    async def _change(self, live: Manifest, wanted: Manifest) -> Manifest:
        uid = live["metadata"]["uid"]
        try:
            changed = await self._kube.apply({**wanted, "metadata": {**wanted["metadata"], "uid": uid}}, force=True)
        except ApiError as error:
            if error.status in (404, 409):
                # Gone or replaced since: the next try looks at what is there then.
                self._cache.remove(live)
            raise
        self._remember(changed, wanted)
        return changed

    def _needs_apply(self, live: Manifest, wanted: Manifest) -> bool:
        return has_drifted(live, wanted) and self._settled.get(_place(live)) != _state(live, wanted)

    def _remember(self, result: Manifest, wanted: Manifest) -> None:
        """Where something in the cluster changes what was applied (a webhook), don't fight it for ever."""
        self._cache.put(result, written=("metadata", "spec", "data"))
        if has_drifted(result, wanted):
            self._settled[_place(result)] = _state(result, wanted)
        else:
            self._settled.pop(_place(result), None)


def _place(manifest: Manifest) -> tuple[str, str, str]:
    return manifest["kind"], manifest["metadata"]["namespace"], manifest["metadata"]["name"]


def _state(live: Manifest, wanted: Manifest) -> tuple[str, str]:
    """Identifies a version of the spec of `live` under a wish. Deployments have generations; status doesn't count."""
    metadata = live["metadata"]
    version = metadata.get("generation") or metadata["resourceVersion"]
    return f"{metadata['uid']}/{version}", wanted["metadata"]["annotations"][SPEC_HASH_ANNOTATION]


def _same_quantity(one: Any, other: Any) -> bool:
    first, second = _quantity(one), _quantity(other)
    return first is not None and first == second


def _quantity(value: Any) -> Decimal | None:
    """The number that a Kubernetes quantity stands for; None if it isn't one."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    text = str(value)
    digits = text.rstrip("kKMGTPEim")
    try:
        return Decimal(digits) * _SUFFIXES[text[len(digits) :]]
    except (ArithmeticError, KeyError):  # a number that no quantity can be, such as 1e99999999
        return None
