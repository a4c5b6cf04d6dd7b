"""The peer of the operator's benchmark: a loop that applies the same objects, and knows nothing of them.

The objects are what the operator applied in a cluster, read back from their managed fields.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from sixfold_operator.kube import FIELD_MANAGER, RESOURCES, Kube

Manifest = dict[str, Any]


def applied_part(live: Any, fields: Manifest) -> Any:
    """What a manager applied of an object or of a part of it: `fields` is its fieldsV1."""
    inside = {key: sub for key, sub in fields.items() if key != "."}
    if not inside:
        return live
    if isinstance(live, dict):
        return {key[2:]: applied_part(live[key[2:]], sub) for key, sub in inside.items() if key[2:] in live}
    return [applied_part(_item(live, key), sub) for key, sub in inside.items()]


def _item(items: list[Any], key: str) -> Any:
    """The item of a list that a key of fieldsV1 names: `k:` by some of its fields, `v:` by its value."""
    wanted = json.loads(key[2:])
    if key.startswith("v:"):
        return wanted
    return next(item for item in items if wanted.items() <= item.items())


def as_applied(live: Manifest) -> Manifest | None:
    """The manifest that the operator applied; None where the object isn't one of its own. Without owners, who are
    others in another cluster."""
    entries = live["metadata"].get("managedFields", [])
    own = [entry for entry in entries if entry["manager"] == FIELD_MANAGER and entry["operation"] == "Apply"]
    if not own:
        return None
    manifest: Manifest = applied_part(live, own[0]["fieldsV1"])
    manifest["metadata"].pop("ownerReferences", None)
    manifest["metadata"] |= {key: live["metadata"][key] for key in ("name", "namespace")}
    return {"apiVersion": live["apiVersion"], "kind": live["kind"], **manifest}


async def applied_objects(kube: Kube, selector: str) -> list[Manifest]:
    """All children, Jobs first: what waits longest for the cluster comes first."""
    found: list[Manifest] = []
    for kind in ("Job", "ConfigMap", "Service", "Deployment", "NetworkPolicy", "PodDisruptionBudget"):
        assert kind in RESOURCES
        items, _ = await kube.list(kind, None, selector)
        found += [manifest for item in items if (manifest := as_applied(item)) is not None]
    return found


async def apply_all(kube: Kube, manifests: list[Manifest], workers: int) -> None:
    """Each once, `workers` at a time."""
    waiting = iter(manifests)

    async def work() -> None:
        for manifest in waiting:
            await kube.apply(manifest, force=True)

    await asyncio.gather(*(work() for _ in range(workers)))
