"""Serving straight from resource files, without a cluster."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sixfold_api.effective import effective
from sixfold_api.generation import GenerationSpec
from sixfold_api.modes import Mode
from sixfold_api.policy import InferencePolicySpec
from sixfold_api.runtime_config import Draft, RuntimeConfig, ServedModel, WeightSet
from sixfold_api.scalars import AcceleratorType, FullWeights, Task
from sixfold_api.variant import CLAIM_SCHEME
from sixfold_runtime import manifests
from sixfold_runtime.config import ConfigStore
from sixfold_runtime.manifests import ManifestError, Policy, Variant
from sixfold_runtime.prepare.failures import PreparationError
from sixfold_runtime.prepare.tokenizer import read_tokenizer
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
    models = _Folders(policy, found.variants, claims).models()
    unsupported = _draft_mismatches(models)
    if unsupported:
        models = [model.model_copy(update={"draft": None}) for model in models]
    device = settings.device
    if device == "auto" and policy.spec.engine.accelerator.type is AcceleratorType.CPU:
        device = "cpu"
    settings = settings.model_copy(
        update={"policy": policy.name, "namespace": policy.namespace, "models": models, "device": device}
    )
    config = ConfigStore(
        _runtime_config(policy.spec, unsupported), policy.file, lambda content: _reread(policy, unsupported, content)
    )
    warnings = list(unsupported.values())
    if policy.spec.gateway.api_keys_secret_ref is not None and settings.api_keys_directory is None:
        warnings.append("the gateway is open: spec.gateway.apiKeysSecretRef needs --api-keys DIRECTORY here")
    return LocalSetup(settings, config, tuple(warnings))


@dataclass(frozen=True)
class _Folders:
    """Where the weights of a policy's variants lie on this machine."""

    policy: Policy
    variants: Sequence[Variant]
    claims: Mapping[str, Path]

    def models(self) -> list[ServedModel]:
        """What the policy serves. Raises ManifestError."""
        spec = self.policy.spec
        models = []
        if spec.generation is not None:
            models.append(self._generation(spec.generation, spec.engine.full_weights or FullWeights.AUTO))
        if spec.classification is not None:
            name = spec.classification.variant_ref.name
            path = self._folder("classification.variantRef", name, Task.CLASSIFICATION)
            models.append(ServedModel(name=name, task=Task.CLASSIFICATION, path=path))
        return models

    def _generation(self, generation: GenerationSpec, full_weights: FullWeights) -> ServedModel:
        name = generation.variant_ref.name
        path = self._folder("generation.variantRef", name, Task.GENERATION)
        quantized, draft = None, None
        if generation.quantized is not None:
            other = generation.quantized.variant_ref.name
            folder = self._folder("generation.quantized.variantRef", other, Task.GENERATION)
            quantized = WeightSet(name=other, path=folder)
        if generation.speculative is not None:
            other = generation.speculative.draft_variant_ref.name
            folder = self._folder("generation.speculative.draftVariantRef", other, Task.GENERATION)
            draft = Draft(name=other, path=folder, device=generation.speculative.draft_device)
        return ServedModel(
            name=name,
            task=Task.GENERATION,
            path=path,
            quantized=quantized,
            full_weights=full_weights,
            draft=draft,
        )

    def _folder(self, field: str, name: str, task: Task) -> str:
        where = f"{self.policy.file}: InferencePolicy/{self.policy.name}: spec.{field}"
        variant = self._variant(where, name)
        if variant.spec.task is not task:
            raise ManifestError(f"{where}: {name} has the task {variant.spec.task}, {task} is needed")
        place, uri = self._place(variant, ())
        claim, _, path = uri.removeprefix(CLAIM_SCHEME).partition("/")
        if claim not in self.claims:
            raise ManifestError(f"{place}: say which folder stands for the claim: --claim {claim}=FOLDER")
        folder = self.claims[claim] / path
        if not folder.is_dir():
            made = f"; `sixfold prepare` writes it: see ModelVariant/{name}" if variant.spec.writes else ""
            raise ManifestError(f"{place}: {folder} is not a folder{made}")
        return str(folder)

    def _variant(self, where: str, name: str) -> Variant:
        found = next((variant for variant in self.variants if variant.name == name), None)
        if found is None:
            raise ManifestError(f"{where}: no file has a ModelVariant {name}; add its file with -f")
        return found

    def _place(self, variant: Variant, seen: tuple[str, ...]) -> tuple[str, str]:
        """The field that says where the weights lie, and the pvc:// address of their folder."""
        where = f"{variant.file}: ModelVariant/{variant.name}: spec"
        if variant.spec.artifact is not None:
            return f"{where}.artifact.claimName", f"{CLAIM_SCHEME}{variant.spec.artifact.claim_name}/{variant.name}"
        if variant.spec.source.uri is not None:
            return f"{where}.source.uri", variant.spec.source.uri
        place = f"{where}.source.variantRef"
        other = self._variant(place, variant.spec.source.variant_ref.name if variant.spec.source.variant_ref else "")
        if other.name in (*seen, variant.name):
            raise ManifestError(f"{place}: {other.name} and {variant.name} have each other as their source")
        return self._place(other, (*seen, variant.name))


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


def _draft_mismatches(models: Sequence[ServedModel]) -> dict[Mode, str]:
    """The mode that a draft with another tokenizer rules out, with the reason.

    Raises ManifestError for quantised weights with another tokenizer, and for a tokenizer that can't be read.
    """
    unsupported = {}
    for model in models:
        if model.quantized is not None and _fingerprint(model.quantized.path) != _fingerprint(model.path):
            raise ManifestError(f"{model.quantized.name} and {model.name} have different tokenizers")
        if model.draft is not None and _fingerprint(model.draft.path) != _fingerprint(model.path):
            unsupported[Mode.SPECULATIVE] = f"the tokenizer of the draft {model.draft.name} isn't that of {model.name}"
    return unsupported


def _fingerprint(folder: str) -> str:
    try:
        return read_tokenizer(Path(folder)).fingerprint
    except PreparationError as error:
        raise ManifestError(f"{folder}: {error}") from error


def _runtime_config(spec: InferencePolicySpec, unsupported: Mapping[Mode, str]) -> RuntimeConfig:
    """Sequences are Unix milliseconds, as the operator's. One process is one gateway: it has the whole rate limit."""
    one_gateway = spec.model_copy(update={"gateway": spec.gateway.model_copy(update={"replicas": 1})})
    result = effective(one_gateway, unsupported=unsupported)
    sequence = time.time_ns() // 1_000_000
    return RuntimeConfig(sequence=sequence, stable=result.config, provenance=result.provenance)


def _reread(policy: Policy, unsupported: Mapping[Mode, str], content: bytes) -> RuntimeConfig:
    """The configuration in an edited file. Raises ManifestError, also for a change that needs a restart."""
    try:
        found = manifests.parse(policy.file, content).policy(policy.name)
    except ManifestError as error:
        raise ManifestError(str(error).removeprefix(f"{policy.file}: ")) from error  # the store names the file
    if _shape(found.spec) != _shape(policy.spec):
        raise ManifestError("another variantRef, draftDevice or fullWeights needs a restart here")
    return _runtime_config(found.spec, unsupported)
