"""The modes, the rollback levels, and which mode starts at which level. Nothing else decides this."""

from __future__ import annotations

from enum import StrEnum

MAX_LEVEL = 3


class Mode(StrEnum):
    """The modes that this version can run. The others of the design join with their features."""

    COMPRESSED_STREAMING = "CompressedStreaming"


LEVEL_FROM: dict[Mode, int] = {Mode.COMPRESSED_STREAMING: 3}
"""The rollback level from which a mode is on. Levels are fixed so that a number means the same everywhere."""


class ModeState(StrEnum):
    ACTIVE = "Active"
    BELOW_LEVEL = "BelowLevel"
    UNSUPPORTED = "Unsupported"
    OFF = "Off"
