"""What every model of the API shares: camelCase on the wire, strictness, and rules that hold on both sides.

A `Rule` is written once. It becomes CEL in the CRD, where kube-apiserver applies it, and a pydantic validator,
so that files served without a cluster meet the same error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema


@dataclass(frozen=True)
class Rule:
    """One cross-field rule.

    Attributes:
        cel: the rule for kube-apiserver, over `self` (and `oldSelf` for a transition rule).
        message: what the person reads: what is wrong and what to do.
        holds: the same rule in Python; None for transition rules, which only the apiserver can judge.
    """

    cel: str
    message: str
    holds: Callable[[Any], bool] | None = None


class ApiModel(BaseModel):
    """Strict, immutable and camelCase: an unknown field is an error, never ignored."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )
    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        """`engine:` without a value means an absent block, as it does for kube-apiserver; unknown fields stay."""
        if not isinstance(data, dict):
            return data
        known = {field.alias for field in cls.model_fields.values()}
        return {key: value for key, value in data.items() if value is not None or key not in known}

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        for rule in self.rules:
            if rule.holds is not None and not rule.holds(self):
                raise ValueError(rule.message)
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core))
        if cls.rules:
            schema["x-kubernetes-validations"] = [{"rule": rule.cel, "message": rule.message} for rule in cls.rules]
        return schema

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready dict in wire names; absent optionals are left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class SpecModel(ApiModel):
    """The spec of a kind, with all blocks in it."""

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """As pydantic's, but by wire names only: `rollback_level` in a file is an unknown field, as in a cluster."""
        return super().model_validate(obj, **{"by_name": False, **options})


class StatusModel(ApiModel):
    """Read back leniently: a status written by a newer operator must not break an older one."""

    model_config = ConfigDict(extra="ignore")
