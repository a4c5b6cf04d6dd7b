"""Every file of examples/ is what it says it is, and the API takes it.

Files are found, not listed: manifests are applied to a real kube-apiserver, kustomizations are built first, values of
the chart are rendered, also those within Flux and Argo CD. Kinds of third parties are skipped, and named.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import binaries
import pytest
import yaml
from typer.testing import CliRunner

from sixfold_api.kinds import KINDS, POLICY
from sixfold_api.names import GROUP
from sixfold_runtime.cli import app

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples"
CHART = ROOT / "helm" / "sixfold"
WORKFLOWS = FOLDER / "ci"
"""For a build server; tests/unit/test_gate.py tries them."""
KUSTOMIZE = "kustomize.config.k8s.io"
BUILT_IN = {"v1", "apps/v1", "batch/v1", "networking.k8s.io/v1", "policy/v1", "autoscaling/v2"}


def files() -> list[Path]:
    """Models are folders with none."""
    return sorted(path for path in FOLDER.rglob("*.y*ml") if not path.is_relative_to(WORKFLOWS))


def named(path: Path) -> str:
    return str(path.relative_to(FOLDER))


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def group(document: dict[str, Any]) -> str:
    return str(document["apiVersion"]).partition("/")[0]


def is_values(path: Path) -> bool:
    return path.name.startswith("values")


MANIFESTS = [path for path in files() if not is_values(path) and path.name != "kustomization.yaml"]
KUSTOMIZATIONS = [path for path in files() if path.name == "kustomization.yaml"]


def values() -> Iterator[tuple[str, dict[str, Any]]]:
    """Values of the chart: files of their own, and those of HelmRelease and Application."""
    for path in files():
        if is_values(path):
            yield named(path), yaml.safe_load(path.read_text())
            continue
        for document in documents(path):
            if document.get("kind") == "HelmRelease":
                yield f"{named(path)}: HelmRelease", document["spec"]["values"]
            if document.get("kind") == "Application" and "helm" in document["spec"]["source"]:
                yield f"{named(path)}: Application", document["spec"]["source"]["helm"]["valuesObject"]


def taken(kubectl: Any, found: list[dict[str, Any]], where: str) -> int:
    """How many of the documents the API server was asked about; it must take all of them, and the models too."""
    ours = [each for each in found if each["apiVersion"] in BUILT_IN or group(each) == GROUP]
    for document in found:
        assert document["kind"]
        assert document["metadata"]["name"]
        if document not in ours:
            print(f"{where}: {document['kind']} of {document['apiVersion']} isn't applied: no such kind here")
    for document in ours:
        document["metadata"].pop("namespace", None)  # that of an overlay isn't there
        for kind in KINDS:
            if document["kind"] == kind.kind and group(document) == GROUP:
                kind.spec.model_validate(document["spec"])
    if ours:
        assert kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=yaml.safe_dump_all(ours))
    return len(ours)


@pytest.mark.parametrize("path", MANIFESTS, ids=named)
def test_manifests_are_taken(kubectl: Any, path: Path) -> None:
    if not taken(kubectl, documents(path), named(path)):
        pytest.skip("all of its kinds are third parties'")


@pytest.mark.parametrize("path", KUSTOMIZATIONS, ids=named)
def test_kustomizations_build_what_is_taken(kubectl: Any, path: Path) -> None:
    assert group(documents(path)[0]) == KUSTOMIZE
    built = kubectl("kustomize", str(path.parent))
    assert taken(kubectl, list(yaml.safe_load_all(built)), named(path))


@pytest.mark.parametrize(("where", "content"), [pytest.param(*each, id=each[0]) for each in values()])
def test_values_fit_the_chart(tmp_path: Path, where: str, content: dict[str, Any]) -> None:
    given = tmp_path / "values.yaml"
    given.write_text(yaml.safe_dump(content))
    command = [str(binaries.helm()), "template", "sixfold", str(CHART), "--kube-version=1.34.4", "-f", str(given)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"{where}: {done.stderr}"
    assert done.stdout


@pytest.mark.parametrize("folder", sorted({path.parent for path in MANIFESTS}), ids=named)
def test_policies_have_their_variants_and_can_be_explained(folder: Path) -> None:
    found = [document for path in MANIFESTS if path.parent == folder for document in documents(path)]
    policies = [each["metadata"]["name"] for each in found if each["kind"] == POLICY.kind]
    if not policies:
        pytest.skip("no policy is in this folder")
    variants = {each["metadata"]["name"] for each in found if each["kind"] == "ModelVariant"}
    for policy in found:
        if policy["kind"] == POLICY.kind:
            assert set(references(policy["spec"])) <= variants, policy["metadata"]["name"]
    for name in policies:
        told = CliRunner().invoke(app, ["explain", "policy", name, "-f", str(folder)])
        assert told.exit_code == 0, told.output


def references(node: Any) -> Iterator[str]:
    """Names of the variants in a spec."""
    if isinstance(node, list):
        for each in node:
            yield from references(each)
    if isinstance(node, dict):
        for key, value in node.items():
            if key.lower().endswith("variantref"):
                yield value["name"]
            else:
                yield from references(value)


def test_every_folder_is_in_the_table() -> None:
    table = (FOLDER / "README.md").read_text()
    for path in sorted(FOLDER.iterdir()):
        if path.is_dir() and path.name != "models":
            assert f"`{path.name}/`" in table, path.name
