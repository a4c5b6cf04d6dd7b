"""spec + level -> what pods obey, with the origin of every value. Pure; used by operator, runtime and CLI alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from sixfold_api.base import ApiModel
from sixfold_api.generation import Acceptance, GenerationSpec, Guard, ThresholdSpec
from sixfold_api.modes import LEVEL_FROM, Mode, ModeState
from sixfold_api.policy import InferencePolicySpec, ModeStatus
from sixfold_api.provenance import provenance
from sixfold_api.runtime_config import (
    EffectiveConfig,
    Provenance,
    RateLimitConfig,
    SamplerPipelineConfig,
    SpeculativeConfig,
    StreamingConfig,
)
from sixfold_api.scalars import Compression, quantity_value

DEFAULT_MIN_COSINE = 0.6
NOTHING_STREAMS = "nothing streams: the policy has no spec.generation"
NOT_IN_THIS_VERSION = "this version of Sixfold doesn't have it"
_NOTHING: Mapping[Mode, str] = MappingProxyType({})


@dataclass(frozen=True)
class Effective:
    """An effective configuration, the state of each mode, and the origin of each value."""

    config: EffectiveConfig
    modes: tuple[ModeStatus, ...]
    provenance: tuple[Provenance, ...]


def effective(
    spec: InferencePolicySpec, target_level: int | None = None, unsupported: Mapping[Mode, str] = _NOTHING
) -> Effective:
    """What pods obey under `spec` at `target_level` (absent: the spec's ceiling, which always caps it).

    `unsupported` has the modes that can't run although the spec asks for them, with the reasons.
    """
    level = spec.rollback_level if target_level is None else min(target_level, spec.rollback_level)
    modes = tuple(_mode_status(mode, spec, level, unsupported) for mode in Mode)
    active = tuple(mode.name for mode in modes if mode.state is ModeState.ACTIVE)
    config = EffectiveConfig(
        level=level,
        active_modes=active,
        streaming=StreamingConfig(
            compression=spec.streaming.compression if Mode.COMPRESSED_STREAMING in active else Compression.OFF,
            level=spec.streaming.level,
        ),
        rate_limit=_rate_limit_share(spec),
        speculative=_speculative(spec.generation) if Mode.SPECULATIVE in active else None,
        sampler_pipeline=_sampler_pipeline(spec.generation) if Mode.SAMPLER_PIPELINE in active else None,
    )
    return Effective(config, modes, provenance(spec, config, modes))


def _mode_status(mode: Mode, spec: InferencePolicySpec, level: int, unsupported: Mapping[Mode, str]) -> ModeStatus:
    state, reason = _configured(mode, spec)
    if state is ModeState.ACTIVE and mode in unsupported:
        state, reason = ModeState.UNSUPPORTED, unsupported[mode]
    if state is ModeState.ACTIVE and level < LEVEL_FROM[mode]:
        state, reason = ModeState.BELOW_LEVEL, f"on from level {LEVEL_FROM[mode]}; the level is {level}"
    return ModeStatus(name=mode, state=state, reason=reason[:256])


def _configured(mode: Mode, spec: InferencePolicySpec) -> tuple[ModeState, str]:
    """What a mode would do at the highest level, and why not if it doesn't run there."""
    generation = spec.generation
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
    return ModeState.UNSUPPORTED, NOT_IN_THIS_VERSION


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


def _rate_limit_share(spec: InferencePolicySpec) -> RateLimitConfig | None:
    """Each gateway counts for itself, so each gets its share; a share of the burst is at least one request."""
    limit = spec.gateway.rate_limit
    if limit is None:
        return None
    replicas = spec.gateway.replicas or 1
    return RateLimitConfig(
        requests_per_second=limit.requests_per_second / replicas, burst=math.ceil(limit.burst / replicas)
    )
