"""pydantic accepts exactly what kube-apiserver accepts: files that are served without a cluster meet the same API."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from sixfold_api.classification import DEFAULT_KEPT_CHARACTERS, KEPT_CHARACTERS_PATTERN
from sixfold_api.crdgen import structural
from sixfold_api.exposure import CIDR_PATTERN, PATH_PATTERN
from sixfold_api.kinds import POLICY, VARIANT
from sixfold_api.precision import CLAIM_FILE_PATTERN

# (values that are fine, values just over a line); a quarter of the specs or so should be accepted.
NAMES = ["chat", "a" * 40], ["a" * 41, "", "Chat", "a.b", "a-", "é"]
ENTRIES = ["url", "ca.crt", "a" * 253], ["a b", "", "a/b", "a" * 254]
DURATIONS = ["1h", "720h", "1h30m", "5ms", "15ms"], ["0s", "721h", "1.5h", "1d", "999999h999999h9s", ""]
URIS = ["pvc://models/chat", "hf://acme/chat@" + "0" * 40], ["pvc://models", "hf://acme/chat@main"]
TEXTS = ["pvc://models/a.jsonl"], ["pvc://models", "hf://acme/chat@" + "0" * 40]
SIGNALS = ["TTFTP95", "A" * 48], ["a b", "ttft", "", "A" * 49]
SINKS = ["ops", "a" * 40], ["Ops", "-a", "", "a" * 41]
COSTS = ["2.50", "0"], ["-1", "1e3", "", ".5"]
FRACTIONS = ["0", "0.5", "1.0"], ["2", "-0.1", ".5", "1e-3", "0.1234567"]
DECIMALS = ["1", "0.25", "-3"], ["1,5", "1.", "1e3", "0.1234567"]
KEPT = [DEFAULT_KEPT_CHARACTERS, "a-zä", "\\s&|~"], ["z-a", "[a]", "", "a-", "\\", "\\u12", "a\nb", "^a", "b-a-c"]
TEMPLATES = ["{text}", "One of {labels}? {text}"], ["text", "{ text }", ""]
MODULES = ["o_proj", "layers.0.*"], ["o proj", "", "a/b"]
LABELS = ["x", "a" * 63], ["a b", "-", "ä", "a" * 64, ".x"]
KEYS = ["x", "example.com/x"], ["a b", "-", "", "Example.com/x", "/x"]
RESOURCES = ["nvidia.com/gpu"], ["gpu", "nvidia.com/", "NVIDIA.com/gpu"]
QUANTITIES = (
    ["1", "500m", "1.5Gi", "1e3", "4Mi", 0, 3, 2.0, None],
    ["1ki", "-1", "", ".5", "1 Gi", -1, 2**63, True, 1.5],
)
CIDRS = ["10.0.0.0/8", "fd00::/64"], ["10.0.0.0", "x/8", "", "10.0.0.0/1234"]
PATHS = ["/", "/v1", "/a/b/"], ["v1", "//", "/a b", "", "/é"]
KNOWN = {
    CIDR_PATTERN: CIDRS,
    PATH_PATTERN: PATHS,
    "^(0(\\.[0-9]{1,6})?|1(\\.0{1,6})?)$": FRACTIONS,
    "^-?[0-9]{1,9}(\\.[0-9]{1,6})?$": DECIMALS,
    "^[A-Z][A-Za-z0-9]*$": SIGNALS,
    "^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$": SINKS,
    "^[0-9]{1,9}(\\.[0-9]{1,6})?$": COSTS,
    "^[A-Za-z0-9_.*]+$": MODULES,
    "^[-._a-zA-Z0-9]+$": ENTRIES,
    CLAIM_FILE_PATTERN: TEXTS,
    KEPT_CHARACTERS_PATTERN: KEPT,
}
ODD = [None, True, "text", 1, 1.5, [], {}, [None], {"noSuchField": 1}]


def values(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that mostly satisfy a structural schema, and now and then don't."""
    fine, over = _plausible(schema)
    # hypothesis prefers small numbers and ends of ranges: a number in the middle is rare.
    return st.integers(0, 120).flatmap(lambda number: st.sampled_from(over + ODD) if number == 77 else fine)


