"""pydantic's JSON schema -> structural schema: what is converted, and what must never slip through."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import Field

from sixfold_api.base import ApiModel, Rule
from sixfold_api.crdgen import crd, structural, to_yaml
from sixfold_api.kinds import KINDS, Kind
from sixfold_api.scalars import LabelKey, LabelValue, Quantity, Task

# What a structural schema may hold (the rest of JSON schema is refused by kube-apiserver).
KNOWN = {
    *("type", "description", "default", "enum", "format", "pattern", "required", "properties", "items"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "minItems", "maxItems"),
    *("additionalProperties", "maxProperties", "x-kubernetes-validations", "x-kubernetes-int-or-string"),
    *("x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-preserve-unknown-fields"),
}


def nodes(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield schema
    for child in schema.get("properties", {}).values():
        yield from nodes(child)
    for keyword in ("items", "additionalProperties"):
        if keyword in schema:
            yield from nodes(schema[keyword])


def root(kind: Kind) -> dict[str, Any]:
    schema: dict[str, Any] = crd(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


class Inner(ApiModel):
    """An inner block."""

    count: Annotated[int, Field(gt=0, lt=9)] = 2
    """How many."""

    rules = (Rule("self.count != 3", "count must not be 3", lambda inner: inner.count != 3),)


class Outer(ApiModel):
    """An outer block."""

    inner: Inner | None = None
    """Spread over
    two lines."""
    task: Task
    """What."""
    labels: Annotated[dict[LabelKey, LabelValue], Field(max_length=4)] | None = None
    """Some labels."""
    sizes: Annotated[dict[LabelKey, Quantity], Field(max_length=4)] | None = None
    """Some sizes."""
    text: str = ""
    """Some text."""


def test_a_reference_is_inlined_and_keeps_its_own_description() -> None:
    inner = structural(Outer)["properties"]["inner"]
    assert inner["description"] == "Spread over two lines."
    assert inner["type"] == "object"
    assert inner["x-kubernetes-validations"] == [{"rule": "self.count != 3", "message": "count must not be 3"}]


def test_exclusive_bounds_become_booleans() -> None:
    count = structural(Inner)["properties"]["count"]
    bounds = {"minimum": 0, "exclusiveMinimum": True, "maximum": 9, "exclusiveMaximum": True}
    assert bounds.items() <= count.items()
    assert count["default"] == 2


def test_an_enum_is_a_list_of_words() -> None:
    assert structural(Outer)["properties"]["task"]["enum"] == list(Task)
    assert structural(Outer)["required"] == ["task"]


def test_keys_of_a_map_are_checked_by_a_rule() -> None:
    labels = structural(Outer)["properties"]["labels"]
    assert labels["maxProperties"] == 4
    assert labels["additionalProperties"]["maxLength"] == 63
    (rule,) = labels["x-kubernetes-validations"]
    assert rule["rule"].startswith("self.all(key, key.size() <= 317 && key.matches(r'")
    assert structural(Outer)["properties"]["sizes"]["additionalProperties"]["x-kubernetes-int-or-string"] is True


def test_only_plain_scalars_become_defaults() -> None:
    properties = structural(Outer)["properties"]
    assert "default" not in properties["inner"]
    assert "default" not in properties["text"]


def test_a_rule_speaks_in_python_too() -> None:
    with pytest.raises(ValueError, match="count must not be 3"):
        Inner(count=3)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_nothing_but_structural_schema(kind: Kind) -> None:
    for node in nodes(root(kind)):
        assert set(node) <= KNOWN
        assert "type" in node or node.get("x-kubernetes-int-or-string")
        assert not ("properties" in node and "additionalProperties" in node)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_everything_is_bounded(kind: Kind) -> None:
    """Unbounded strings, lists and maps break the cost budget of CEL, and etcd in the end."""
    for part in ("spec", "status"):
        for node in nodes(root(kind)["properties"][part]):
            if node.get("type") == "string" and "enum" not in node:
                assert "maxLength" in node, node
            if node.get("type") == "array":
                assert "maxItems" in node, node
            if "additionalProperties" in node:
                assert "maxProperties" in node, node
            if node.get("type") == "integer" and part == "spec":
                assert {"minimum", "maximum"} <= set(node), node


PRINTABLE = st.characters(codec="utf-8", categories=["L", "N", "P", "S", "Zs"])
DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(PRINTABLE, max_size=12),
    lambda children: (
        st.lists(children, max_size=4)
        | st.dictionaries(st.from_regex(r"[A-Za-z][-A-Za-z]{0,8}", fullmatch=True), children, max_size=4)
    ),
    max_leaves=20,
)


@example({"on": None, "NO": {"y": 1}})
@given(DOCUMENTS.filter(lambda document: isinstance(document, dict | list)))
def test_the_yaml_writer_writes_what_a_yaml_reader_reads(document: Any) -> None:
    assert yaml.safe_load(to_yaml(document)) == document
