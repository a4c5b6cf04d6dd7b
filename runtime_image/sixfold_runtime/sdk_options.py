"""Options of an engine without a server, and the policy that they stand for: what a file would say in a cluster."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from sixfold_api.classification import EarlyExitSpec, ExitRule
from sixfold_api.generation import DraftLength, GenerationSpec, QuantizedSpec, SpeculativeSpec
from sixfold_api.kv_reuse import KVCacheReuseSpec, KVStore, RedisSpec
from sixfold_api.names import REDIS_URL_FILE
from sixfold_api.pods import SecretKeyRef, VariantRef
from sixfold_api.policy import ClassificationSpec, InferencePolicySpec
from sixfold_api.runtime_config import Draft, ServedModel, WeightSet
from sixfold_api.scalars import FullWeights, Task
from sixfold_api.subgraphs import SubgraphsSpec, SubgraphTask
from sixfold_runtime.engine.errors import ModelLoadError
from sixfold_runtime.engine.loader import task_of
from sixfold_runtime.engine.tokenizer import read_json
from sixfold_runtime.prepare.files import EXITS, SLICES

MODEL, QUANTIZED, DRAFT = "model", "quantized", "draft"
"""Names of the variants."""
REDIS = "redis"
"""Name of the Secret that the folder stands for."""


class GeneratingOptions(TypedDict, total=False):
    draft: Path | str | None
    """Folder of a much smaller model with the same tokenizer, for `speculate`."""
    quantized: Path | str | None
    """Folder of the same model with quantised weights; they answer from level 1."""
    num_tokens: int
    """Most tokens drafted at a time; absent means 5."""
    length: DraftLength
    """How many tokens a draft proposes at a time; absent means CostModel."""
    full_weights: FullWeights
    """Whether full and quantised weights stay in memory together; absent means Auto."""
    kv_cache_reuse: KVCacheReuseSpec | None
    """As in a policy: keys and values of a conversation so far are kept and not computed again."""
    redis_directory: Path | str | None
    """Of the Redis that several engines share: the file `url`, and `ca.crt` where its authority isn't a known one.
    Keys and values are kept there too, with kv_cache_reuse's settings or the usual ones."""


class ClassifyingOptions(TypedDict, total=False):
    rule: ExitRule
    """How sure a text must be to exit, for `early_exit`; absent means Calibrated."""
    threshold: float
    """Rule Fixed: least confidence of an exit."""
    max_disagreement: float
    """Rule Calibrated: most labels, as a share, that may differ from the full model's; absent: as it was prepared."""
    length_relaxation: float
    """Taken from a threshold, times the natural logarithm of the text's tokens; absent: as it was prepared."""


class EngineOptions(GeneratingOptions, ClassifyingOptions, total=False):
    """Of an InferenceEngine. Some are for models that generate, some for those that classify."""

    device: str
    """auto (the default), cpu or cuda."""
    level: int
    """Rollback level, as in a policy; absent means the highest. It can be changed later."""
    tasks: Sequence[str] | None
    """Task slices to offer; absent means all that lie in the model's folder."""
    pinned: Collection[str]
    """Tasks whose slices are loaded at the start and stay."""
    cache_bytes: int | None
    """Bytes of slices in memory, pinned ones included; absent means no limit."""


class RequestOptions(TypedDict, total=False):
    """The prompt, where it isn't text, and how tokens are drawn: names and defaults of the public API."""

    messages: Sequence[Mapping[str, str]]
    """A chat: each with `role` and `content`."""
    token_ids: Sequence[int]
    """Of the model's own tokenizer, special tokens included."""
    task: str
    """The task slice to compute with; absent means the model as it is."""
    max_tokens: int
    """Absent means 256; never beyond the context."""
    temperature: float
    """0 is greedy; absent means 1."""
    top_p: float
    top_k: int
    seed: int
    stop: str | Sequence[str]
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    conversation: str
    """What the caller calls the conversation: a hint where its keys and values may be found."""
    kv_reuse: bool
    """False: neither look for keys and values of earlier requests nor keep those of this one."""
    logprobs: int
    """Report each token's log-probability, and those of this many most likely ones."""


