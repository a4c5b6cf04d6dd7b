"""The way to a later version of the API, as crds/README.md lays it out: one with the same schema, without a webhook."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from sixfold_api.crdgen import crd
from sixfold_api.kinds import POLICY, VARIANT, Kind
from sixfold_api.names import GROUP, VERSION

HERE = Path(__file__).resolve().parent
NEXT = "v1beta1"
SPECS = {POLICY: "full-policy.yaml", VARIANT: "full-variant.yaml"}
both_kinds = pytest.mark.parametrize("kind", SPECS, ids=lambda kind: kind.kind)


def full_specs(kind: Kind) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((HERE / SPECS[kind]).read_text()))


def as_text(value: Any) -> Any:
    """With text for each scalar: a quantity may be written as a number."""
    if isinstance(value, dict):
        return {key: as_text(item) for key, item in value.items()}
    return [as_text(item) for item in value] if isinstance(value, list) else str(value)


@both_kinds
def test_an_object_loses_nothing_in_the_model(api: Any, kind: Kind) -> None:
    """What the API stores is the same after it went through the model that every version is made from."""
    for spec in full_specs(kind):
        stored = api.create(kind, spec).spec
        model = kind.spec.model_validate(stored)
        assert as_text(model.model_dump(by_alias=True, mode="json", exclude_unset=True)) == as_text(stored)


class Versions:
    """The CRD of a kind, and its objects as each version shows them."""

    def __init__(self, client: httpx.Client, kind: Kind) -> None:
        self.client, self.kind = client, kind
        self.crd_path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{kind.plural}.{GROUP}"

    def path(self, version: str, name: str = "") -> str:
        base = f"/apis/{GROUP}/{version}/namespaces/default/{self.kind.plural}"
        return f"{base}/{name}" if name else base

    def change(self, storage: str, served: tuple[str, ...], dropped: tuple[str, ...] = ()) -> None:
        """Set the CRD's versions and wait until just the served ones answer."""
        live, document = self._crd(), crd(self.kind)
        (version,) = document["spec"]["versions"]
        document["spec"]["versions"] = [
            {**copy.deepcopy(version), "name": name, "served": name in served, "storage": name == storage}
            for name in (VERSION, NEXT)
            if name not in dropped
        ]
        document["spec"]["conversion"] = {"strategy": "None"}
        document["metadata"]["resourceVersion"] = live["metadata"]["resourceVersion"]
        answer = self.client.put(self.crd_path, json=document)
        assert answer.is_success, answer.text
        for name in (VERSION, NEXT):
            self._wait(lambda name=name: self.client.get(self.path(name)).is_success == (name in served))

    def stored_versions(self) -> list[str]:
        versions: list[str] = self._crd()["status"]["storedVersions"]
        return versions

    def migrate(self, version: str) -> None:
        """Write every object back as it is, which stores it anew, and say that nothing older is left."""
        for item in self.client.get(self.path(version)).raise_for_status().json()["items"]:
            self.client.put(self.path(version, item["metadata"]["name"]), json=item).raise_for_status()
        change, headers = {"status": {"storedVersions": [version]}}, {"Content-Type": "application/merge-patch+json"}
        self.client.patch(f"{self.crd_path}/status", json=change, headers=headers).raise_for_status()

    def objects(self, version: str) -> list[dict[str, Any]]:
        """Without what a version or a write changes by nature."""
        items = self.client.get(self.path(version)).raise_for_status().json()["items"]
        for item in items:
            assert item.pop("apiVersion") == f"{GROUP}/{version}"
            for field in ("managedFields", "resourceVersion"):
                item["metadata"].pop(field)
        return list(items)

    def apply(self, version: str, name: str, spec: dict[str, Any]) -> None:
        """Server-side apply, as the operator and GitOps do."""
        body = {"apiVersion": f"{GROUP}/{version}", "kind": self.kind.kind, "metadata": {"name": name}, "spec": spec}
        headers = {"Content-Type": "application/apply-patch+yaml"}
        query = {"fieldManager": "test", "fieldValidation": "Strict"}
        answer = self.client.patch(self.path(version, name), params=query, json=body, headers=headers)
        assert answer.is_success, answer.text

    def _crd(self) -> dict[str, Any]:
        live: dict[str, Any] = self.client.get(self.crd_path).raise_for_status().json()
        return live

    @staticmethod
    def _wait(holds: Callable[[], bool]) -> None:
        for _ in range(200):
            if holds():
                return
            time.sleep(0.05)
        raise AssertionError("kube-apiserver doesn't serve what the CRD says")


@pytest.fixture
def versions(api: Any, kind: Kind) -> Iterator[Versions]:
    made = Versions(api.client, kind)
    yield made
    api.client.delete(made.path(VERSION)).raise_for_status()


@both_kinds
def test_objects_go_to_the_next_version_and_back(versions: Versions, kind: Kind) -> None:
    specs = full_specs(kind)
    for number, spec in enumerate(specs):
        versions.apply(VERSION, f"full-{number}", spec)
    first = versions.objects(VERSION)

    versions.change(storage=VERSION, served=(VERSION, NEXT))
    assert versions.objects(NEXT) == first
    versions.apply(NEXT, "full-0", specs[0])
    assert versions.objects(VERSION) == first, "applied again by either version, nothing changes"

    versions.change(storage=NEXT, served=(VERSION, NEXT))
    assert versions.stored_versions() == [VERSION, NEXT]
    assert versions.objects(NEXT) == versions.objects(VERSION) == first
    versions.migrate(NEXT)
    versions.change(storage=NEXT, served=(NEXT,), dropped=(VERSION,))
    assert versions.objects(NEXT) == first, "nothing depends on the first version any more"

    versions.change(storage=VERSION, served=(VERSION, NEXT))
    versions.migrate(VERSION)
    versions.change(storage=VERSION, served=(VERSION,), dropped=(NEXT,))
    assert versions.objects(VERSION) == first
