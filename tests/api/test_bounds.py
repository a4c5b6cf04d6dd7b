"""Every bound, enum, pattern, type and required field of every spec: kube-apiserver draws each line, and
pydantic draws the same one. The cases come from the schema itself, so that a new field is tested from its first day."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from sixfold_api.classification import DEFAULT_KEPT_CHARACTERS, KEPT_CHARACTERS_PATTERN
from sixfold_api.crdgen import structural
from sixfold_api.exposure import CIDR_PATTERN, PATH_PATTERN
from sixfold_api.kinds import KINDS, POLICY, TICKET, VARIANT, Kind
from sixfold_api.precision import CLAIM_FILE_PATTERN

Steps = tuple[str | int, ...]

FULL: dict[Kind, list[Any]] = {
    kind: json.loads(json.dumps(list(yaml.safe_load_all((Path(__file__).parent / name).read_text()))))
    for kind, name in (
        (POLICY, "full-policy.yaml"),
        (VARIANT, "full-variant.yaml"),
        (TICKET, "full-ticket.yaml"),
    )
}
"""The first has every field that can stand beside the others, the next ones have the rest."""
NEVER_SET = {("classification", "engine", "fullWeights")}
"""Fields that a rule always refuses, see test_rules.py."""
TIED = {
    ("type", "CPU"),
    ("operator", "Exists"),
    ("effect", "NoSchedule"),
    ("effect", "PreferNoSchedule"),
    ("acceptance", "Lossless"),
    ("guard", "SingleToken"),
    ("scheme", "None"),
    ("scheme", "INT8"),
    ("task", "Generation"),
    ("task", "Classification"),
    ("task", "TokenClassification"),
    ("rule", "Quantile"),
    ("rule", "Fixed"),
    ("store", "Memory"),
    ("priority", "Normal"),
    ("priority", "High"),
    ("maxPriority", "Low"),
    ("maxPriority", "Normal"),
    ("action", "StepDown"),
    ("action", "Level0"),
    ("action", "Suspend"),
}
"""Words that rules tie to other fields of the full example."""
NEEDED = {
    ("generation",),
    ("generation", "quantized"),
    ("artifact",),
    ("precision",),
    ("calibration",),
    ("evaluation",),
    ("source", "variantRef"),
    ("exitHeads",),
    ("gateway", "apiKeysSecretRef"),
    ("generation", "kvCacheReuse", "redis"),
    ("slices", 1, "training"),
    ("recommendation",),
    ("evidence",),
    ("policyRef",),
}
"""Blocks that a rule needs in the full example."""
COMPARED = {("autoscaling", "minReplicas"), ("autoscaling", "maxReplicas")}
"""Numbers that a rule compares with each other."""
_LONG_KEY = f"{'a' * 253}/{'b' * 63}"

LONGEST = {
    CIDR_PATTERN: "f" * 39 + "/128",
    PATH_PATTERN: "/" + "a" * 255,
    "^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$": "a" * 40,
    "^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$": "a" * 253,
    "^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$": "a" * 63,
    "^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$": _LONG_KEY,
    "^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$": _LONG_KEY,
    "^([0-9]{1,6}(ms|s|m|h))+$": None,  # its bound is a rule, see test_rules.py
    "^[0-9]{1,18}(\\.[0-9]{1,9})?([KMGTPE]i|[numkMGTPE]|[eE][0-9]{1,2})?$": "1" * 18 + "." + "1" * 9 + "e12",
    "^(0(\\.[0-9]{1,6})?|1(\\.0{1,6})?)$": "0.123456",
    "^-?[0-9]{1,9}(\\.[0-9]{1,6})?$": "-123456789.123456",
    "^[A-Za-z0-9_.*]+$": "a" * 128,
    "^[-._a-zA-Z0-9]+$": "a" * 253,
    "^[A-Z][A-Za-z0-9]*$": "A" * 48,
    "^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$": "a" * 40,
    "^[0-9]{1,9}(\\.[0-9]{1,6})?$": "123456789.123456",
    "^[0-9a-f]{10}$": "0123456789",
    KEPT_CHARACTERS_PATTERN: "a" * 256,
    CLAIM_FILE_PATTERN: "pvc://models/" + "a" * 499,
    None: "pvc://models/" + "a" * 499,  # a URI, whose form is a rule
}


def at(spec: Any, path: Steps) -> Any:
    for step in path:
        spec = spec[step]
    return spec


def replaced(spec: Any, path: Steps, value: Any) -> Any:
    """A copy of `spec` with `value` at `path`; KeyError if the full example lacks the path."""
    result = copy.deepcopy(spec)
    parent = at(result, path[:-1])
    parent[path[-1]] = value
    return result


def without(spec: Any, path: Steps) -> Any:
    result = copy.deepcopy(spec)
    del at(result, path[:-1])[path[-1]]
    return result


def nodes(schema: dict[str, Any], example: Any, path: Steps = ()) -> Iterator[tuple[Steps, dict[str, Any]]]:
    """Every node of a schema that an example has, with its path there."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        if name in example:
            yield from nodes(child, example[name], (*path, name))
    if "items" in schema:
        for index, item in enumerate(example):
            yield from nodes(schema["items"], item, (*path, index))
    if "additionalProperties" in schema:
        key = next(iter(example))
        yield from nodes(schema["additionalProperties"], example[key], (*path, key))


