"""Scalars with a meaning: durations, quantities, names. Kubernetes CRDs know no floats, so decimals are strings.

pydantic and kube-apiserver accept the same values: neither takes a number in quotes for a number.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BeforeValidator, StringConstraints, WithJsonSchema

_MAX_INT64 = 2**63 - 1


def _no_text(value: Any) -> Any:
    if isinstance(value, bool | str):
        raise ValueError("must be a number, without quotes")
    return value


Unquoted = BeforeValidator(_no_text)
"""Behind the bounds of a whole number: takes no text and no boolean for one, as kube-apiserver does."""


def _no_float(value: Any) -> Any:
    if isinstance(value, float):
        raise ValueError("must be a whole number, without a decimal point")
    return value


NoFloat = BeforeValidator(_no_float)
"""Behind the bounds of a whole number whose value a rule reads: CEL takes no 4.0 for 4."""


def _without_nulls(value: Any) -> Any:
    return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value


DropNulls = BeforeValidator(_without_nulls)
"""Behind the bounds of a map: an entry without a value is no entry, as for kube-apiserver."""

_DURATION_PATTERN = r"^([0-9]{1,6}(ms|s|m|h))+$"
_DURATION_PART = re.compile(r"([0-9]+)(ms|s|m|h)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}

Duration = Annotated[str, StringConstraints(pattern=_DURATION_PATTERN, max_length=16)]
"""Such as `90s`, `1h30m` or `250ms`. Short enough that CEL's duration() never overflows."""

OUR_NAME_PATTERN = r"^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$"
OUR_LONG_NAME_PATTERN = r"^[a-z]([-a-z0-9]{0,51}[a-z0-9])?$"
"""Of tickets: a policy's name and a fingerprint."""
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

_LABEL_NAME = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_DOMAIN = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
LabelKey = Annotated[str, StringConstraints(pattern=rf"^({_DOMAIN}/)?{_LABEL_NAME}$", min_length=1, max_length=317)]
"""Key of a label or a taint, or name of a resource: `name` or `example.com/name`."""
LabelValue = Annotated[str, StringConstraints(pattern=rf"^({_LABEL_NAME})?$", max_length=63)]
ExtendedResource = Annotated[str, StringConstraints(pattern=rf"^{_DOMAIN}/{_LABEL_NAME}$", max_length=317)]
"""Name of a device plugin's resource, such as `nvidia.com/gpu`."""

_QUANTITY_PATTERN = r"^[0-9]{1,18}(\.[0-9]{1,9})?([KMGTPE]i|[numkMGTPE]|[eE][0-9]{1,2})?$"


def _quantity(value: Any) -> Any:
    """Kubernetes takes whole numbers for quantities too."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if value != int(value) or not 0 <= value <= _MAX_INT64:
        raise ValueError("must be a whole number of at least 0, or a quantity in quotes")
    return str(int(value))


Quantity = Annotated[
    str,
    BeforeValidator(_quantity),
    StringConstraints(pattern=_QUANTITY_PATTERN, max_length=32),
    WithJsonSchema({"x-kubernetes-int-or-string": True, "pattern": _QUANTITY_PATTERN, "maxLength": 32, "minimum": 0}),
]
"""A Kubernetes resource quantity such as `500m`, `4Gi` or a bare number."""

Fraction = Annotated[str, StringConstraints(pattern=r"^(0(\.[0-9]{1,6})?|1(\.0{1,6})?)$", max_length=8)]
"""A decimal between 0 and 1, in quotes: CRDs know no floats."""
Decimal = Annotated[str, StringConstraints(pattern=r"^-?[0-9]{1,9}(\.[0-9]{1,6})?$", max_length=18)]
"""A decimal, in quotes."""

_QUANTITY_UNITS = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}


def quantity_value(text: str) -> float:
    """The number that a Quantity such as `4Gi` stands for."""
    match = re.fullmatch(r"([0-9.]+)(?:([KMGTPE])i|([numkMGTPE])|[eE]([0-9]{1,2}))?", text)
    if match is None:
        raise ValueError(f"{text!r} is no quantity")
    number, binary, decimal, exponent = match.groups()
    if binary:
        return float(number) * float(1024 ** ("KMGTPE".index(binary) + 1))
    return float(number) * _QUANTITY_UNITS.get(decimal or "", 1.0) * 10.0 ** int(exponent or 0)


def duration_seconds(text: str) -> float:
    """Seconds of a Duration such as `1h30m`."""
    return sum(int(number) * _SECONDS[unit] for number, unit in _DURATION_PART.findall(text))


class AcceleratorType(StrEnum):
    GPU = "GPU"
    CPU = "CPU"


class Task(StrEnum):
    GENERATION = "Generation"
    CLASSIFICATION = "Classification"
    TOKEN_CLASSIFICATION = "TokenClassification"


class RolloutStrategy(StrEnum):
    AUTO = "Auto"
    SURGE = "Surge"
    REPLACE = "Replace"


class FullWeights(StrEnum):
    """Where full weights are while quantised ones answer."""

    AUTO = "Auto"
    RESIDENT = "Resident"
    SWAP = "Swap"


class Compression(StrEnum):
    AUTO = "Auto"
    OFF = "Off"
