"""Pydantic models -> CustomResourceDefinitions: `python -m sixfold_api.crdgen DIRECTORY [DIRECTORY ...]`.

Kubernetes takes a subset of JSON schema ("structural schema"). What pydantic writes beyond it is converted here.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from sixfold_api.kinds import KINDS, Column, Kind
from sixfold_api.names import GROUP, VERSION

Schema = dict[str, Any]
_DROPPED = {"title", "discriminator", "additionalProperties"}
_YAML_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


def structural(model: type[BaseModel]) -> Schema:
    """The structural schema of a model."""
    schema = model.model_json_schema(by_alias=True, mode="validation")
    return _convert(schema, schema.get("$defs", {}))


def _convert(node: Schema, defs: dict[str, Schema]) -> Schema:
    if "$ref" in node:
        target = defs[node["$ref"].removeprefix("#/$defs/")]
        node = {**target, **{key: value for key, value in node.items() if key != "$ref"}}
    if "anyOf" in node:
        # T | None: an absent optional is left out of the object, so null needs no place in the schema.
        (only,) = [option for option in node["anyOf"] if option.get("type") != "null"]
        return _convert({**only, **{key: value for key, value in node.items() if key != "anyOf"}}, defs)
    result = {key: value for key, value in node.items() if key not in _DROPPED | {"$defs", "default", "const"}}
    if "default" in node and _is_stable_default(node):
        result["default"] = node["default"]
    if "patternProperties" in node:
        # A map with typed keys. Structural schemas know no patterns of keys: they become CEL.
        ((pattern, value),) = result.pop("patternProperties").items()
        result["additionalProperties"] = _convert(value, defs)
        result["x-kubernetes-validations"] = [_key_rule(pattern, result.pop("propertyNames")["maxLength"])]
    for bound in ("Minimum", "Maximum"):
        if f"exclusive{bound}" in node:
            result[bound.lower()] = node[f"exclusive{bound}"]
            result[f"exclusive{bound}"] = True
    if "const" in node:
        result["enum"] = [node["const"]]
    if "properties" in node:
        result["properties"] = {name: _convert(value, defs) for name, value in node["properties"].items()}
    if "items" in node:
        result["items"] = _convert(node["items"], defs)
    if "description" in result:
        result["description"] = re.sub(r"\s+", " ", result["description"]).strip()
    return result


def _key_rule(pattern: str, max_length: int) -> dict[str, str]:
    return {
        "rule": f"self.all(key, key.size() <= {max_length} && key.matches(r'{pattern}'))",
        "message": f"each key must have at most {max_length} characters and match {pattern}",
    }


def _is_stable_default(node: Schema) -> bool:
    """Schema defaults are stored in every object for ever, so only plain scalars become one; whole blocks and
    empty texts stay absent."""
    default = node["default"]
    return default is not None and default != "" and not isinstance(default, dict | list)


def crd(kind: Kind) -> dict[str, Any]:
    """The CustomResourceDefinition of a kind."""
    version: dict[str, Any] = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": [_column(column) for column in kind.columns],
        "schema": {"openAPIV3Schema": _root(kind)},
        "subresources": {"status": {}},
    }
    if kind.scale is not None:
        version["subresources"]["scale"] = {
            "specReplicasPath": kind.scale.spec_replicas_path,
            "statusReplicasPath": kind.scale.status_replicas_path,
            "labelSelectorPath": kind.scale.label_selector_path,
        }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind.kind,
                "plural": kind.plural,
                "singular": kind.singular,
                "listKind": f"{kind.kind}List",
                "shortNames": [kind.short_name],
                "categories": ["sixfold"],
            },
            "versions": [version],
        },
    }


def _column(column: Column) -> Schema:
    entry: Schema = {"name": column.name, "type": column.type, "jsonPath": column.json_path}
    if column.wide:
        entry["priority"] = 1
    if column.description:
        entry["description"] = column.description
    return entry


def _root(kind: Kind) -> Schema:
    return {
        "type": "object",
        "description": kind.description,
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": structural(kind.spec),
            "status": structural(kind.status),
        },
        "x-kubernetes-validations": [_name_rule(kind)],
    }


def _name_rule(kind: Kind) -> Schema:
    longest = 1 + 1 + int(re.findall(r",(\d+)}", kind.name_pattern)[0])
    letters = "lower-case letters, digits and dashes, a letter first"
    return {
        "rule": f"self.metadata.name.matches('{kind.name_pattern}')",
        "message": f"metadata.name must have at most {longest} characters: {letters}",
    }


def to_yaml(document: Any, indent: int = 0) -> str:
    """YAML with JSON scalars. Enough for CRDs, and the package needs no YAML library."""
    pad = "  " * indent
    if isinstance(document, dict) and document:
        return "".join(f"{pad}{_key(key)}:{_nested(value, indent)}" for key, value in document.items())
    if isinstance(document, list) and document:
        lines = []
        for item in document:
            text = to_yaml(item, indent + 1)
            lines.append(f"{pad}- {text.lstrip()}")
        return "".join(lines)
    return f"{pad}{json.dumps(document, ensure_ascii=False)}\n"


def _key(key: str) -> str:
    """A property may have a name that YAML takes for something else."""
    return json.dumps(key) if key.lower() in _YAML_WORDS else key


def _nested(value: Any, indent: int) -> str:
    if isinstance(value, dict | list) and value:
        return "\n" + to_yaml(value, indent + 1)
    return f" {json.dumps(value, ensure_ascii=False)}\n"


def write(directory: Path) -> list[Path]:
    """Write one file a kind into `directory`; returns the paths."""
    paths = []
    for kind in KINDS:
        path = directory / f"{kind.plural}.yaml"
        header = "# Generated by `make crds` from crds/sixfold_api. Do not edit.\n"
        path.write_text(header + to_yaml(crd(kind)))
        paths.append(path)
    return paths


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        for written in write(Path(argument)):
            print(written)