def all_paths(schema: dict[str, Any], path: Steps = ()) -> Iterator[Steps]:
    """Path of every field of a schema; items of a list are 0, entries of maps are left out."""
    yield path
    for name, child in schema.get("properties", {}).items():
        yield from all_paths(child, (*path, name))
    if "items" in schema:
        yield from all_paths(schema["items"], (*path, 0))


def examples(kind: Kind) -> Iterator[tuple[Any, Steps, dict[str, Any]]]:
    """Every node of a kind once: a full example that has it, and its path there."""
    schema, seen = structural(kind.spec), set()
    for full in FULL[kind]:
        for path, node in nodes(schema, full):
            place = tuple(0 if isinstance(step, int) else step for step in path)
            if place not in seen:
                seen.add(place)
                yield full, path, node
    missing = set(all_paths(schema)) - seen - NEVER_SET
    assert not missing, f"the full examples lack {missing}"


def cases() -> Iterator[Any]:
    for kind in KINDS:
        for full, path, node in examples(kind):
            for what, spec, expected in _cases_of(full, path, node):
                name = "/".join(map(str, path)) or "spec"
                yield pytest.param(kind, spec, expected, id=f"{kind.short_name}-{name}-{what}")


def _cases_of(full: Any, path: Steps, node: dict[str, Any]) -> Iterator[tuple[str, Any, str | None]]:
    """(what, spec, words of the message or None if it is accepted) for one node."""
    for name in node.get("required", []):
        yield f"without {name}", without(full, (*path, name)), "Required value"
    if not path:
        return
    value = at(full, path)
    if "enum" in node:
        for member in node["enum"]:
            if (path[-1], member) not in TIED:
                yield f"is {member}", replaced(full, path, member), None
        yield "no such word", replaced(full, path, "NoSuchWord"), 'Unsupported value: "NoSuchWord"'
        yield "lower case", replaced(full, path, value.lower()), "Unsupported value"
        return
    if path[-1] == "maxRequestSize":  # its bounds are a rule, see test_rules.py
        node = {key: value for key, value in node.items() if key not in ("minimum", "maxLength")}
    if path[-2:] in COMPARED:  # of each other, see test_rules.py
        node = {key: value for key, value in node.items() if key not in ("minimum", "maximum")}
    if "minimum" in node:
        yield "smallest", replaced(full, path, node["minimum"]), None
        words = f"should be greater than or equal to {node['minimum']}"
        yield "too small", replaced(full, path, node["minimum"] - 1), words
    if "maximum" in node:
        yield "largest", replaced(full, path, node["maximum"]), None
        words = f"should be less than or equal to {node['maximum']}"
        yield "too large", replaced(full, path, node["maximum"] + 1), words
    if node.get("type") == "integer":
        yield "in quotes", replaced(full, path, str(value)), "must be of type integer"
        yield "a boolean", replaced(full, path, True), "must be of type integer"
        yield "a fraction", replaced(full, path, 1.5), "must be of type integer"
        if {"bits", "groupSize", "depths", "steps"} & set(path) or path[-2:] in COMPARED:
            # CEL reads them, and takes no float for a whole number.
            words = "no such overload: isSorted" if "steps" in path else "expected int, got float64"
            yield "a whole float", replaced(full, path, float(value)), words
        elif path != ("engine", "replicas"):  # where `kubectl scale` writes, the apiserver itself takes no float
            yield "a whole float", replaced(full, path, float(value)), None
    if node.get("x-kubernetes-int-or-string"):
        yield "a fraction", replaced(full, path, 1.5), "must be of type integer,string"
        yield "a boolean", replaced(full, path, True), "must be of type integer,string"
    if node.get("type") == "boolean":
        yield "in quotes", replaced(full, path, "true"), "must be of type boolean"
        yield "a number", replaced(full, path, 1), "must be of type boolean"
    if node.get("type") == "string":
        yield "a number", replaced(full, path, 7), "must be of type string"
    if "pattern" in node:
        yield "of another form", replaced(full, path, "no way^"), "should match"
        yield "with a line break", replaced(full, path, f"{value}\n"), "should match"
    longest = LONGEST[node.get("pattern")] if "maxLength" in node else None
    if "pattern" not in node and "maxLength" in node and "://" not in value:
        longest = "a" * node["maxLength"]
    if path == ("source", "uri"):
        longest = "hf://acme/" + "a" * 461 + "@" + "0" * 40
    if path[-1] == "promptTemplate":
        longest = "{text}" + "a" * 4090
    if longest is not None:
        yield "longest", replaced(full, path, longest), None
        if len(longest) == node["maxLength"]:
            yield "too long", replaced(full, path, f"{longest}a"), f"may not be more than {node['maxLength']} bytes"
    if "minLength" in node:
        yield "empty", replaced(full, path, ""), "should be at least 1 chars long"
    if node.get("type") == "array":
        yield "most items", replaced(full, path, _items(value[0], node["maxItems"])), None
        words = f"must have at most {node['maxItems']} items"
        yield "too many items", replaced(full, path, _items(value[0], node["maxItems"] + 1)), words
        if "minItems" in node:
            yield "too few items", replaced(full, path, []), f"should have at least {node['minItems']} items"
        yield "with a null", replaced(full, path, [None]), f"must be of type {node['items']['type']}"
        yield "an object", replaced(full, path, {}), "must be of type array"
    if node.get("type") == "object":
        if path not in NEEDED and not isinstance(path[-1], int):
            required = path[-1] in ("variantRef", "draftVariantRef", "source", "training", "urlSecretRef", "secretRef")
            yield "null", replaced(full, path, None), "Required value" if required else None
        yield "text", replaced(full, path, "text"), "must be of type object"
        if "maxProperties" in node:
            limit = node["maxProperties"]
            yield "most entries", replaced(full, path, {f"k{index}": "1" for index in range(limit)}), None
            many = {f"k{index}": "1" for index in range(limit + 1)}
            yield "too many entries", replaced(full, path, many), f"must have at most {limit} items"
            yield "an entry of null", replaced(full, path, {"k": None}), None
            yield "longest key", replaced(full, path, {_LONG_KEY: "1"}), None
            yield "too long a key", replaced(full, path, {f"a{_LONG_KEY}": "1"}), "each key must have at most"
            yield "a key of another form", replaced(full, path, {"no key!": "1"}), "each key must have at most"
        elif "x-kubernetes-preserve-unknown-fields" not in node:
            yield "an unknown field", replaced(full, (*path, "noSuchField"), 1), "unknown field"


