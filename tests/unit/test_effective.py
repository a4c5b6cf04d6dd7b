"""spec + level -> what pods obey, with the origin of every value."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sixfold_api.classification import DEFAULT_KEPT_CHARACTERS, ExitRule, OtherScripts
from sixfold_api.effective import Effective, effective
from sixfold_api.gateway import Priority
from sixfold_api.generation import Acceptance, Overlap
from sixfold_api.kv_reuse import KVStore
from sixfold_api.modes import LEVEL_FROM, MAX_LEVEL, Mode, ModeState
from sixfold_api.policy import InferencePolicySpec, ModeStatus
from sixfold_api.runtime_config import (
    BatchingConfig,
    EarlyExitConfig,
    EscalateConfig,
    KVReuseConfig,
    Provenance,
    RequestLimits,
    RuntimeConfig,
    SamplerPipelineConfig,
    SanitizeConfig,
    SetBy,
    SpeculativeConfig,
    SubgraphsConfig,
    TaskConfig,
    TenantConfig,
)

CHEAP: dict[str, Any] = {
    "quantized": {"variantRef": {"name": "chat-int4"}},
    "speculative": {"draftVariantRef": {"name": "chat-draft"}, "numTokens": 8},
    "samplerPipeline": {"bufferSize": "2Mi"},
}
CHAT: dict[str, Any] = {"generation": {"variantRef": {"name": "chat"}}}
INTENT = {"classification": {"variantRef": {"name": "intent"}}}
TASKS: dict[str, Any] = {"tasks": [{"name": "ner", "pinned": True}, {"name": "topic"}], "cacheSize": "2Mi"}
ESCALATION = {"belowConfidence": "0.6", "promptTemplate": "One of {labels}?\n{text}\n"}


def spec(**blocks: Any) -> InferencePolicySpec:
    return InferencePolicySpec.model_validate(CHAT | blocks)


def origin(provenance: tuple[Provenance, ...], path: str) -> tuple[str, SetBy]:
    (row,) = [row for row in provenance if row.path == path]
    return row.value, row.set_by


def status_of(result: Effective, mode: Mode) -> ModeStatus:
    return next(status for status in result.modes if status.name is mode)


def streaming(result: Effective) -> ModeStatus:
    return status_of(result, Mode.COMPRESSED_STREAMING)


@pytest.mark.parametrize("level", range(MAX_LEVEL + 1))
def test_a_mode_is_on_from_its_level(level: int) -> None:
    result = effective(spec(rollbackLevel=level))
    on = level >= LEVEL_FROM[Mode.COMPRESSED_STREAMING]
    assert result.config.level == level
    assert result.config.is_active(Mode.COMPRESSED_STREAMING) is on
    assert result.config.streaming.compression == ("Auto" if on else "Off")
    assert streaming(result).state is (ModeState.ACTIVE if on else ModeState.BELOW_LEVEL)


@given(st.integers(0, MAX_LEVEL), st.integers(0, MAX_LEVEL))
def test_the_target_never_passes_the_ceiling(ceiling: int, target: int) -> None:
    result = effective(spec(rollbackLevel=ceiling), target)
    assert result.config.level == min(ceiling, target)
    value, set_by = origin(result.provenance, "/rollbackLevel")
    assert value == str(result.config.level)
    assert set_by is (SetBy.LEVEL if target < ceiling else SetBy.SPEC)


def test_every_mode_says_why_it_is_not_active() -> None:
    off = streaming(effective(spec(streaming={"compression": "Off"})))
    assert (off.state, off.reason) == (ModeState.OFF, "spec.streaming.compression is Off")
    below = streaming(effective(spec(), 1))
    assert (below.state, below.reason) == (ModeState.BELOW_LEVEL, "on from level 3; the level is 1")
    silent = streaming(effective(InferencePolicySpec.model_validate(INTENT)))
    assert silent.state is ModeState.UNSUPPORTED
    assert "no spec.generation" in silent.reason
    assert {status.name for status in effective(spec()).modes} == set(Mode)
    for mode, block in {
        Mode.QUANTIZED: "quantized",
        Mode.SPECULATIVE: "speculative",
        Mode.SAMPLER_PIPELINE: "samplerPipeline",
        Mode.KV_CACHE_REUSE: "kvCacheReuse",
    }.items():
        for without in (spec(), InferencePolicySpec.model_validate(INTENT)):
            absent = status_of(effective(without), mode)
            assert (absent.state, absent.reason) == (ModeState.OFF, f"spec.generation.{block} is absent")
    for without in (spec(), InferencePolicySpec.model_validate(INTENT)):
        for mode, reason in {
            Mode.EARLY_EXIT: "spec.classification.earlyExit is absent",
            Mode.SUBGRAPHS: "spec.classification.subgraphs and spec.generation.subgraphs are absent",
            Mode.DYNAMIC_BATCHING: "spec.batching is absent",
        }.items():
            absent = status_of(effective(without), mode)
            assert (absent.state, absent.reason) == (ModeState.OFF, reason)


def test_the_origin_of_each_value() -> None:
    result = effective(spec(streaming={"level": 7}, gateway={"rateLimit": {"requestsPerSecond": 9}}))
    assert origin(result.provenance, "/rollbackLevel") == ("3", SetBy.DEFAULT)
    assert origin(result.provenance, "/streaming/level") == ("7", SetBy.SPEC)
    assert "/streaming/dictionaryConfigMapRef/name" not in {row.path for row in result.provenance}
    trained = effective(spec(streaming={"dictionaryConfigMapRef": {"name": "words", "key": "zstd"}})).provenance
    assert origin(trained, "/streaming/dictionaryConfigMapRef/name") == ("words", SetBy.SPEC)
    assert origin(result.provenance, "/streaming/compression") == ("Auto", SetBy.DEFAULT)
    assert origin(result.provenance, "/gateway/rateLimit/requestsPerSecond") == ("9", SetBy.SPEC)
    assert origin(result.provenance, "/gateway/rateLimit/burst") == ("10", SetBy.DEFAULT)
    lowered = effective(spec(rollbackLevel=3), 2)
    assert origin(lowered.provenance, "/rollbackLevel") == ("2", SetBy.LEVEL)
    assert origin(lowered.provenance, "/streaming/compression") == ("Off", SetBy.LEVEL)


def cheap(**blocks: Any) -> InferencePolicySpec:
    """A policy that generates with every mode; `blocks` replace those of CHEAP."""
    return spec(generation={**CHAT["generation"], **CHEAP, **blocks})


@pytest.mark.parametrize("level", range(MAX_LEVEL + 1))
def test_each_level_turns_on_what_makes_tokens_cheaper(level: int) -> None:
    result = effective(cheap(), level)
    for mode in (Mode.QUANTIZED, Mode.SPECULATIVE, Mode.SAMPLER_PIPELINE):
        on = level >= LEVEL_FROM[mode]
        assert result.config.is_active(mode) is on
        assert status_of(result, mode).state is (ModeState.ACTIVE if on else ModeState.BELOW_LEVEL)
    assert (result.config.speculative is not None) is (level >= 2)
    assert (result.config.sampler_pipeline is not None) is (level >= 3)


def test_what_the_modes_do_and_who_said_so() -> None:
    result = effective(cheap())
    assert result.config.speculative == SpeculativeConfig(num_tokens=8)
    assert result.config.sampler_pipeline == SamplerPipelineConfig(workers=1, buffer_bytes=2 * 2**20)
    rows = {row.path.removeprefix("/generation/"): (row.value, row.set_by) for row in result.provenance}
    assert rows["quantized/variantRef/name"] == ("chat-int4", SetBy.SPEC)
    assert rows["speculative/numTokens"] == ("8", SetBy.SPEC)
    assert rows["speculative/length"] == ("CostModel", SetBy.DEFAULT)
    assert rows["speculative/acceptance"] == ("Lossless", SetBy.DEFAULT)
    assert rows["speculative/draftDevice"] == ("Auto", SetBy.DEFAULT)
    assert rows["samplerPipeline/workers"] == ("1", SetBy.DEFAULT)
    assert rows["samplerPipeline/bufferSize"] == ("2Mi", SetBy.SPEC)
    assert "speculative/threshold/guard" not in rows
    unbounded = effective(cheap(samplerPipeline={"workers": 2, "overlap": "Always"}))
    assert unbounded.config.sampler_pipeline == SamplerPipelineConfig(workers=2, overlap=Overlap.ALWAYS)
    buffer = origin(unbounded.provenance, "/generation/samplerPipeline/bufferSize")
    assert buffer == ("what the largest batch needs", SetBy.DEFAULT)


def test_the_lossy_rule_and_its_guards() -> None:
    speculative = CHEAP["speculative"] | {"acceptance": "Threshold"}
    result = effective(cheap(speculative=speculative))
    expected = SpeculativeConfig(num_tokens=8, acceptance=Acceptance.THRESHOLD)
    assert result.config.speculative == expected
    prefix = "/generation/speculative/threshold"
    assert origin(result.provenance, f"{prefix}/minProbability") == ("0.1", SetBy.DEFAULT)
    assert origin(result.provenance, f"{prefix}/minCosine") == ("0.6", SetBy.DEFAULT)
    stricter = effective(cheap(speculative=speculative | {"threshold": {"minProbability": "0.3", "minCosine": "0.8"}}))
    assert stricter.config.speculative == expected.model_copy(update={"min_probability": 0.3, "min_cosine": 0.8})
    assert origin(stricter.provenance, f"{prefix}/minProbability") == ("0.3", SetBy.SPEC)
    single = effective(cheap(speculative=speculative | {"threshold": {"guard": "SingleToken"}}))
    assert single.config.speculative is not None
    assert single.config.speculative.num_tokens == 1
    assert origin(single.provenance, "/generation/speculative/numTokens") == ("1", SetBy.SPEC)
    assert origin(single.provenance, f"{prefix}/guard") == ("SingleToken", SetBy.SPEC)


def test_a_mode_that_cannot_run_has_no_values() -> None:
    reason = "the tokenizer of the draft chat-draft isn't that of chat"
    for level in range(MAX_LEVEL + 1):
        result = effective(cheap(), level, {Mode.SPECULATIVE: reason})
        status = status_of(result, Mode.SPECULATIVE)
        assert (status.state, status.reason) == (ModeState.UNSUPPORTED, reason)
        assert result.config.speculative is None
        assert not result.config.is_active(Mode.SPECULATIVE)
        assert origin(result.provenance, "/generation/speculative") == ("off", SetBy.DEFAULT)
    below = effective(cheap(), 0)
    assert origin(below.provenance, "/generation/quantized") == ("off", SetBy.LEVEL)
    absent = effective(spec(), 3, {Mode.SPECULATIVE: reason})
    assert status_of(absent, Mode.SPECULATIVE).state is ModeState.OFF


def labelling(generation: dict[str, Any] | None = None, **blocks: Any) -> InferencePolicySpec:
    """A policy that classifies with `blocks`, and generates too."""
    return spec(generation=CHAT["generation"] | (generation or {}), classification=INTENT["classification"] | blocks)


@pytest.mark.parametrize("level", range(MAX_LEVEL + 1))
def test_texts_exit_early_at_the_highest_level_and_tasks_and_escalation_stay(level: int) -> None:
    policy = labelling({"subgraphs": {"tasks": [{"name": "sql"}]}}, earlyExit={}, subgraphs=TASKS, escalate=ESCALATION)
    result = effective(policy, level)
    config, on = result.config, level == 3
    for mode in (Mode.EARLY_EXIT, Mode.SUBGRAPHS):
        assert status_of(result, mode).state is (ModeState.ACTIVE if on else ModeState.BELOW_LEVEL)
    assert config.early_exit == (EarlyExitConfig() if on else None)
    tasks = (TaskConfig(name="ner", pinned=True), TaskConfig(name="topic"))
    assert config.classification_subgraphs == SubgraphsConfig(tasks=tasks, on_demand=on, cache_bytes=2 * 2**20)
    assert config.generation_subgraphs == SubgraphsConfig(tasks=(TaskConfig(name="sql"),), on_demand=on)
    assert config.escalate == EscalateConfig(
        below_confidence=0.6, prompt_template="One of {labels}?\n{text}\n", max_tokens=128
    )


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({}, EarlyExitConfig()),
        (
            {"maxDisagreement": "0.01", "lengthRelaxation": "0"},
            EarlyExitConfig(max_disagreement=0.01, length_relaxation=0.0),
        ),
        ({"rule": "Quantile"}, EarlyExitConfig(rule=ExitRule.QUANTILE)),
        ({"rule": "Fixed", "threshold": "0.95"}, EarlyExitConfig(rule=ExitRule.FIXED, threshold=0.95)),
        ({"sanitize": {}}, EarlyExitConfig(sanitize=SanitizeConfig(keep=DEFAULT_KEPT_CHARACTERS))),
        (
            {"sanitize": {"keep": "a-z", "otherScripts": "Remove"}},
            EarlyExitConfig(sanitize=SanitizeConfig(keep="a-z", other_scripts=OtherScripts.REMOVE)),
        ),
    ],
)
def test_what_decides_an_exit(written: dict[str, Any], expected: EarlyExitConfig) -> None:
    config = effective(labelling(earlyExit=written)).config
    assert config.early_exit == expected
    assert EarlyExitConfig.model_validate_json(config.early_exit.model_dump_json(by_alias=True)) == expected


def test_who_said_how_texts_are_labelled() -> None:
    early_exit = {"maxDisagreement": "0.01", "sanitize": {"keep": "a-z"}}
    rows = effective(labelling(earlyExit=early_exit, subgraphs=TASKS, escalate=ESCALATION)).provenance
    found = {row.path.removeprefix("/classification/"): (row.value, row.set_by) for row in rows}
    assert {path: row for path, row in found.items() if not path.startswith("/")} == {
        "earlyExit/rule": ("Calibrated", SetBy.DEFAULT),
        "earlyExit/maxDisagreement": ("0.01", SetBy.SPEC),
        "earlyExit/lengthRelaxation": ("the variant's", SetBy.DEFAULT),
        "earlyExit/sanitize/keep": ("a-z", SetBy.SPEC),
        "earlyExit/sanitize/otherScripts": ("Keep", SetBy.DEFAULT),
        "subgraphs/tasks": ("ner (pinned), topic", SetBy.SPEC),
        "subgraphs/cacheSize": ("2Mi", SetBy.SPEC),
        "escalate/belowConfidence": ("0.6", SetBy.SPEC),
        "escalate/promptTemplate": ("One of {labels}? {text}", SetBy.SPEC),
        "escalate/maxTokens": ("128", SetBy.DEFAULT),
    }
    fixed = effective(labelling(earlyExit={"rule": "Fixed", "threshold": "0.9"})).provenance
    assert origin(fixed, "/classification/earlyExit/threshold") == ("0.9", SetBy.SPEC)
    assert origin(fixed, "/classification/earlyExit/sanitize") == ("off", SetBy.DEFAULT)
    assert "/classification/earlyExit/maxDisagreement" not in {row.path for row in fixed}


def test_what_the_level_does_to_exits_and_tasks() -> None:
    unbounded = {"tasks": [{"name": f"task-{number}"} for number in range(32)]}
    policy = labelling({"subgraphs": unbounded}, earlyExit={}, subgraphs=TASKS)
    rows = effective(policy).provenance
    assert origin(rows, "/generation/subgraphs/cacheSize") == ("no limit", SetBy.DEFAULT)
    names, _ = origin(rows, "/generation/subgraphs/tasks")
    assert len(names) <= 80
    assert names.endswith("…")
    below = effective(policy, 2).provenance
    assert origin(below, "/classification/earlyExit") == ("off", SetBy.LEVEL)
    assert origin(below, "/classification/subgraphs/tasks") == ("ner (pinned), topic", SetBy.SPEC)
    for block in ("classification", "generation"):
        assert origin(below, f"/{block}/subgraphs/cacheSize") == ("all in memory", SetBy.LEVEL)
    (why,) = {row.why for row in below if row.value == "all in memory"}
    assert why == "on from level 3; the level is 2"


def test_exits_and_tasks_that_cannot_run() -> None:
    reasons = {Mode.EARLY_EXIT: "ModelVariant intent has no exit heads", Mode.SUBGRAPHS: "another architecture"}
    result = effective(labelling(earlyExit={}, subgraphs=TASKS), unsupported=reasons)
    assert result.config.early_exit is None
    assert result.config.classification_subgraphs is not None
    assert not result.config.classification_subgraphs.on_demand
    for mode, reason in reasons.items():
        assert (status_of(result, mode).state, status_of(result, mode).reason) == (ModeState.UNSUPPORTED, reason)
    assert origin(result.provenance, "/classification/earlyExit") == ("off", SetBy.DEFAULT)


KEPT: dict[str, Any] = {"store": "Redis", "redis": {"urlSecretRef": {"name": "redis", "key": "url"}}}


@pytest.mark.parametrize("level", range(MAX_LEVEL + 1))
def test_keys_and_values_are_kept_and_requests_batched_at_the_highest_level(level: int) -> None:
    result = effective(cheap(kvCacheReuse=KEPT | {"ttl": "90m", "maxSize": "1Gi", "minPromptTokens": 200}), level)
    on = level >= LEVEL_FROM[Mode.KV_CACHE_REUSE]
    kept = KVReuseConfig(
        store=KVStore.REDIS,
        ttl_seconds=5400.0,
        max_bytes=2**30,
        memory_bytes=256 * 2**20,
        block_tokens=32,
        min_prompt_tokens=200,
    )
    assert result.config.kv_reuse == (kept if on else None)
    labels = InferencePolicySpec.model_validate(INTENT | {"batching": {"shortWait": "20ms", "maxWait": "30ms"}})
    batched = BatchingConfig(
        max_batch_tokens=1024,
        short_wait_seconds=0.02,
        long_wait_seconds=0.005,
        max_wait_seconds=0.03,
        max_queued_requests=1000,
    )
    assert effective(labels, level).config.batching == (batched if on else None)
    for mode, found in ((Mode.KV_CACHE_REUSE, result), (Mode.DYNAMIC_BATCHING, effective(labels, level))):
        assert status_of(found, mode).state is (ModeState.ACTIVE if on else ModeState.BELOW_LEVEL)


def test_who_said_how_requests_are_kept_and_batched() -> None:
    policy = spec(generation=CHAT["generation"] | {"kvCacheReuse": KEPT}, batching={"maxBatchTokens": 2048})
    rows = effective(policy).provenance
    kept, batched = "/generation/kvCacheReuse", "/batching"
    assert origin(rows, f"{kept}/store") == ("Redis", SetBy.SPEC)
    assert origin(rows, f"{kept}/redis/urlSecretRef/name") == ("redis", SetBy.SPEC)
    assert origin(rows, f"{kept}/maxSize") == ("4Gi", SetBy.DEFAULT)
    assert origin(rows, f"{kept}/minPromptTokens") == ("what engines measure", SetBy.DEFAULT)
    assert origin(rows, f"{batched}/maxBatchTokens") == ("2048", SetBy.SPEC)
    assert origin(rows, f"{batched}/maxQueuedRequests") == ("1000", SetBy.DEFAULT)
    below = effective(policy, 2).provenance
    for block in (kept, batched):
        assert origin(below, block) == ("off", SetBy.LEVEL)
        assert not [row for row in below if row.path.startswith(f"{block}/")]
    in_memory = effective(spec(generation=CHAT["generation"] | {"kvCacheReuse": {}})).provenance
    assert origin(in_memory, f"{kept}/memorySize") == ("256Mi", SetBy.DEFAULT)
    assert f"{kept}/maxSize" not in {row.path for row in in_memory}


@pytest.mark.parametrize("level", range(MAX_LEVEL + 1))
def test_what_gateways_allow_at_every_level(level: int) -> None:
    tenants = [
        {"name": "web", "priority": "High"},
        {"name": "jobs", "priority": "Low", "maxPriority": "Normal"},
        {"name": "ops", "maxPriority": "High"},
    ]
    limits = {"maxRequestSize": "1.5Ki", "requestTimeout": "1m30s", "demoPage": True}
    result = effective(spec(gateway={"apiKeysSecretRef": {"name": "keys"}, "tenants": tenants} | limits), level)
    assert result.config.tenants == (
        TenantConfig(name="web", priority=Priority.HIGH, max_priority=Priority.HIGH),
        TenantConfig(name="jobs", priority=Priority.LOW, max_priority=Priority.NORMAL),
        TenantConfig(name="ops", priority=Priority.NORMAL, max_priority=Priority.HIGH),
    )
    assert result.config.request_limits == RequestLimits(max_bytes=1536, timeout_seconds=90.0)
    assert result.config.demo_page
    told = "web (High), jobs (Low, at most Normal), ops (Normal, at most High)"
    assert origin(result.provenance, "/gateway/tenants") == (told, SetBy.SPEC)
    assert origin(result.provenance, "/gateway/demoPage") == ("true", SetBy.SPEC)
    plain = effective(spec(), level)
    assert plain.config.request_limits == RequestLimits(max_bytes=4 * 2**20, timeout_seconds=600.0)
    assert not plain.config.tenants
    assert not plain.config.demo_page
    assert origin(plain.provenance, "/gateway/requestTimeout") == ("10m", SetBy.DEFAULT)


@given(st.integers(1, 100), st.integers(1, 100_000), st.integers(1, 100_000))
def test_gateways_share_the_rate_limit(replicas: int, rate: int, burst: int) -> None:
    limit = {"requestsPerSecond": rate, "burst": burst}
    share = effective(spec(gateway={"replicas": replicas, "rateLimit": limit})).config.rate_limit
    assert share is not None
    assert share.requests_per_second * replicas == pytest.approx(rate)
    assert share.burst >= 1
    assert burst <= share.burst * replicas < burst + replicas


def test_without_a_rate_limit_there_is_none() -> None:
    assert effective(spec()).config.rate_limit is None
    assert effective(spec(gateway={"rateLimit": {"requestsPerSecond": 4}})).config.rate_limit is not None


@given(st.integers(0, MAX_LEVEL), st.sampled_from(["Auto", "Off"]), st.integers(1, 19), st.booleans())
def test_the_config_survives_its_way(level: int, compression: str, zstd_level: int, all_modes: bool) -> None:
    """ConfigMap and back; a field of a newer operator is kept apart, not refused."""
    generation = CHAT["generation"] | (CHEAP | {"subgraphs": TASKS, "kvCacheReuse": KEPT} if all_modes else {})
    labels = {"earlyExit": {"sanitize": {}}, "subgraphs": TASKS, "escalate": ESCALATION}
    classification = INTENT["classification"] | (labels if all_modes else {})
    streaming = {"compression": compression, "level": zstd_level}
    others: dict[str, Any] = {"rollbackLevel": level, "streaming": streaming}
    if all_modes:
        gateway = {"apiKeysSecretRef": {"name": "keys"}, "tenants": [{"name": "web", "priority": "High"}]}
        others |= {"batching": {}, "gateway": gateway}
    result = effective(spec(generation=generation, classification=classification, **others))
    config = RuntimeConfig(sequence=7, stable=result.config, provenance=result.provenance)
    back = RuntimeConfig.model_validate_json(config.model_dump_json(by_alias=True))
    assert back == config
    newer = config.to_dict()
    newer["stable"] |= {"newerMode": {"store": "Redis"}}
    assert RuntimeConfig.model_validate(newer).stable.level == level
