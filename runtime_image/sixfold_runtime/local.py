"""Serving straight from resource files, without a cluster."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sixfold_api.effective import effective
from sixfold_api.policy import InferencePolicySpec
from sixfold_api.runtime_config import RuntimeConfig, ServedModel
from sixfold_api.scalars import AcceleratorType, Task
from sixfold_api.variant import CLAIM_SCHEME
from sixfold_runtime import manifests
from sixfold_runtime.config import ConfigStore
from sixfold_runtime.manifests import ManifestError, Policy, Variant
from sixfold_runtime.settings import RuntimeSettings


@dataclass(frozen=True)
class LocalSetup:
    settings: RuntimeSettings
    config: ConfigStore
    """Follows the policy's file: an edit of rollbackLevel and the like takes effect at once."""
    warnings: tuple[str, ...]


def load(
    files: Sequence[Path], claims: Mapping[str, Path], policy_name: str | None, settings: RuntimeSettings
) -> LocalSetup:
    """What the operator would make of the policy, for one process on this machine.

    Args:
        files: YAML files, or folders of them, with one policy and its variants.
        claims: the folder that stands for each claim of a pvc://claim/path.
        settings: of the process; name, namespace, models and device come from the files.

    Raises:
        ManifestError: a file that can't be read or doesn't validate, a variant that is missing or of another task.
    """
    found = manifests.read(files)
    policy = found.policy(policy_name)
    models = [_served(policy, task, name, found.variants, claims) for task, name in _references(policy.spec)]
    device = settings.device
    if device == "auto" and policy.spec.engine.accelerator.type is AcceleratorType.CPU:
        device = "cpu"
    settings = settings.model_copy(
        update={"policy": policy.name, "namespace": policy.namespace, "models": models, "device": device}
    )
    config = ConfigStore(_runtime_config(policy.spec), policy.file, lambda content: _reread(policy, content))
    warnings = []
    if policy.spec.gateway.api_keys_secret_ref is not None and settings.api_keys_directory is None:
        warnings.append("the gateway is open: spec.gateway.apiKeysSecretRef needs --api-keys DIRECTORY here")
    return LocalSetup(settings, config, tuple(warnings))


def _references(spec: InferencePolicySpec) -> list[tuple[Task, str]]:
    references = []
    if spec.generation is not None:
        references.append((Task.GENERATION, spec.generation.variant_ref.name))
    if spec.classification is not None:
        references.append((Task.CLASSIFICATION, spec.classification.variant_ref.name))
    return references


def _served(
    policy: Policy, task: Task, name: str, variants: Sequence[Variant], claims: Mapping[str, Path]
) -> ServedModel:
    where = f"{policy.file}: InferencePolicy/{policy.name}: spec.{task.lower()}.variantRef"
    variant = next((variant for variant in variants if variant.name == name), None)
    if variant is None:
        raise ManifestError(f"{where}: no file has a ModelVariant {name}; add its file with -f")
    if variant.spec.task is not task:
        raise ManifestError(f"{where}: {name} has the task {variant.spec.task}, {task} is needed")
    uri = variant.spec.source.uri or ""
    place = f"{variant.file}: ModelVariant/{name}: spec.source.uri"
    if not uri.startswith(CLAIM_SCHEME):
        raise ManifestError(f"{place}: {uri} needs a cluster to fetch it; download it and use pvc://claim/path here")
    claim, _, path = uri.removeprefix(CLAIM_SCHEME).partition("/")
    if claim not in claims:
        raise ManifestError(f"{place}: say which folder stands for the claim: --claim {claim}=FOLDER")
    folder = claims[claim] / path
    if not folder.is_dir():
        raise ManifestError(f"{place}: {folder} is not a folder")
    return ServedModel(name=name, task=task, path=str(folder))


def _runtime_config(spec: InferencePolicySpec) -> RuntimeConfig:
    """Sequences are Unix milliseconds, as the operator's. One process is one gateway: it has the whole rate limit."""
    one_gateway = spec.model_copy(update={"gateway": spec.gateway.model_copy(update={"replicas": 1})})
    result = effective(one_gateway)
    sequence = time.time_ns() // 1_000_000
    return RuntimeConfig(sequence=sequence, stable=result.config, provenance=result.provenance)


def _reread(policy: Policy, content: bytes) -> RuntimeConfig:
    """The configuration in an edited file. Raises ManifestError, also for a change that needs a restart."""
    try:
        found = manifests.parse(policy.file, content).policy(policy.name)
    except ManifestError as error:
        raise ManifestError(str(error).removeprefix(f"{policy.file}: ")) from error  # the store names the file
    if _references(found.spec) != _references(policy.spec):
        raise ManifestError("another variantRef needs a restart here")
    return _runtime_config(found.spec)
