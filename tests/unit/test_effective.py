"""spec + level -> what pods obey, with the origin of every value."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sixfold_api.effective import Effective, effective
from sixfold_api.generation import Acceptance, Overlap
from sixfold_api.modes import LEVEL_FROM, MAX_LEVEL, Mode, ModeState
from sixfold_api.policy import InferencePolicySpec, ModeStatus
from sixfold_api.runtime_config import Provenance, RuntimeConfig, SamplerPipelineConfig, SetBy, SpeculativeConfig

CHEAP: dict[str, Any] = {
    "quantized": {"variantRef": {"name": "chat-int4"}},
    "speculative": {"draftVariantRef": {"name": "chat-draft"}, "numTokens": 8},
    "samplerPipeline": {"bufferSize": "2Mi"},
}
CHAT: dict[str, Any] = {"generation": {"variantRef": {"name": "chat"}}}
INTENT = {"classification": {"variantRef": {"name": "intent"}}}


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
    states = {status.name: status for status in effective(spec()).modes}
    assert set(states) == set(Mode)
    later = {Mode.EARLY_EXIT, Mode.SUBGRAPHS, Mode.KV_CACHE_REUSE, Mode.DYNAMIC_BATCHING}
    for mode, block in {
        Mode.QUANTIZED: "quantized",
        Mode.SPECULATIVE: "speculative",
        Mode.SAMPLER_PIPELINE: "samplerPipeline",
    }.items():
        for without in (spec(), InferencePolicySpec.model_validate(INTENT)):
            absent = status_of(effective(without), mode)
            assert (absent.state, absent.reason) == (ModeState.OFF, f"spec.generation.{block} is absent")
    for mode in later:
        assert (states[mode].state, states[mode].reason) == (
            ModeState.UNSUPPORTED,
            "this version of Sixfold doesn't have it",
        )


def test_the_origin_of_each_value() -> None:
    result = effective(spec(streaming={"level": 7}, gateway={"rateLimit": {"requestsPerSecond": 9}}))
    assert origin(result.provenance, "/rollbackLevel") == ("3", SetBy.DEFAULT)
    assert origin(result.provenance, "/streaming/level") == ("7", SetBy.SPEC)
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
    generation = CHAT["generation"] | (CHEAP if all_modes else {})
    streaming = {"compression": compression, "level": zstd_level}
    result = effective(spec(generation=generation, rollbackLevel=level, streaming=streaming))
    config = RuntimeConfig(sequence=7, stable=result.config, provenance=result.provenance)
    back = RuntimeConfig.model_validate_json(config.model_dump_json(by_alias=True))
    assert back == config
    newer = config.to_dict()
    newer["stable"] |= {"kvCacheReuse": {"store": "Redis"}}
    assert RuntimeConfig.model_validate(newer).stable.level == level
