"""What other threads ask of the engine's thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sixfold_runtime.engine.protocol import Request
from sixfold_runtime.engine.work import Sink


@dataclass(frozen=True)
class Submit:
    sink: Sink
    request: Request


@dataclass(frozen=True)
class Cancel:
    sink: Sink
    ids: tuple[str, ...] | None
    """None means all of the sink."""


@dataclass(frozen=True)
class Call:
    """Do this; then look whether weights have to follow the configuration, or have arrived."""

    action: Callable[[], None]


class Stop:
    """End the thread."""
