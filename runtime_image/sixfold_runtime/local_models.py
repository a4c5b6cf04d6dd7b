"""The models of a policy in resource files: where their weights lie on this machine, and which modes go without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sixfold_api.generation import GenerationSpec
from sixfold_api.modes import Mode
from sixfold_api.policy import InferencePolicySpec
from sixfold_api.runtime_config import Draft, ServedModel, WeightSet
from sixfold_api.scalars import FullWeights, Task
from sixfold_api.variant import CLAIM_SCHEME
from sixfold_runtime.manifests import ManifestError, Policy, Variant
from sixfold_runtime.prepare.failures import PreparationError
from sixfold_runtime.prepare.files import EXITS, SLICES
from sixfold_runtime.prepare.tokenizer import read_tokenizer


class _NotPreparedError(ManifestError):
    """Weights that only a preparation makes, and that it hasn't made here."""


@dataclass(frozen=True)
class LocalModels:
    """What a policy serves here."""

    served: list[ServedModel]
    unsupported: dict[Mode, str]
    """Modes that it goes without, asked for or not, and why: quantised weights, a draft or exit heads that nobody has
    prepared here, or a draft with another tokenizer."""

    def missing_tasks(self, spec: InferencePolicySpec) -> list[str]:
        """Tasks of the policy that can't be served from the models' folders, and how they are made."""
        blocks = ((block, block.subgraphs) for block in (spec.generation, spec.classification) if block is not None)
        folders = {model.name: Path(model.path) for model in self.served}
        return [
            f"the task {task.name} of {block.variant_ref.name} can't be served: {path} is missing"
            " (`sixfold prepare slice` makes it)"
            for block, subgraphs in blocks
            for task in (subgraphs.tasks if subgraphs is not None else ())
            if not (path := folders[block.variant_ref.name] / SLICES / f"{task.name}.safetensors").is_file()
        ]


def resolve(policy: Policy, variants: Sequence[Variant], claims: Mapping[str, Path]) -> LocalModels:
    """Raises ManifestError for what can't be served at all."""
    spec, folders = policy.spec, _Folders(policy, variants, claims)
    models: list[ServedModel] = []
    unsupported: dict[Mode, str] = {}
    if spec.generation is not None:
        model, unsupported = _generation(spec.generation, spec.engine.full_weights or FullWeights.AUTO, folders)
        models.append(model)
    if spec.classification is not None:
        name = spec.classification.variant_ref.name
        path = folders.folder("classification.variantRef", name, Task.CLASSIFICATION, Task.TOKEN_CLASSIFICATION)
        models.append(ServedModel(name=name, task=folders.task(name), path=path))
        if not (exits := Path(path) / EXITS).is_file():
            unsupported[Mode.EARLY_EXIT] = (
                f"{name} has no exit heads here: {exits} is missing (`sixfold prepare --exit-heads` makes it)"
            )
    return LocalModels(models, unsupported)


def _generation(
    generation: GenerationSpec, full_weights: FullWeights, folders: _Folders
) -> tuple[ServedModel, dict[Mode, str]]:
    name = generation.variant_ref.name
    path = folders.folder("generation.variantRef", name, Task.GENERATION)
    quantized, draft, unsupported = None, None, {}
    if generation.quantized is not None:
        other = generation.quantized.variant_ref.name
        try:
            folder = folders.folder("generation.quantized.variantRef", other, Task.GENERATION)
        except _NotPreparedError as error:
            unsupported[Mode.QUANTIZED] = str(error)
        else:
            if _fingerprint(folder) != _fingerprint(path):
                raise ManifestError(f"{other} and {name} have different tokenizers: both must come from one model")
            quantized = WeightSet(name=other, path=folder)
    if generation.speculative is not None:
        other = generation.speculative.draft_variant_ref.name
        try:
            folder = folders.folder("generation.speculative.draftVariantRef", other, Task.GENERATION)
        except _NotPreparedError as error:
            unsupported[Mode.SPECULATIVE] = str(error)
        else:
            if _fingerprint(folder) == _fingerprint(path):
                draft = Draft(name=other, path=folder, device=generation.speculative.draft_device)
            else:
                unsupported[Mode.SPECULATIVE] = f"the tokenizer of the draft {other} isn't that of {name}"
    model = ServedModel(
        name=name, task=Task.GENERATION, path=path, quantized=quantized, full_weights=full_weights, draft=draft
    )
    return model, unsupported


def _fingerprint(folder: str) -> str:
    try:
        return read_tokenizer(Path(folder)).fingerprint
    except PreparationError as error:
        raise ManifestError(f"{folder}: {error}") from error


@dataclass(frozen=True)
class _Folders:
    """Where the weights of variants lie on this machine."""

    policy: Policy
    variants: Sequence[Variant]
    claims: Mapping[str, Path]

    def task(self, name: str) -> Task:
        """Of a variant whose folder was found."""
        return self._variant("", name).spec.task

    def folder(self, field: str, name: str, *tasks: Task) -> str:
        """The folder of the variant that a field of the policy's spec names. Raises ManifestError."""
        where = f"{self.policy.file}: InferencePolicy/{self.policy.name}: spec.{field}"
        variant = self._variant(where, name)
        if variant.spec.task not in tasks:
            raise ManifestError(f"{where}: {name} has the task {variant.spec.task}, {' or '.join(tasks)} is needed")
        place, uri = self._place(variant, ())
        folder = self._at(place, uri)
        if not folder.is_dir() and variant.spec.keeps_weights:  # the same weights, without the exit heads
            place, uri = self._source(variant, ())
            folder = self._at(place, uri)
        if folder.is_dir():
            return str(folder)
        if variant.spec.writes:
            raise _NotPreparedError(f"{name} isn't prepared here: {folder} is not a folder (see `sixfold prepare`)")
        raise ManifestError(f"{place}: {folder} is not a folder")

    def _at(self, place: str, uri: str) -> Path:
        """The folder that stands for a pvc:// address. Raises ManifestError where nobody said which does."""
        claim, _, path = uri.removeprefix(CLAIM_SCHEME).partition("/")
        if claim not in self.claims:
            raise ManifestError(f"{place}: say which folder stands for the claim: --claim {claim}=FOLDER")
        return self.claims[claim] / path

    def _variant(self, where: str, name: str) -> Variant:
        found = next((variant for variant in self.variants if variant.name == name), None)
        if found is None:
            raise ManifestError(f"{where}: no file has a ModelVariant {name}; add its file with -f")
        return found

    def _place(self, variant: Variant, seen: tuple[str, ...]) -> tuple[str, str]:
        """The field that says where the weights lie, and the pvc:// address of their folder."""
        if variant.spec.artifact is None:
            return self._source(variant, seen)
        place = f"{variant.file}: ModelVariant/{variant.name}: spec.artifact.claimName"
        return place, f"{CLAIM_SCHEME}{variant.spec.artifact.claim_name}/{variant.name}"

    def _source(self, variant: Variant, seen: tuple[str, ...]) -> tuple[str, str]:
        """As `_place`, of what the variant is made from."""
        where = f"{variant.file}: ModelVariant/{variant.name}: spec"
        if variant.spec.source.uri is not None:
            return f"{where}.source.uri", variant.spec.source.uri
        place = f"{where}.source.variantRef"
        other = self._variant(place, variant.spec.source.variant_ref.name if variant.spec.source.variant_ref else "")
        if other.name in (*seen, variant.name):
            raise ManifestError(f"{place}: {other.name} and {variant.name} have each other as their source")
        return self._place(other, (*seen, variant.name))