def _items(first: Any, count: int) -> list[Any]:
    """As many as `first`, each of its own where that has a name or is a number."""
    if isinstance(first, int):
        return list(range(1, count + 1))
    if isinstance(first, str):
        return [f"n{number}" for number in range(count)]
    key = next((key for key in ("name", "signal", "alertName") if key in first), None)
    return [
        first | ({} if key is None else {key: f"N{number}" if key == "signal" else f"n{number}"})
        for number in range(count)
    ]


@pytest.mark.parametrize("kind, spec, expected", list(cases()))
def test_the_line_is_drawn(api, kind: Kind, spec: Any, expected: str | None) -> None:
    answer = api.create(kind, spec)
    if expected is None:
        assert answer.accepted, answer.causes
        kind.spec.model_validate(spec)
    else:
        assert not answer.accepted
        assert any(expected in cause for cause in answer.causes), answer.causes
        with pytest.raises(ValidationError):
            kind.spec.model_validate(spec)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_what_comes_back_is_what_went_in(api, kind: Kind) -> None:
    defaults = {"automation": "Enforce", "remediation": "TicketOnly"} if kind is POLICY else {}
    for full in FULL[kind][1:]:
        assert api.create(kind, full).spec == full | defaults
    stored = api.create(kind, FULL[kind][0]).spec
    assert stored == FULL[kind][0]
    absent = {"slices": []} if kind is VARIANT else {}
    assert kind.spec.model_validate(stored).to_dict() == absent | _with_text_quantities(stored)


