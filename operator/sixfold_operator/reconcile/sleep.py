"""Engines that may go while nobody asks: when they go, and when they come back. Pure.

An autoscaler rests while there are no pods; the way to none and back is the operator's, by what the gateways say.
"""

from __future__ import annotations

from collections.abc import Iterable

from sixfold_api.autoscaling import EngineAutoscalingSpec
from sixfold_api.runtime_config import PodState, Role

ASLEEP_LOOK_SECONDS = 1.0
"""How often gateways are asked whether someone waits."""
LONGEST_LOOK_SECONDS = 30.0


def wanted_replicas(
    autoscaling: EngineAutoscalingSpec, replicas: int, gateways: int, states: Iterable[PodState]
) -> int:
    """How many pods there should be; `replicas` where nothing is to be done.

    Args:
        replicas: of the Deployment now.
        gateways: pods of the gateway that could have a request.
        states: what pods said, as far as they answered.
    """
    if not autoscaling.may_sleep:
        return replicas
    idle = [state.idle_seconds for state in states if state.role is Role.GATEWAY and state.idle_seconds is not None]
    if replicas == 0:
        return 1 if any(seconds == 0 for seconds in idle) else 0
    # One that says nothing may have a request.
    nobody_asks = len(idle) >= gateways > 0 and min(idle) >= autoscaling.idle_seconds
    return 0 if nobody_asks else replicas


def look_seconds(autoscaling: EngineAutoscalingSpec, replicas: int) -> float:
    """After how long to ask the gateways again."""
    return ASLEEP_LOOK_SECONDS if replicas == 0 else min(LONGEST_LOOK_SECONDS, autoscaling.idle_seconds / 4)
