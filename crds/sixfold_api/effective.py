"""What pods obey: spec, tuned values, suspended modes and level in one, with the origin of every value.

Pure; used by operator, runtime and CLI alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from sixfold_api.base import ApiModel
from sixfold_api.batching import BatchingSpec
from sixfold_api.control_status import TunedValue
from sixfold_api.gateway import GatewaySpec
from sixfold_api.generation import Acceptance, GenerationSpec, Guard, ThresholdSpec
from sixfold_api.modes import LEVEL_FROM, Mode, ModeState
from sixfold_api.policy import ClassificationSpec, InferencePolicySpec, ModeStatus, engines
from sixfold_api.provenance import provenance
from sixfold_api.runtime_config import (
    BatchingConfig,
    EarlyExitConfig,
    EffectiveConfig,
    EscalateConfig,
    KVReuseConfig,
    Provenance,
    RateLimitConfig,
    RequestLimits,
    SamplerPipelineConfig,
    SanitizeConfig,
    ShadowConfig,
    SpeculativeConfig,
    StreamingConfig,
    SubgraphsConfig,
    TaskConfig,
    TenantConfig,
)
from sixfold_api.scalars import Compression, duration_seconds, quantity_value
from sixfold_api.tuning import tuned_spec

DEFAULT_MIN_COSINE = 0.6
NO_SUBGRAPHS = "spec.classification.subgraphs and spec.generation.subgraphs are absent"
NOTHING_STREAMS = "nothing streams: the policy has no spec.generation"
_NOTHING: Mapping[Mode, str] = MappingProxyType({})


@dataclass(frozen=True)
class Effective:
    """An effective configuration, the state of each mode, and the origin of each value."""

    config: EffectiveConfig
    modes: tuple[ModeStatus, ...]
    provenance: tuple[Provenance, ...]
    tuned: tuple[TunedValue, ...] = ()
    """Those that hold."""


def effective(
    spec: InferencePolicySpec,
    target_level: int | None = None,
    unsupported: Mapping[Mode, str] = _NOTHING,
    *,
    tuned: Iterable[TunedValue] = (),
    suspended: Mapping[Mode, str] = _NOTHING,
    gateways: int | None = None,
) -> Effective:
    """What pods obey: the spec, then tuned values, then suspended modes, then the level.

    Args:
        target_level: absent means the spec's ceiling, which always caps it.
        unsupported: modes that can't run although the spec asks for them, with the reasons.
        tuned: values in place of the spec's; those that no longer hold are left out.
        suspended: modes that the operator turned off, with the reasons.
        gateways: how many there are now; absent means as many as the spec says.
    """
    spec, held = tuned_spec(spec, tuned)
    level = spec.rollback_level if target_level is None else min(target_level, spec.rollback_level)
    modes = tuple(_mode_status(mode, spec, level, unsupported, suspended) for mode in Mode)
    active = tuple(mode.name for mode in modes if mode.state is ModeState.ACTIVE)
    on_demand = Mode.SUBGRAPHS in active
    config = EffectiveConfig(
        level=level,
        active_modes=active,
        streaming=StreamingConfig(
            compression=spec.streaming.compression if Mode.COMPRESSED_STREAMING in active else Compression.OFF,
            level=spec.streaming.level,
        ),
        rate_limit=_rate_limit_share(spec.gateway, gateways),
        speculative=_speculative(spec.generation) if Mode.SPECULATIVE in active else None,
        sampler_pipeline=_sampler_pipeline(spec.generation) if Mode.SAMPLER_PIPELINE in active else None,
        kv_reuse=_kv_reuse(spec.generation) if Mode.KV_CACHE_REUSE in active else None,
        batching=_batching(spec.batching) if Mode.DYNAMIC_BATCHING in active else None,
        tenants=_tenants(spec.gateway),
        request_limits=RequestLimits(
            max_bytes=int(quantity_value(spec.gateway.max_request_size)),
            timeout_seconds=duration_seconds(spec.gateway.request_timeout),
        ),
        demo_page=spec.gateway.demo_page,
        early_exit=_early_exit(spec.classification) if Mode.EARLY_EXIT in active else None,
        classification_subgraphs=_subgraphs(spec.classification, on_demand),
        generation_subgraphs=_subgraphs(spec.generation, on_demand),
        escalate=_escalate(spec.classification),
        shadow=None if spec.shadow is None else ShadowConfig(sample_rate=float(spec.shadow.sample_rate)),
        may_sleep=any(engine.autoscaling is not None and engine.autoscaling.may_sleep for engine in engines(spec)),
    )
    return Effective(config, modes, provenance(spec, config, modes, held), held)


def _mode_status(
    mode: Mode,
    spec: InferencePolicySpec,
    level: int,
    unsupported: Mapping[Mode, str],
    suspended: Mapping[Mode, str],
) -> ModeStatus:
    state, reason = _configured(mode, spec)
    if state is ModeState.ACTIVE and mode in unsupported:
        state, reason = ModeState.UNSUPPORTED, unsupported[mode]
    if state is ModeState.ACTIVE and mode in suspended:
        state, reason = ModeState.SUSPENDED, suspended[mode]
    if state is ModeState.ACTIVE and level < LEVEL_FROM[mode]:
        state, reason = ModeState.BELOW_LEVEL, f"on from level {LEVEL_FROM[mode]}; the level is {level}"
    return ModeStatus(name=mode, state=state, reason=reason[:256])


def _configured(mode: Mode, spec: InferencePolicySpec) -> tuple[ModeState, str]:
    """What a mode would do at the highest level, and why not if it doesn't run there."""
    generation, classification = spec.generation, spec.classification
    if mode is Mode.COMPRESSED_STREAMING:
        if spec.streaming.compression is Compression.OFF:
            return ModeState.OFF, "spec.streaming.compression is Off"
        if generation is None:
            return ModeState.UNSUPPORTED, NOTHING_STREAMS
        return ModeState.ACTIVE, ""
    if mode is Mode.QUANTIZED:
        return _if_present(generation and generation.quantized, "spec.generation.quantized")
    if mode is Mode.SPECULATIVE:
        return _if_present(generation and generation.speculative, "spec.generation.speculative")
    if mode is Mode.SAMPLER_PIPELINE:
        return _if_present(generation and generation.sampler_pipeline, "spec.generation.samplerPipeline")
    if mode is Mode.KV_CACHE_REUSE:
        return _if_present(generation and generation.kv_cache_reuse, "spec.generation.kvCacheReuse")
    if mode is Mode.DYNAMIC_BATCHING:
        return _if_present(spec.batching, "spec.batching")
    if mode is Mode.EARLY_EXIT:
        return _if_present(classification and classification.early_exit, "spec.classification.earlyExit")
    block = (classification and classification.subgraphs) or (generation and generation.subgraphs)
    return (ModeState.ACTIVE, "") if block is not None else (ModeState.OFF, NO_SUBGRAPHS)