def _with_text_quantities(spec: Any) -> Any:
    """The models hold quantities as text."""
    if isinstance(spec, dict):
        return {
            key: {name: str(value) for name, value in entry.items()}
            if key in ("requests", "limits")
            else _with_text_quantities(entry)
            for key, entry in spec.items()
        }
    return [_with_text_quantities(item) for item in spec] if isinstance(spec, list) else spec


DEFAULTS = {
    POLICY: (
        {
            "engine": {},
            "gateway": {
                "apiKeysSecretRef": {"name": "keys"},
                "rateLimit": {"requestsPerSecond": 5},
                "tenants": [{"name": "web"}],
                "ingress": {"host": "chat.example.com"},
                "httpRoute": {"parentRefs": [{"name": "shared"}]},
            },
            "generation": {
                "variantRef": {"name": "chat"},
                "speculative": {"draftVariantRef": {"name": "tiny"}},
                "kvCacheReuse": {},
                "samplerPipeline": {},
            },
            "classification": {
                "variantRef": {"name": "intent"},
                "engine": {},
                "earlyExit": {"sanitize": {}},
                "subgraphs": {"tasks": [{"name": "ner"}]},
                "escalate": {"belowConfidence": "0.5", "promptTemplate": "{text}"},
            },
            "batching": {},
            "streaming": {},
            "analysis": {},
            "canary": {},
            "shadow": {},
            "tickets": {},
        },
        {
            "rollbackLevel": 3,
            "automation": "Enforce",
            "remediation": "TicketOnly",
            "analysis/interval": "30s",
            "analysis/initialDelay": "2m",
            "analysis/failureLimit": 3,
            "analysis/cooldown": "15m",
            "analysis/recoverAfter": "30m",
            "analysis/rejectWindow": "6h",
            "canary/stepDuration": "5m",
            "canary/hashBy": "Conversation",
            "canary/minSamples": 50,
            "shadow/sampleRate": "0.01",
            "engine/strategy": "Auto",
            "engine/startupDeadline": "30m",
            "classification/engine/startupDeadline": "30m",
            "gateway/ingress/path": "/v1",
            "gateway/httpRoute/path": "/v1",
            "gateway/rateLimit/burst": 10,
            "gateway/tenants/0/priority": "Normal",
            "gateway/maxRequestSize": "4Mi",
            "gateway/requestTimeout": "10m",
            "gateway/demoPage": False,
            "generation/speculative/draftDevice": "Auto",
            "generation/speculative/numTokens": 5,
            "generation/speculative/length": "CostModel",
            "generation/speculative/acceptance": "Lossless",
            "generation/kvCacheReuse/store": "Memory",
            "generation/kvCacheReuse/ttl": "1h",
            "generation/kvCacheReuse/maxSize": "4Gi",
            "generation/kvCacheReuse/memorySize": "256Mi",
            "generation/kvCacheReuse/blockTokens": 32,
            "generation/samplerPipeline/workers": 1,
            "generation/samplerPipeline/overlap": "Auto",
            "classification/engine/strategy": "Auto",
            "classification/earlyExit/rule": "Calibrated",
            "classification/earlyExit/sanitize/keep": DEFAULT_KEPT_CHARACTERS,
            "classification/earlyExit/sanitize/otherScripts": "Keep",
            "classification/subgraphs/tasks/0/pinned": False,
            "classification/escalate/maxTokens": 128,
            "batching/maxBatchTokens": 1024,
            "batching/shortWait": "10ms",
            "batching/longWait": "5ms",
            "batching/maxWait": "15ms",
            "batching/maxQueuedRequests": 1000,
            "streaming/compression": "Auto",
            "streaming/level": 3,
        },
    ),
    VARIANT: (
        {"source": {"uri": "pvc://models/chat"}, "task": "Generation", "precision": {}, "preparation": {}},
        {"precision/scheme": "None", "preparation/deadline": "1h"},
    ),
    TICKET: (without(FULL[TICKET][0], ("decision",)), {"decision": "Pending"}),
}


