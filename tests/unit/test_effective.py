"""spec + level -> what pods obey, with the origin of every value."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sixfold_api.effective import Effective, effective
from sixfold_api.modes import LEVEL_FROM, MAX_LEVEL, Mode, ModeState
from sixfold_api.policy import InferencePolicySpec, ModeStatus
from sixfold_api.runtime_config import Provenance, RuntimeConfig, SetBy

CHAT = {"generation": {"variantRef": {"name": "chat"}}}
INTENT = {"classification": {"variantRef": {"name": "intent"}}}


def spec(**blocks: Any) -> InferencePolicySpec:
    return InferencePolicySpec.model_validate(CHAT | blocks)


def origin(provenance: tuple[Provenance, ...], path: str) -> tuple[str, SetBy]:
    (row,) = [row for row in provenance if row.path == path]
    return row.value, row.set_by


def streaming(result: Effective) -> ModeStatus:
    return next(mode for mode in result.modes if mode.name is Mode.COMPRESSED_STREAMING)


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
    for mode in set(Mode) - {Mode.COMPRESSED_STREAMING}:
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


@given(st.integers(0, MAX_LEVEL), st.sampled_from(["Auto", "Off"]), st.integers(1, 19))
def test_the_config_survives_its_way(level: int, compression: str, zstd_level: int) -> None:
    """ConfigMap and back; a field of a newer operator is kept apart, not refused."""
    result = effective(spec(rollbackLevel=level, streaming={"compression": compression, "level": zstd_level}))
    config = RuntimeConfig(sequence=7, stable=result.config, provenance=result.provenance)
    back = RuntimeConfig.model_validate_json(config.model_dump_json(by_alias=True))
    assert back == config
    newer = config.to_dict()
    newer["stable"] |= {"kvCacheReuse": {"store": "Redis"}}
    assert RuntimeConfig.model_validate(newer).stable.level == level
