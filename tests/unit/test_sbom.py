"""What each image holds is listed, as it is locked; the images run as nobody in particular."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from sixfold_operator.builders.common import USER_ID

REPOSITORY = Path(__file__).resolve().parents[2]
LOCK: dict[str, Any] = tomllib.loads((REPOSITORY / "uv.lock").read_text())
PROJECT: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
EXTRAS = {"operator": ["operator"], "runtime": ["runtime", "quantise"]}
DOCKERFILES = {"operator": "operator/Dockerfile", "runtime": "runtime_image/Dockerfile"}


@pytest.fixture(scope="module")
def components() -> dict[str, dict[str, str]]:
    """Image -> name -> version, as `make sbom` lists them."""
    subprocess.run(["make", "-s", "sbom"], cwd=REPOSITORY, check=True)
    files = {image: REPOSITORY / ".cache" / "sbom" / f"{image}.cdx.json" for image in EXTRAS}
    found = {}
    for image, file in files.items():
        document = json.loads(file.read_text())
        assert (document["bomFormat"], document["metadata"]["component"]["name"]) == ("CycloneDX", "sixfold")
        found[image] = {entry["name"]: entry["version"] for entry in document["components"]}
        assert all(entry["purl"].startswith("pkg:pypi/") for entry in document["components"])
    return found


@pytest.mark.parametrize("image", EXTRAS)
def test_all_that_is_locked_for_an_image_is_listed(components: dict[str, dict[str, str]], image: str) -> None:
    locked = {package["name"]: package for package in LOCK["package"]}
    asked = [*PROJECT["dependencies"], *(name for extra in EXTRAS[image] for name in extras()[extra])]
    wanted = [re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower() for requirement in asked]
    closure: set[str] = set()
    while wanted:
        name = wanted.pop()
        if name not in closure:
            closure.add(name)
            wanted += [entry["name"] for entry in locked[name].get("dependencies", []) if is_for_us(entry)]
    listed = components[image]
    assert closure <= listed.keys()
    assert {name: locked[name]["version"] for name in listed} == listed


def is_for_us(dependency: dict[str, Any]) -> bool:
    """Without those for other systems and Pythons, which a marker names."""
    return "marker" not in dependency


def extras() -> dict[str, list[str]]:
    found: dict[str, list[str]] = PROJECT["optional-dependencies"]
    return found


def test_neither_image_holds_the_other(components: dict[str, dict[str, str]]) -> None:
    assert "torch" not in components["operator"]
    assert "kopf" not in components["runtime"]
    for listed in components.values():
        assert not {"pytest", "schemathesis", "mypy"} & listed.keys()


@pytest.mark.parametrize("image", DOCKERFILES)
def test_images_run_without_root_and_carry_their_list(image: str) -> None:
    text = (REPOSITORY / DOCKERFILES[image]).read_text()
    *_, last = text.split("\nFROM ")
    assert f"USER {USER_ID}:{USER_ID}" in last
    assert "COPY --from=application /app /app" in last
    asked = " ".join(f"--extra {extra}" for extra in EXTRAS[image])
    assert re.search(rf"uv export [^\n]*{asked} --format cyclonedx1.5 \\\n +--output-file /app/sbom.cdx.json", text)
    assert re.search(r"uv==[0-9.]+", text), "the tool is pinned"
    assert "ADD " not in text, "nothing is fetched without a hash"