DEFAULTS_ELSEWHERE = {
    POLICY: {
        "generation/speculative/threshold/minProbability": "0.1",
        "generation/speculative/threshold/guard": "Coherence",
        "generation/subgraphs/tasks/0/pinned": False,
        "engine/autoscaling/minReplicas": 1,
        "engine/autoscaling/scaler": "Auto",
        "classification/engine/autoscaling/minReplicas": 1,
        "classification/engine/autoscaling/scaler": "Auto",
        "gateway/autoscaling/minReplicas": 1,
        "gateway/autoscaling/scaler": "Auto",
        "gateway/autoscaling/cpuPercent": 80,
    },
    VARIANT: {
        "precision/modules/0/full": False,
        "exitHeads/train": "Heads",
        "exitHeads/distillation": "0",
        "exitHeads/maxDisagreement": "0.03",
        "exitHeads/lengthRelaxation": "0.01",
        "slices/1/adapter/width": 64,
        "slices/1/adapter/layers": 8,
    },
    TICKET: {},
}
"""Of blocks that can't stand in DEFAULTS."""


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_defaults(api, kind: Kind) -> None:
    """Exactly these are stored; what is absent stays absent, so that a later version may change its meaning."""
    spec, expected = DEFAULTS[kind]
    stored = api.create(kind, spec).spec
    added = {"/".join(map(str, path)): node["default"] for _, path, node in examples(kind) if "default" in node}
    assert added == expected | DEFAULTS_ELSEWHERE[kind]
    for path, value in expected.items():
        assert at(stored, tuple(int(step) if step.isdigit() else step for step in path.split("/"))) == value
    assert kind.spec.model_validate(stored) == kind.spec.model_validate(spec)


def test_blocks_that_are_left_out_stay_absent(api) -> None:
    stored = api.create(POLICY, {"generation": {"variantRef": {"name": "chat"}}}).spec
    scalars = {"rollbackLevel": 3, "automation": "Enforce", "remediation": "TicketOnly"}
    assert stored == {"generation": {"variantRef": {"name": "chat"}}, **scalars}
    parsed = POLICY.spec.model_validate(stored)
    assert parsed.engine.accelerator.type == "GPU"
    assert parsed.streaming.level == 3


def test_patterns_mean_the_same_in_go_and_in_rust() -> None:
    """Both are RE2-like; a construct that only one of them knows would be a difference in waiting."""
    for kind in KINDS:
        for _, path, node in examples(kind):
            if "pattern" in node:
                assert node["pattern"] in LONGEST, f"add the longest value for the pattern at {path}"
                assert not re.search(r"\\[wdsbWDSB]|\(\?|\\p", node["pattern"])