def _if_present(block: ApiModel | None, path: str) -> tuple[ModeState, str]:
    return (ModeState.ACTIVE, "") if block is not None else (ModeState.OFF, f"{path} is absent")


def _speculative(generation: GenerationSpec | None) -> SpeculativeConfig | None:
    if generation is None or generation.speculative is None:
        return None
    spec = generation.speculative
    threshold = spec.threshold or ThresholdSpec()
    one_by_one = spec.acceptance is Acceptance.THRESHOLD and threshold.guard is Guard.SINGLE_TOKEN
    return SpeculativeConfig(
        num_tokens=1 if one_by_one else spec.num_tokens,
        length=spec.length,
        acceptance=spec.acceptance,
        min_probability=float(threshold.min_probability),
        guard=threshold.guard,
        min_cosine=DEFAULT_MIN_COSINE if threshold.min_cosine is None else float(threshold.min_cosine),
    )


def _sampler_pipeline(generation: GenerationSpec | None) -> SamplerPipelineConfig | None:
    if generation is None or generation.sampler_pipeline is None:
        return None
    spec = generation.sampler_pipeline
    size = None if spec.buffer_size is None else int(quantity_value(spec.buffer_size))
    return SamplerPipelineConfig(workers=spec.workers, overlap=spec.overlap, buffer_bytes=size)


def _kv_reuse(generation: GenerationSpec | None) -> KVReuseConfig | None:
    if generation is None or generation.kv_cache_reuse is None:
        return None
    spec = generation.kv_cache_reuse
    return KVReuseConfig(
        store=spec.store,
        ttl_seconds=duration_seconds(spec.ttl),
        max_bytes=int(quantity_value(spec.max_size)),
        memory_bytes=int(quantity_value(spec.memory_size)),
        block_tokens=spec.block_tokens,
        min_prompt_tokens=spec.min_prompt_tokens,
    )


def _batching(spec: BatchingSpec | None) -> BatchingConfig | None:
    if spec is None:
        return None
    return BatchingConfig(
        max_batch_tokens=spec.max_batch_tokens,
        short_wait_seconds=duration_seconds(spec.short_wait),
        long_wait_seconds=duration_seconds(spec.long_wait),
        max_wait_seconds=duration_seconds(spec.max_wait),
        max_queued_requests=spec.max_queued_requests,
    )


def _tenants(gateway: GatewaySpec) -> tuple[TenantConfig, ...]:
    return tuple(
        TenantConfig(name=tenant.name, priority=tenant.priority, max_priority=tenant.max_priority or tenant.priority)
        for tenant in gateway.tenants
    )


def _early_exit(classification: ClassificationSpec | None) -> EarlyExitConfig | None:
    if classification is None or classification.early_exit is None:
        return None
    spec = classification.early_exit
    sanitize = spec.sanitize
    return EarlyExitConfig(
        rule=spec.rule,
        threshold=_number(spec.threshold),
        max_disagreement=_number(spec.max_disagreement),
        length_relaxation=_number(spec.length_relaxation),
        sanitize=None if sanitize is None else SanitizeConfig(keep=sanitize.keep, other_scripts=sanitize.other_scripts),
    )


def _subgraphs(block: ClassificationSpec | GenerationSpec | None, on_demand: bool) -> SubgraphsConfig | None:
    if block is None or block.subgraphs is None:
        return None
    spec = block.subgraphs
    return SubgraphsConfig(
        tasks=tuple(TaskConfig(name=task.name, pinned=task.pinned) for task in spec.tasks),
        on_demand=on_demand,
        cache_bytes=None if spec.cache_size is None else int(quantity_value(spec.cache_size)),
    )


def _escalate(classification: ClassificationSpec | None) -> EscalateConfig | None:
    if classification is None or classification.escalate is None:
        return None
    spec = classification.escalate
    return EscalateConfig(
        below_confidence=float(spec.below_confidence),
        prompt_template=spec.prompt_template,
        max_tokens=spec.max_tokens,
    )


def _number(decimal: str | None) -> float | None:
    return None if decimal is None else float(decimal)


def _rate_limit_share(spec: GatewaySpec, gateways: int | None) -> RateLimitConfig | None:
    """Each gateway counts for itself, so each gets its share; a share of the burst is at least one request."""
    limit = spec.rate_limit
    if limit is None:
        return None
    replicas = gateways or spec.replicas or 1
    return RateLimitConfig(
        requests_per_second=limit.requests_per_second / replicas, burst=math.ceil(limit.burst / replicas)
    )
