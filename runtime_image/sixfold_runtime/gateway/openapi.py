"""What the OpenAPI document says of endpoints: they read requests and write answers themselves."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from pydantic.json_schema import models_json_schema

from sixfold_runtime.gateway.headers import CONVERSATION_PARAMETER, PRIORITY_PARAMETER, TIMEOUT_PARAMETER
from sixfold_runtime.gateway.labels import ClassifyAnswer
from sixfold_runtime.gateway.schema import Body, ChatBody, ClassifyBody, CompletionBody
from sixfold_runtime.gateway.stream_encoding import STREAM_COMPRESSION_HEADER
from sixfold_runtime.gateway.tasks import TASK_PARAMETER

_REFERENCE = "#/components/schemas/{model}"
_STREAM_COMPRESSION_PARAMETER: dict[str, Any] = {
    "name": STREAM_COMPRESSION_HEADER,
    "in": "header",
    "required": False,
    "schema": {"type": "string"},
    "description": (
        "Of a streamed answer: `sse-zstd` puts a zstd stream as base64 into the events, `identity` asks for plain text;"
        " absent means that Accept-Encoding decides. The answer's header says which it is."
    ),
}


class Problem(msgspec.Struct, frozen=True):
    """What was wrong and what to do."""

    message: str
    type: str
    param: Annotated[str | None, Meta(description="The field or header that is wrong.")]
    code: Annotated[str, Meta(description="One word for machines.")]


class Error(msgspec.Struct, frozen=True):
    """An answer that is an error, in OpenAI's shape."""

    error: Problem


class CacheErased(msgspec.Struct, frozen=True, kw_only=True):
    """What was kept for a tenant is erased."""

    object: Annotated[str, Meta(description="Always kv_cache.deleted.")] = "kv_cache.deleted"
    blocks: Annotated[int, Meta(description="Blocks of keys and values that were found and removed.")]


def generation_document(body: type[Body]) -> dict[str, Any]:
    """Of an endpoint that generates text."""
    usage = "`usage.prompt_tokens_details.cached_tokens` counts those of the prompt that were found, not computed."
    content = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": {"type": "string"}}}
    return {
        "requestBody": _request_body(body),
        "parameters": [
            TASK_PARAMETER,
            PRIORITY_PARAMETER,
            TIMEOUT_PARAMETER,
            CONVERSATION_PARAMETER,
            _STREAM_COMPRESSION_PARAMETER,
        ],
        "responses": _success(f"OpenAI's answer, or events of it where `stream` is true. {usage}", content),
    }


def classification_document() -> dict[str, Any]:
    return {
        "requestBody": _request_body(ClassifyBody),
        "parameters": [TASK_PARAMETER, PRIORITY_PARAMETER, TIMEOUT_PARAMETER],
        "responses": _success("Labels of each text.", _content(ClassifyAnswer)),
    }


def erasure_document() -> dict[str, Any]:
    return {"responses": _success("All of it is erased.", _content(CacheErased))}


def schemas() -> dict[str, Any]:
    """Those that the documents above refer to."""
    bodies = (ChatBody, CompletionBody, ClassifyBody)
    _, schema = models_json_schema([(body, "validation") for body in bodies], ref_template=_REFERENCE)
    answers = (ClassifyAnswer, CacheErased, Error)
    _, components = msgspec.json.schema_components(answers, ref_template=_REFERENCE.format(model="{name}"))
    definitions: dict[str, Any] = schema["$defs"]
    return definitions | components


def _request_body(body: type[Body]) -> dict[str, Any]:
    return {"required": True, "content": _content(body)}


def _success(description: str, content: dict[str, Any]) -> dict[str, Any]:
    return {"200": {"description": description, "content": content}}


def _content(schema: type) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REFERENCE.format(model=schema.__name__)}}}


ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {"description": "What was wrong and what to do.", "content": _content(Error)}
}
"""Of every endpoint of the API."""
