"""Where each effective value comes from, row by row. Pure; see effective.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sixfold_api.base import ApiModel
from sixfold_api.classification import ExitRule
from sixfold_api.control_status import TunedValue
from sixfold_api.generation import Acceptance, Guard
from sixfold_api.kv_reuse import KVStore
from sixfold_api.modes import Mode, ModeState
from sixfold_api.policy import InferencePolicySpec, ModeStatus
from sixfold_api.runtime_config import EffectiveConfig, Provenance, SetBy, SubgraphsConfig

_MODE_BLOCKS = {
    Mode.QUANTIZED: "/generation/quantized",
    Mode.SPECULATIVE: "/generation/speculative",
    Mode.KV_CACHE_REUSE: "/generation/kvCacheReuse",
    Mode.SAMPLER_PIPELINE: "/generation/samplerPipeline",
    Mode.DYNAMIC_BATCHING: "/batching",
    Mode.EARLY_EXIT: "/classification/earlyExit",
}
_OFF_BY = {ModeState.BELOW_LEVEL: SetBy.LEVEL, ModeState.SUSPENDED: SetBy.SUSPENDED}
_LONGEST_VALUE = 80
"""Characters of a text that are shown; the configuration has all of it."""
_VARIANTS = "the variant's"
_IN_MEMORY = "all in memory"


def provenance(
    spec: InferencePolicySpec,
    config: EffectiveConfig,
    modes: tuple[ModeStatus, ...],
    tuned: Sequence[TunedValue] = (),
) -> tuple[Provenance, ...]:
    """One row for each value of `config`, and one for each mode that the spec has and that is off. `spec` has the
    tuned values in it already; `tuned` says which those are."""
    status = {mode.name: mode for mode in modes}
    rows = [_level(spec, config), *_streaming(spec, config, status[Mode.COMPRESSED_STREAMING]), *_gateway(spec, config)]
    for mode, block in _MODE_BLOCKS.items():
        if status[mode].state is ModeState.ACTIVE:
            rows += _active(mode, spec, config)
        elif status[mode].state is not ModeState.OFF:
            rows.append(_off(block, "off", status[mode]))
    for block, subgraphs in (
        ("/classification/subgraphs", config.classification_subgraphs),
        ("/generation/subgraphs", config.generation_subgraphs),
    ):
        if subgraphs is not None:
            rows += _subgraphs(spec, block, subgraphs, status[Mode.SUBGRAPHS])
    if config.escalate is not None:
        rows += _rows(spec, "/classification/escalate", "belowConfidence", "promptTemplate", "maxTokens")
    if config.shadow is not None:
        rows.append(_row(spec, "/shadow/sampleRate"))
    return _with_tuned(rows, tuned)


def _with_tuned(rows: list[Provenance], tuned: Sequence[TunedValue]) -> tuple[Provenance, ...]:
    """Rows of tuned values say so; a pinned task is within the row of its list."""
    for entry in tuned:
        why = f"{entry.value} in place of the spec's {entry.base}: " + (
            f"ticket {entry.ticket} was approved" if entry.ticket else "remediation is AutoApply"
        )
        path = entry.path.split("/tasks/")[0] + "/tasks" if "/tasks/" in entry.path else entry.path
        rows = [
            row.model_copy(update={"set_by": SetBy.TUNED, "why": why})
            if row.path == path and row.set_by in (SetBy.SPEC, SetBy.DEFAULT)
            else row
            for row in rows
        ]
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
    rows = [compression, _row(spec, "/streaming/level")]
    if spec.streaming.dictionary_config_map_ref is not None:
        rows += _rows(spec, "/streaming/dictionaryConfigMapRef", "name", "key")
    return rows


def _gateway(spec: InferencePolicySpec, config: EffectiveConfig) -> list[Provenance]:
    """They hold at every level."""
    rows = []
    if spec.gateway.rate_limit is not None:
        rows += _rows(spec, "/gateway/rateLimit", "requestsPerSecond", "burst")
    if config.tenants:
        names = ", ".join(
            f"{tenant.name} ({tenant.priority}"
            + (f", at most {tenant.max_priority})" if tenant.max_priority is not tenant.priority else ")")
            for tenant in config.tenants
        )
        rows.append(Provenance(path="/gateway/tenants", value=_shortened(names), set_by=SetBy.SPEC))
    return rows + _rows(spec, "/gateway", "maxRequestSize", "requestTimeout", "demoPage")


def _active(mode: Mode, spec: InferencePolicySpec, config: EffectiveConfig) -> list[Provenance]:
    block = _MODE_BLOCKS[mode]
    if mode is Mode.QUANTIZED:
        return [_row(spec, f"{block}/variantRef/name")]
    if mode is Mode.SPECULATIVE:
        return _speculative(spec, config)
    if mode is Mode.EARLY_EXIT:
        return _early_exit(spec, config)
    if mode is Mode.KV_CACHE_REUSE:
        in_redis = ["redis/urlSecretRef/name", "maxSize"]
        if config.kv_reuse is None or config.kv_reuse.store is not KVStore.REDIS:
            in_redis = []
        return [
            *_rows(spec, block, "store", "ttl", *in_redis, "memorySize", "blockTokens"),
            _row(spec, f"{block}/minPromptTokens", absent="what engines measure"),
        ]
    if mode is Mode.DYNAMIC_BATCHING:
        return _rows(spec, block, "maxBatchTokens", "shortWait", "longWait", "maxWait", "maxQueuedRequests")
    return [
        *_rows(spec, block, "workers", "overlap"),
        _row(spec, f"{block}/bufferSize", absent="what the largest batch needs"),
    ]


def _speculative(spec: InferencePolicySpec, config: EffectiveConfig) -> list[Provenance]:
    block, speculative = _MODE_BLOCKS[Mode.SPECULATIVE], config.speculative
    if speculative is None:
        return []
    drafts = _row(spec, f"{block}/numTokens")
    if str(speculative.num_tokens) != drafts.value:
        why = "threshold.guard SingleToken drafts one token at a time"
        drafts = Provenance(path=drafts.path, value=str(speculative.num_tokens), set_by=SetBy.SPEC, why=why)
    rows = [*_rows(spec, block, "draftVariantRef/name", "draftDevice"), drafts]
    rows += _rows(spec, block, "length", "acceptance")
    if speculative.acceptance is Acceptance.THRESHOLD:
        rows.append(_row(spec, f"{block}/threshold/minProbability", absent=f"{speculative.min_probability:g}"))
        rows.append(_row(spec, f"{block}/threshold/guard", absent=speculative.guard.value))
        if speculative.guard is Guard.COHERENCE:
            rows.append(_row(spec, f"{block}/threshold/minCosine", absent=f"{speculative.min_cosine:g}"))
    return rows


def _early_exit(spec: InferencePolicySpec, config: EffectiveConfig) -> list[Provenance]:
    block, exits = _MODE_BLOCKS[Mode.EARLY_EXIT], config.early_exit
    if exits is None:
        return []
    rows = [_row(spec, f"{block}/rule")]
    if exits.rule is ExitRule.FIXED:
        rows.append(_row(spec, f"{block}/threshold"))
    if exits.rule is ExitRule.CALIBRATED:
        rows.append(_row(spec, f"{block}/maxDisagreement", absent=_VARIANTS))
    rows.append(_row(spec, f"{block}/lengthRelaxation", absent=_VARIANTS))
    if exits.sanitize is None:
        return [*rows, _row(spec, f"{block}/sanitize", absent="off")]
    return [*rows, *_rows(spec, f"{block}/sanitize", "keep", "otherScripts")]


def _subgraphs(
    spec: InferencePolicySpec, block: str, subgraphs: SubgraphsConfig, status: ModeStatus
) -> list[Provenance]:
    """Tasks answer at every level; where the mode is off, all of them stay in memory."""
    names = ", ".join(f"{task.name} (pinned)" if task.pinned else task.name for task in subgraphs.tasks)
    tasks = Provenance(path=f"{block}/tasks", value=_shortened(names), set_by=SetBy.SPEC)
    if subgraphs.on_demand:
        return [tasks, _row(spec, f"{block}/cacheSize", absent="no limit")]
    return [tasks, _off(f"{block}/cacheSize", _IN_MEMORY, status)]


def _off(path: str, value: str, status: ModeStatus) -> Provenance:
    """A value that isn't what the spec says, because its mode is off."""
    set_by = _OFF_BY.get(status.state, SetBy.DEFAULT)
    return Provenance(path=path, value=value, set_by=set_by, why=status.reason)


def _rows(spec: InferencePolicySpec, block: str, *names: str) -> list[Provenance]:
    return [_row(spec, f"{block}/{name}") for name in names]


def _row(spec: InferencePolicySpec, path: str, absent: str = "") -> Provenance:
    """The value at a JSON pointer of camelCase names, and whether the user wrote it.

    `absent` is what holds where the spec has nothing.
    """
    node: Any = spec
    written = True
    for alias in path.strip("/").split("/"):
        if not isinstance(node, ApiModel):
            node = None
            break
        name = next(n for n, field in type(node).model_fields.items() if field.alias == alias)
        written = written and name in node.model_fields_set
        node = getattr(node, name)
    if node is None:
        return Provenance(path=path, value=absent, set_by=SetBy.DEFAULT)
    value = str(node).lower() if isinstance(node, bool) else _shortened(str(node))
    return Provenance(path=path, value=value, set_by=SetBy.SPEC if written else SetBy.DEFAULT)


def _shortened(text: str) -> str:
    """In one line that a table can show."""
    line = text.strip("\n").replace("\n", " ")
    return line if len(line) <= _LONGEST_VALUE else f"{line[: _LONGEST_VALUE - 1]}…"
