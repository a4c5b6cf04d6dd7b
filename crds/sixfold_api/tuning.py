"""Values of a policy that may be tuned, within which bounds, and the spec with tuned values in it. Pure.

A path is a JSON pointer of wire names; entries of `tasks` are named, not numbered:
/classification/subgraphs/tasks/pos/pinned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from sixfold_api.control_status import TunedValue
from sixfold_api.policy import InferencePolicySpec
from sixfold_api.scalars import duration_seconds, quantity_value


@dataclass(frozen=True)
class Tunable:
    """One value.

    Attributes:
        path: a pattern; `*` stands for a name.
        parse: the value as a number (a boolean is 0 or 1). Raises ValueError.
        low, high: bounds of the number.
        reach: at most this many times the spec's own value, and no less than that part of it; 0 is no bound.
    """

    path: str
    parse: Callable[[str], float]
    low: float
    high: float
    reach: float = 0.0


def _flag(text: str) -> float:
    if text not in ("true", "false"):
        raise ValueError(f"{text!r} is neither true nor false")
    return float(text == "true")


_MIB, _TIB = 2.0**20, 2.0**40
TUNABLES = (
    Tunable("/generation/speculative/numTokens", float, 1, 16),
    Tunable("/classification/earlyExit/threshold", float, 0.5, 1.0),
    Tunable("/classification/earlyExit/maxDisagreement", float, 0.0, 1.0, reach=2.0),
    Tunable("/batching/maxBatchTokens", float, 128, 65536, reach=8.0),
    Tunable("/batching/shortWait", duration_seconds, 0.0, 0.1),
    Tunable("/batching/longWait", duration_seconds, 0.0, 0.1),
    Tunable("/batching/maxWait", duration_seconds, 0.0, 0.1),
    Tunable("/generation/kvCacheReuse/memorySize", quantity_value, _MIB, _TIB, reach=4.0),
    Tunable("/generation/kvCacheReuse/maxSize", quantity_value, _MIB, _TIB, reach=4.0),
    Tunable("/generation/subgraphs/cacheSize", quantity_value, _MIB, _TIB, reach=4.0),
    Tunable("/classification/subgraphs/cacheSize", quantity_value, _MIB, _TIB, reach=4.0),
    Tunable("/generation/subgraphs/tasks/*/pinned", _flag, 0, 1),
    Tunable("/classification/subgraphs/tasks/*/pinned", _flag, 0, 1),
)


def tunable(path: str) -> Tunable | None:
    """The entry of TUNABLES for a path."""
    return next((entry for entry in TUNABLES if _matches(entry.path, path)), None)


def spec_value(spec: InferencePolicySpec, path: str) -> str | None:
    """The spec's own value at a tunable path, defaults included; None where its block is absent."""
    node: Any = spec.to_dict()
    for part in path.strip("/").split("/"):
        node = _named(node, part) if isinstance(node, list) else node.get(part) if isinstance(node, dict) else None
    return None if node is None else _text(node)


def why_not_tunable(spec: InferencePolicySpec, path: str, value: str) -> str:
    """Why a value can't be set; "" if it can."""
    entry, base = tunable(path), spec_value(spec, path)
    if entry is None:
        return f"{path} can't be tuned"
    if base is None:
        return f"spec{path.replace('/', '.')} is absent, so there is nothing to tune"
    try:
        number, own = entry.parse(value), entry.parse(base)
    except ValueError as error:
        return f"{path}: {error}"
    if not entry.low <= number <= entry.high:
        return f"{path}: {value} is not between {entry.low:g} and {entry.high:g}"
    if entry.reach and not own / entry.reach <= number <= own * entry.reach:
        return f"{path}: {value} is more than {entry.reach:g} times away from the spec's {base}"
    try:
        with_value(spec, path, value)
    except ValidationError as error:
        return f"{path}: {error.errors()[0]['msg']}"
    return ""


def with_value(spec: InferencePolicySpec, path: str, value: str) -> InferencePolicySpec:
    """The spec with another value at a path. Raises ValidationError."""
    document = _written(spec)
    *parents, name = path.strip("/").split("/")
    node: Any = document
    for part in parents:
        node = _named(node, part) if isinstance(node, list) else node.setdefault(part, {})
    node[name] = _typed(value, path)
    return InferencePolicySpec.model_validate(document)


def merge_patch(spec: InferencePolicySpec, path: str, value: str) -> dict[str, Any]:
    """The merge patch of the policy that sets a value. Lists are replaced as a whole, as merge patches do."""
    document = with_value(spec, path, value).model_dump(
        mode="json", by_alias=True, exclude_none=True, exclude_unset=True
    )
    patch: dict[str, Any] = {}
    node, source = patch, document
    for part in path.strip("/").split("/"):
        source = source[part]
        if not isinstance(source, dict):
            node[part] = source
            break
        node = node.setdefault(part, {})
    return {"spec": patch}


def tuned_spec(
    spec: InferencePolicySpec, tuned: Iterable[TunedValue]
) -> tuple[InferencePolicySpec, tuple[TunedValue, ...]]:
    """The spec with the tuned values that still hold, and which those are.

    One falls away when the spec's own value is no longer the one that it replaced, or when it breaks a rule.
    """
    held = []
    for entry in tuned:
        if spec_value(spec, entry.path) == entry.base and not why_not_tunable(spec, entry.path, entry.value):
            held.append(entry)
    result = spec
    for entry in list(held):
        try:
            result = with_value(result, entry.path, entry.value)
        except ValidationError:  # two that hold one by one and not together
            held.remove(entry)
    return result, tuple(held)


def _matches(pattern: str, path: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", "[^/]+"), path) is not None


def _named(items: list[Any], name: str) -> Any:
    return next((item for item in items if isinstance(item, dict) and item.get("name") == name), None)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _typed(value: str, path: str) -> Any:
    """As the wire has it: numbers without quotes, booleans; quantities, durations and decimals are strings."""
    if value in ("true", "false"):
        return value == "true"
    return int(value) if path.rsplit("/", 1)[-1] in ("numTokens", "maxBatchTokens") else value


def _written(spec: InferencePolicySpec) -> dict[str, Any]:
    """What the user wrote, without defaults."""
    return spec.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True)
