"""Serving straight from resource files, without a cluster."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sixfold_api.effective import effective
from sixfold_api.modes import Mode, ModeState
from sixfold_api.policy import InferencePolicySpec
from sixfold_api.runtime_config import RuntimeConfig
from sixfold_api.scalars import AcceleratorType
from sixfold_runtime import manifests
from sixfold_runtime.config import ConfigStore
from sixfold_runtime.local_models import LocalModels, resolve
from sixfold_runtime.manifests import ManifestError, Policy
from sixfold_runtime.settings import RuntimeSettings

log = logging.getLogger(__name__)


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
    models = resolve(policy, found.variants, claims)
    device = settings.device
    if device == "auto" and policy.spec.engine.accelerator.type is AcceleratorType.CPU:
        device = "cpu"
    settings = settings.model_copy(
        update={"policy": policy.name, "namespace": policy.namespace, "models": models.served, "device": device}
    )
    lacking = _lacking(policy.spec, models, settings)
    config = ConfigStore(
        _runtime_config(policy.spec, models.unsupported),
        policy.file,
        lambda content: _reread(policy, models, settings, lacking, content),
    )
    states = {mode.name: mode.state for mode in effective(policy.spec, unsupported=models.unsupported).modes}
    warnings = [
        f"{mode} is off: {reason}"
        for mode, reason in models.unsupported.items()
        if states[mode] is ModeState.UNSUPPORTED
    ]
    return LocalSetup(settings, config, (*warnings, *lacking))


def _lacking(spec: InferencePolicySpec, models: LocalModels, settings: RuntimeSettings) -> list[str]:
    """What the policy asks for and this process can't know from the files, and what to do about it."""
    reuse = spec.generation and spec.generation.kv_cache_reuse
    warnings = models.missing_tasks(spec)
    if spec.gateway.api_keys_secret_ref is not None and settings.api_keys_directory is None:
        warnings.append("the gateway is open: spec.gateway.apiKeysSecretRef needs --api-keys DIRECTORY here")
    if reuse and reuse.redis is not None and settings.redis_directory is None:
        warnings.append(
            "keys and values stay in this process: spec.generation.kvCacheReuse.redis needs --redis DIRECTORY here,"
            " with the address in its file `url`"
        )
    if spec.streaming.dictionary_config_map_ref is not None and settings.stream_dictionary_directory is None:
        warnings.append(
            "streams go without a dictionary: spec.streaming.dictionaryConfigMapRef needs --stream-dictionary FILE here"
        )
    return warnings


def _shape(spec: InferencePolicySpec) -> tuple[object, ...]:
    """What models are loaded from: a change needs a restart."""
    generation, classification = spec.generation, spec.classification
    speculative = generation and generation.speculative
    return (
        generation and (generation.variant_ref, generation.quantized),
        speculative and (speculative.draft_variant_ref, speculative.draft_device),
        spec.engine.full_weights,
        classification and classification.variant_ref,
    )


def _runtime_config(spec: InferencePolicySpec, unsupported: Mapping[Mode, str]) -> RuntimeConfig:
    """Sequences are Unix milliseconds, as the operator's. One process is one gateway: it has the whole rate limit."""
    one_gateway = spec.model_copy(update={"gateway": spec.gateway.model_copy(update={"replicas": 1})})
    result = effective(one_gateway, unsupported=unsupported)
    sequence = time.time_ns() // 1_000_000
    return RuntimeConfig(sequence=sequence, stable=result.config, provenance=result.provenance)


def _reread(
    policy: Policy, models: LocalModels, settings: RuntimeSettings, told: list[str], content: bytes
) -> RuntimeConfig:
    """The configuration in an edited file. Raises ManifestError, also for a change that needs a restart.

    `told` is what the user knows to be lacking.
    """
    try:
        found = manifests.parse(policy.file, content).policy(policy.name)
    except ManifestError as error:
        raise ManifestError(str(error).removeprefix(f"{policy.file}: ")) from error  # the store names the file
    if _shape(found.spec) != _shape(policy.spec):
        raise ManifestError("another variantRef, draftDevice or fullWeights needs a restart here")
    for warning in _lacking(found.spec, models, settings):
        if warning not in told:
            log.warning(warning)
            told.append(warning)
    return _runtime_config(found.spec, models.unsupported)
