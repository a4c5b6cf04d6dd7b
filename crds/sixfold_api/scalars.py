"""Strings with a meaning: durations, quantities, names. Kubernetes CRDs know no floats, so decimals are strings."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

from pydantic import BeforeValidator, StringConstraints, WithJsonSchema

_DURATION_PATTERN = r"^([0-9]+(ms|s|m|h))+$"
_DURATION_PART = re.compile(r"([0-9]+)(ms|s|m|h)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}

Duration = Annotated[str, StringConstraints(pattern=_DURATION_PATTERN, max_length=32)]
"""Such as `90s`, `1h30m` or `250ms`."""

OUR_NAME_PATTERN = r"^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$"
OurName = Annotated[str, StringConstraints(pattern=OUR_NAME_PATTERN, max_length=40)]
"""Name of one of our kinds: children append suffixes to it, and a Service must start with a letter."""

ObjectName = Annotated[
    str,
    StringConstraints(
        pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
        min_length=1,
        max_length=253,
    ),
]
"""Name of a foreign Kubernetes object (a Secret, a claim)."""

ShortText = Annotated[str, StringConstraints(min_length=1, max_length=253)]
LabelKey = Annotated[str, StringConstraints(min_length=1, max_length=317)]
LabelValue = Annotated[str, StringConstraints(max_length=63)]
_QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?([EPTGMk]i?|Ki|m|e[0-9]+)?$"
Quantity = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if isinstance(value, int) else value),
    StringConstraints(pattern=_QUANTITY_PATTERN, max_length=32),
    WithJsonSchema({"x-kubernetes-int-or-string": True, "pattern": _QUANTITY_PATTERN, "maxLength": 32}),
]
"""A Kubernetes resource quantity such as `500m`, `4Gi` or a bare number."""


def duration_seconds(text: str) -> float:
    """Seconds of a Duration such as `1h30m`."""
    return sum(int(number) * _SECONDS[unit] for number, unit in _DURATION_PART.findall(text))


class AcceleratorType(StrEnum):
    GPU = "GPU"
    CPU = "CPU"


class Task(StrEnum):
    GENERATION = "Generation"
    CLASSIFICATION = "Classification"


class RolloutStrategy(StrEnum):
    AUTO = "Auto"
    SURGE = "Surge"
    REPLACE = "Replace"


class Compression(StrEnum):
    AUTO = "Auto"
    OFF = "Off"
