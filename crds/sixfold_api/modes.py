"""The modes, the rollback levels, and which mode starts at which level. Nothing else decides this."""

from __future__ import annotations

from enum import StrEnum

MAX_LEVEL = 3


class Mode(StrEnum):
    """What saves cost."""

    QUANTIZED = "Quantized"
    SPECULATIVE = "Speculative"
    EARLY_EXIT = "EarlyExit"
    SUBGRAPHS = "Subgraphs"
    KV_CACHE_REUSE = "KVCacheReuse"
    SAMPLER_PIPELINE = "SamplerPipeline"
    DYNAMIC_BATCHING = "DynamicBatching"
    COMPRESSED_STREAMING = "CompressedStreaming"


LEVEL_FROM: dict[Mode, int] = {
    Mode.QUANTIZED: 1,
    Mode.SPECULATIVE: 2,
    Mode.EARLY_EXIT: 3,
    Mode.SUBGRAPHS: 3,
    Mode.KV_CACHE_REUSE: 3,
    Mode.SAMPLER_PIPELINE: 3,
    Mode.DYNAMIC_BATCHING: 3,
    Mode.COMPRESSED_STREAMING: 3,
}
"""The rollback level from which a mode is on. Levels are fixed so that a number means the same everywhere."""


class ModeState(StrEnum):
    ACTIVE = "Active"
    CANARY = "Canary"
    """On for a share of the requests."""
    SUSPENDED = "Suspended"
    """Turned off by the operator."""
    BELOW_LEVEL = "BelowLevel"
    UNSUPPORTED = "Unsupported"
    OFF = "Off"
