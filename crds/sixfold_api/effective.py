"""spec + level -> what pods obey, with the origin of every value. Pure; used by operator, runtime and CLI alike."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from sixfold_api.modes import LEVEL_FROM, Mode, ModeState
from sixfold_api.policy import InferencePolicySpec, ModeStatus
from sixfold_api.runtime_config import EffectiveConfig, Provenance, RateLimitConfig, SetBy, StreamingConfig
from sixfold_api.scalars import Compression


@dataclass(frozen=True)
class Effective:
    """An effective configuration, the state of each mode, and the origin of each value."""

    config: EffectiveConfig
    modes: tuple[ModeStatus, ...]
    provenance: tuple[Provenance, ...]


def effective(spec: InferencePolicySpec, target_level: int | None = None) -> Effective:
    """What pods obey under `spec` at `target_level` (absent: the spec's ceiling, which always caps it)."""
    level = spec.rollback_level if target_level is None else min(target_level, spec.rollback_level)
    modes = tuple(_mode_status(mode, spec, level) for mode in Mode)
    active = tuple(mode.name for mode in modes if mode.state is ModeState.ACTIVE)
    config = EffectiveConfig(
        level=level,
        active_modes=active,
        streaming=StreamingConfig(
            compression=spec.streaming.compression if Mode.COMPRESSED_STREAMING in active else Compression.OFF,
            level=spec.streaming.level,
        ),
        rate_limit=_rate_limit_share(spec),
    )
    return Effective(config, modes, _provenance(spec, config, modes))


def _mode_status(mode: Mode, spec: InferencePolicySpec, level: int) -> ModeStatus:
    state, reason = _configured(mode, spec)
    if state is ModeState.ACTIVE and level < LEVEL_FROM[mode]:
        state, reason = ModeState.BELOW_LEVEL, f"on from level {LEVEL_FROM[mode]}; the level is {level}"
    return ModeStatus(name=mode, state=state, reason=reason)


def _configured(mode: Mode, spec: InferencePolicySpec) -> tuple[ModeState, str]:
    """What a mode would do at the highest level, and why not if it doesn't run there."""
    if mode is not Mode.COMPRESSED_STREAMING:
        return ModeState.UNSUPPORTED, "this version of Sixfold doesn't have it"
    if spec.streaming.compression is Compression.OFF:
        return ModeState.OFF, "spec.streaming.compression is Off"
    if spec.generation is None:
        return ModeState.UNSUPPORTED, "nothing streams: the policy has no spec.generation"
    return ModeState.ACTIVE, ""


def _rate_limit_share(spec: InferencePolicySpec) -> RateLimitConfig | None:
    """Each gateway counts for itself, so each gets its share; a share of the burst is at least one request."""
    limit = spec.gateway.rate_limit
    if limit is None:
        return None
    replicas = spec.gateway.replicas or 1
    return RateLimitConfig(
        requests_per_second=limit.requests_per_second / replicas, burst=math.ceil(limit.burst / replicas)
    )


def _provenance(
    spec: InferencePolicySpec, config: EffectiveConfig, modes: tuple[ModeStatus, ...]
) -> tuple[Provenance, ...]:
    rows = []
    streaming = {mode.name: mode for mode in modes}[Mode.COMPRESSED_STREAMING]
    if config.level < spec.rollback_level:
        rows.append(
            Provenance(
                path="/rollbackLevel",
                value=str(config.level),
                set_by=SetBy.LEVEL,
                why=f"the operator holds it under the spec's ceiling of {spec.rollback_level}",
            )
        )
    else:
        rows.append(_from_spec(spec, "/rollbackLevel"))
    if config.streaming.compression != spec.streaming.compression:
        rows.append(
            Provenance(
                path="/streaming/compression",
                value=config.streaming.compression.value,
                set_by=SetBy.LEVEL if streaming.state is ModeState.BELOW_LEVEL else SetBy.DEFAULT,
                why=streaming.reason,
            )
        )
    else:
        rows.append(_from_spec(spec, "/streaming/compression"))
    rows.append(_from_spec(spec, "/streaming/level"))
    if spec.gateway.rate_limit is not None:
        rows.append(_from_spec(spec, "/gateway/rateLimit/requestsPerSecond"))
        rows.append(_from_spec(spec, "/gateway/rateLimit/burst"))
    return tuple(rows)


def _from_spec(spec: InferencePolicySpec, path: str) -> Provenance:
    """The value at a JSON pointer of camelCase names, and whether the user wrote it."""
    value: Any = spec
    written = True
    for alias in path.strip("/").split("/"):
        model: BaseModel = value
        name = next(n for n, field in type(model).model_fields.items() if field.alias == alias)
        written = written and name in model.model_fields_set
        value = getattr(model, name)
    return Provenance(path=path, value=str(value), set_by=SetBy.SPEC if written else SetBy.DEFAULT)
