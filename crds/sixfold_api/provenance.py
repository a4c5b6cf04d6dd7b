"""Where each effective value comes from, row by row. Pure; see effective.py."""

from __future__ import annotations

from typing import Any

from sixfold_api.base import ApiModel
from sixfold_api.generation import Acceptance, Guard
from sixfold_api.modes import Mode, ModeState
from sixfold_api.policy import InferencePolicySpec, ModeStatus
from sixfold_api.runtime_config import EffectiveConfig, Provenance, SetBy

_MODE_BLOCKS = {
    Mode.QUANTIZED: "/generation/quantized",
    Mode.SPECULATIVE: "/generation/speculative",
    Mode.SAMPLER_PIPELINE: "/generation/samplerPipeline",
}


def provenance(
    spec: InferencePolicySpec, config: EffectiveConfig, modes: tuple[ModeStatus, ...]
) -> tuple[Provenance, ...]:
    """One row for each value of `config`, and one for each mode that the spec has and that is off."""
    status = {mode.name: mode for mode in modes}
    rows = [_level(spec, config), *_streaming(spec, config, status[Mode.COMPRESSED_STREAMING])]
    if spec.gateway.rate_limit is not None:
        rows.append(_row(spec, "/gateway/rateLimit/requestsPerSecond"))
        rows.append(_row(spec, "/gateway/rateLimit/burst"))
    for mode, block in _MODE_BLOCKS.items():
        if status[mode].state is ModeState.ACTIVE:
            rows += _active(mode, spec, config)
        elif status[mode].state is not ModeState.OFF:
            rows.append(_off(block, "off", status[mode]))
    return tuple(rows)


def _level(spec: InferencePolicySpec, config: EffectiveConfig) -> Provenance:
    if config.level == spec.rollback_level:
        return _row(spec, "/rollbackLevel")
    why = f"the operator holds it under the spec's ceiling of {spec.rollback_level}"
    return Provenance(path="/rollbackLevel", value=str(config.level), set_by=SetBy.LEVEL, why=why)


def _streaming(spec: InferencePolicySpec, config: EffectiveConfig, status: ModeStatus) -> list[Provenance]:
    path = "/streaming/compression"
    if config.streaming.compression == spec.streaming.compression:
        compression = _row(spec, path)
    else:
        compression = _off(path, config.streaming.compression.value, status)
    return [compression, _row(spec, "/streaming/level")]


def _active(mode: Mode, spec: InferencePolicySpec, config: EffectiveConfig) -> list[Provenance]:
    if mode is Mode.QUANTIZED:
        return [_row(spec, "/generation/quantized/variantRef/name")]
    if mode is Mode.SPECULATIVE:
        return _speculative(spec, config)
    pipeline = config.sampler_pipeline
    buffer = "what the largest batch needs" if pipeline is None or pipeline.buffer_bytes is None else None
    block = _MODE_BLOCKS[mode]
    return [
        _row(spec, f"{block}/workers"),
        _row(spec, f"{block}/overlap"),
        _row(spec, f"{block}/bufferSize", buffer),
    ]


def _speculative(spec: InferencePolicySpec, config: EffectiveConfig) -> list[Provenance]:
    block, speculative = _MODE_BLOCKS[Mode.SPECULATIVE], config.speculative
    if speculative is None:
        return []
    drafts = _row(spec, f"{block}/numTokens")
    if str(speculative.num_tokens) != drafts.value:
        why = "threshold.guard SingleToken drafts one token at a time"
        drafts = Provenance(path=drafts.path, value=str(speculative.num_tokens), set_by=SetBy.SPEC, why=why)
    rows = [
        _row(spec, f"{block}/draftVariantRef/name"),
        _row(spec, f"{block}/draftDevice"),
        drafts,
        _row(spec, f"{block}/length"),
        _row(spec, f"{block}/acceptance"),
    ]
    if speculative.acceptance is Acceptance.THRESHOLD:
        rows.append(_row(spec, f"{block}/threshold/minProbability", f"{speculative.min_probability:g}"))
        rows.append(_row(spec, f"{block}/threshold/guard", speculative.guard.value))
        if speculative.guard is Guard.COHERENCE:
            rows.append(_row(spec, f"{block}/threshold/minCosine", f"{speculative.min_cosine:g}"))
    return rows


def _off(path: str, value: str, status: ModeStatus) -> Provenance:
    """A value that isn't what the spec says, because its mode is off."""
    set_by = SetBy.LEVEL if status.state is ModeState.BELOW_LEVEL else SetBy.DEFAULT
    return Provenance(path=path, value=value, set_by=set_by, why=status.reason)


def _row(spec: InferencePolicySpec, path: str, value: str | None = None) -> Provenance:
    """The value at a JSON pointer of camelCase names, and whether the user wrote it.

    `value` is what holds where the spec itself may have none.
    """
    node: Any = spec
    written = True
    for alias in path.strip("/").split("/"):
        if not isinstance(node, ApiModel):
            written = False
            break
        name = next(n for n, field in type(node).model_fields.items() if field.alias == alias)
        written = written and name in node.model_fields_set
        node = getattr(node, name)
    return Provenance(
        path=path, value=str(node) if value is None else value, set_by=SetBy.SPEC if written else SetBy.DEFAULT
    )
