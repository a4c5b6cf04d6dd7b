"""Sixfold's resources in YAML files: read, and validated with the same models as in the cluster."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from sixfold_api.names import API_VERSION, POLICY_KIND, VARIANT_KIND
from sixfold_api.policy import InferencePolicySpec
from sixfold_api.scalars import OUR_NAME_PATTERN
from sixfold_api.variant import ModelVariantSpec
from sixfold_runtime.config import describe

Spec = TypeVar("Spec", bound=BaseModel)


class ManifestError(ValueError):
    """What is wrong, in which file and field."""


@dataclass(frozen=True)
class Policy:
    name: str
    namespace: str
    spec: InferencePolicySpec
    file: Path


@dataclass(frozen=True)
class Variant:
    name: str
    spec: ModelVariantSpec
    file: Path


@dataclass(frozen=True)
class Manifests:
    policies: tuple[Policy, ...]
    variants: tuple[Variant, ...]

    def policy(self, name: str | None = None) -> Policy:
        """The policy of that name, or the only one. Raises ManifestError."""
        found = [policy for policy in self.policies if name in (None, policy.name)]
        if len(found) == 1:
            return found[0]
        names = ", ".join(policy.name for policy in self.policies) or "none"
        wanted = f"no InferencePolicy {name}" if name else "exactly one InferencePolicy is needed"
        raise ManifestError(f"{wanted}; the files have: {names}")


def read(paths: Iterable[Path]) -> Manifests:
    """All policies and variants in files, or in the .yaml files of folders; other kinds are left alone.

    Raises ManifestError.
    """
    policies: list[Policy] = []
    variants: list[Variant] = []
    for path in _files(paths):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ManifestError(f"{path}: {error.strerror}") from error
        found = parse(path, content)
        policies += found.policies
        variants += found.variants
    return Manifests(tuple(policies), tuple(variants))


def parse(path: Path, content: bytes) -> Manifests:
    """What the content of one file holds. Raises ManifestError."""
    policies, variants = [], []
    for document in _documents(path, content):
        kind = document.get("kind")
        if document.get("apiVersion") != API_VERSION or kind not in (POLICY_KIND, VARIANT_KIND):
            continue
        name, namespace = _metadata(path, document)
        if kind == POLICY_KIND:
            policies.append(Policy(name, namespace, _spec(path, document, InferencePolicySpec), path))
        else:
            variants.append(Variant(name, _spec(path, document, ModelVariantSpec), path))
    return Manifests(tuple(policies), tuple(variants))


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(file for file in path.iterdir() if file.suffix in (".yaml", ".yml"))
        else:
            yield path


def _documents(path: Path, content: bytes) -> list[dict[str, Any]]:
    try:
        documents = list(yaml.safe_load_all(content))
    except (yaml.YAMLError, ValueError) as error:
        raise ManifestError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    for document in documents:
        if document is not None and not isinstance(document, dict):
            raise ManifestError(f"{path}: a document is not an object but {type(document).__name__}")
    return [document for document in documents if document]


def _metadata(path: Path, document: dict[str, Any]) -> tuple[str, str]:
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if not isinstance(name, str) or not re.match(OUR_NAME_PATTERN, name):
        raise ManifestError(
            f"{path}: {document['kind']}: metadata.name: at most 40 lower-case letters, digits and dashes,"
            f" a letter first; it is {name!r}"
        )
    return name, str(metadata.get("namespace") or "default") if isinstance(metadata, dict) else "default"


def _spec(path: Path, document: dict[str, Any], model: type[Spec]) -> Spec:
    try:
        return model.model_validate({} if document.get("spec") is None else document["spec"])
    except ValidationError as error:
        where = f"{path}: {document['kind']}/{document['metadata']['name']}"
        raise ManifestError(f"{where}: spec: {describe(error)}") from error
