"""What a reconcile needs from outside."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from sixfold_operator.cache import Cache
from sixfold_operator.kube import Kube
from sixfold_operator.pod_states import PodStates
from sixfold_operator.reconcile.children import Children
from sixfold_operator.settings import OperatorSettings


@dataclass(frozen=True)
class Clock:
    """Monotonic seconds for delays, UTC for people."""

    monotonic: Callable[[], float] = time.monotonic
    now: Callable[[], datetime] = lambda: datetime.now(UTC)


@dataclass(frozen=True)
class Context:
    settings: OperatorSettings
    kube: Kube
    cache: Cache
    children: Children
    pod_states: PodStates
    clock: Clock = field(default_factory=Clock)
    served_kinds: set[str] = field(default_factory=set)
    """Kinds that not every cluster has and this one did when everything was listed last."""