def _plausible(schema: dict[str, Any]) -> tuple[st.SearchStrategy[Any], list[Any]]:
    if "properties" in schema:
        required = {name: values(schema["properties"][name]) for name in schema.get("required", [])}
        optional = {name: values(child) for name, child in schema["properties"].items() if name not in required}
        return st.fixed_dictionaries(required, optional=optional), []
    if "additionalProperties" in schema:
        keys = st.integers(0, 60).flatmap(lambda number: st.sampled_from(KEYS[number == 47]))
        return st.dictionaries(keys, values(schema["additionalProperties"]), max_size=2), []
    if schema.get("type") == "array":
        return st.lists(values(schema["items"]), max_size=2), []
    fine, over = _scalars(schema)
    return st.sampled_from(fine), over


def _scalars(schema: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    if "enum" in schema:
        return schema["enum"], ["NoSuchWord"]
    if schema.get("x-kubernetes-int-or-string"):
        return QUANTITIES
    if schema["type"] == "boolean":
        return [True, False], ["true", 0]
    if schema["type"] == "integer":
        low, high = schema["minimum"], schema["maximum"]
        return [low, low + 1, high], [low - 1, high + 1, str(low), low + 0.5]
    pattern = schema.get("pattern", "")
    if not pattern:
        if "{text}" in schema["description"]:
            return TEMPLATES
        if "hf://" not in schema["description"] and "pvc://" not in schema["description"]:
            return [["a", "High5xx"], ["a" * 200]] if schema.get("minLength") else [["", "a"], ["a" * 200]]
        return URIS if schema["description"].startswith("hf://") else TEXTS
    if pattern in KNOWN:
        return KNOWN[pattern]
    if "ms|s|m|h" in pattern:
        return DURATIONS
    if "{0,61}" not in pattern:
        return NAMES
    if "{0,251}" not in pattern:
        return LABELS
    return KEYS if ")?/)?" in pattern else RESOURCES


def varied(kind: Any, file: str) -> st.SearchStrategy[Any]:
    """A full example in which up to three parts are left out or replaced: rules over several fields hold in most."""
    schema = structural(kind.spec)
    fulls = list(yaml.safe_load_all((Path(__file__).parent / file).read_text()))

    @st.composite
    def draw_one(draw: st.DrawFn) -> Any:
        spec = copy.deepcopy(draw(st.sampled_from(fulls)))
        for _ in range(draw(st.integers(0, 3))):
            parent, name, child = draw(st.sampled_from(list(_parts(schema, spec))))
            if draw(st.booleans()):
                del parent[name]
            else:
                parent[name] = draw(values(child))
            if not spec:
                break
        return spec

    return draw_one()


def _parts(schema: dict[str, Any], value: Any) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """(object, name, schema) of each field that is set below an object."""
    for name, child in schema.get("properties", {}).items():
        if isinstance(value, dict) and name in value:
            yield value, name, child
            yield from _parts(child, value[name])
    if "items" in schema and isinstance(value, list):
        for item in value:
            yield from _parts(schema["items"], item)


def agree(api: Any, kind: Any, spec: Any) -> None:
    answer = api.create(kind, spec)
    event(f"accepted: {answer.accepted}")
    try:
        parsed = kind.spec.model_validate(spec)
    except ValidationError as error:
        assert not answer.accepted, f"pydantic alone refuses {spec}: {error}"
    else:
        assert answer.accepted, f"kube-apiserver alone refuses {spec}: {answer.causes}"
        assert kind.spec.model_validate(answer.spec) == parsed


FEW = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@FEW
@given(spec=values(structural(POLICY.spec)) | varied(POLICY, "full-policy.yaml"))
@example(spec={"generation": {"variantRef": {"name": "chat"}}, "engine": None})
@example(spec={"generation": {"variantRef": {"name": "chat"}}, "noSuchField": None})
@example(spec={"generation": {"variantRef": {"name": "chat"}}, "rollback_level": 2})
def test_policies(api, spec: Any) -> None:
    agree(api, POLICY, spec)


@FEW
@given(spec=values(structural(VARIANT.spec)) | varied(VARIANT, "full-variant.yaml"))
@example(spec={"source": {"uri": "pvc://models/chat"}, "task": "Generation", "preparation": {"pod": {}}})
def test_variants(api, spec: Any) -> None:
    agree(api, VARIANT, spec)