def policy_of(folder: Path, options: EngineOptions) -> tuple[InferencePolicySpec, ServedModel]:
    """The policy, and its only model.

    Raises:
        ModelLoadError: the folder is none of a model.
        ValueError: an option that is unknown, out of range, or not for this kind of model.
    """
    if not folder.is_dir():
        raise ModelLoadError(f"{folder} is no folder")
    # The loader refuses a model that is for no task.
    task = task_of(read_json(folder / "config.json", required=True)) or Task.GENERATION
    generates = task is Task.GENERATION
    unfit = ClassifyingOptions if generates else GeneratingOptions
    given = {name for name, value in options.items() if value is not None}
    if unknown := given - EngineOptions.__annotations__.keys():
        raise ValueError(f"unknown options: {', '.join(sorted(unknown))}")
    if wrong := given & unfit.__annotations__.keys():
        does = "generates" if generates else "classifies"
        raise ValueError(f"{folder} {does}: {', '.join(sorted(wrong))} can't be given")
    subgraphs = _subgraphs(folder, options)
    if generates:
        generation = _generation(options).model_copy(update={"subgraphs": subgraphs})
        return InferencePolicySpec(generation=generation), _generating_model(folder, options)
    classification = ClassificationSpec(
        variant_ref=VariantRef(name=MODEL), early_exit=_early_exit(folder, options), subgraphs=subgraphs
    )
    return InferencePolicySpec(classification=classification), ServedModel(name=MODEL, task=task, path=str(folder))


def _generation(options: EngineOptions) -> GenerationSpec:
    speculative = None
    if options.get("draft"):
        speculative = SpeculativeSpec(
            draft_variant_ref=VariantRef(name=DRAFT),
            num_tokens=options.get("num_tokens", 5),
            length=options.get("length", DraftLength.COST_MODEL),
        )
    quantized = QuantizedSpec(variant_ref=VariantRef(name=QUANTIZED)) if options.get("quantized") else None
    return GenerationSpec(
        variant_ref=VariantRef(name=MODEL),
        quantized=quantized,
        speculative=speculative,
        kv_cache_reuse=_kv_cache_reuse(options),
    )


def _kv_cache_reuse(options: EngineOptions) -> KVCacheReuseSpec | None:
    spec, directory = options.get("kv_cache_reuse"), options.get("redis_directory")
    if directory is None:
        if spec is not None and spec.store is KVStore.REDIS:
            raise ValueError("kv_cache_reuse with store Redis needs its address: redis_directory=FOLDER")
        return spec
    redis = RedisSpec(url_secret_ref=SecretKeyRef(name=REDIS, key=REDIS_URL_FILE))
    return (spec or KVCacheReuseSpec()).model_copy(update={"store": KVStore.REDIS, "redis": redis})


def _generating_model(folder: Path, options: EngineOptions) -> ServedModel:
    quantized, draft = options.get("quantized"), options.get("draft")
    return ServedModel(
        name=MODEL,
        task=Task.GENERATION,
        path=str(folder),
        quantized=WeightSet(name=QUANTIZED, path=str(quantized)) if quantized else None,
        full_weights=options.get("full_weights", FullWeights.AUTO),
        draft=Draft(name=DRAFT, path=str(draft)) if draft else None,
    )


def _early_exit(folder: Path, options: EngineOptions) -> EarlyExitSpec | None:
    if not (folder / EXITS).is_file():
        return None
    names = ("threshold", "max_disagreement", "length_relaxation")
    fractions: dict[str, Any] = {name: _fraction(name, options.get(name)) for name in names}
    return EarlyExitSpec(rule=options.get("rule", ExitRule.CALIBRATED), **fractions)


def _fraction(name: str, value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{name} is {value}, must be 0 to 1")
    return f"{value:.6f}".rstrip("0").rstrip(".")


def _subgraphs(folder: Path, options: EngineOptions) -> SubgraphsSpec | None:
    names = options.get("tasks")
    if names is None:
        names = sorted(path.stem for path in (folder / SLICES).glob("*.safetensors"))
    pinned, cache_bytes = options.get("pinned", ()), options.get("cache_bytes")
    if unknown := set(pinned) - set(names):
        raise ValueError(f"pinned: {', '.join(sorted(unknown))} is none of the tasks; there are: {', '.join(names)}")
    if not names:
        return None
    return SubgraphsSpec(
        tasks=[SubgraphTask(name=name, pinned=name in pinned) for name in names],
        cache_size=None if cache_bytes is None else str(cache_bytes),
    )
