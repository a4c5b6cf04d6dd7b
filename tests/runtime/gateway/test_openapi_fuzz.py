"""schemathesis against a running gateway: requests made from its own document, and what the document excludes."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

OPERATIONS = [
    ("/v1/chat/completions", "POST"),
    ("/v1/completions", "POST"),
    ("/v1/classify", "POST"),
    ("/v1/models", "GET"),
    ("/v1/models/{name}", "GET"),
    ("/v1/kv-cache", "DELETE"),
    ("/v1/stream-dictionary/{sha256}", "GET"),
]
EXAMPLES = 20
"""Of each endpoint; it has to stay within some seconds."""
MOST_TOKENS = 3
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def document(gateway: Any) -> Any:
    return schemathesis.openapi.from_url(f"{gateway.url}/openapi.json", config=SchemathesisConfig(seed=7))


def towards_the_engine(body: Any) -> None:
    """A model that there is, and a short answer: else nothing but 404 would come, or the whole context."""
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        body["model"] = "assistant"
    if isinstance(body, dict) and ("messages" in body or "prompt" in body):
        asked = body.get("max_tokens")
        if asked is None or (isinstance(asked, int) and not isinstance(asked, bool) and asked > MOST_TOKENS):
            body["max_tokens"] = MOST_TOKENS
        body.pop("max_completion_tokens", None)


def test_every_endpoint_is_asked(document: Any) -> None:
    described = {(found.ok().path, found.ok().method.upper()) for found in document.get_all_operations()}
    assert described == set(OPERATIONS)


CASES = [(*operation, GenerationMode.POSITIVE) for operation in OPERATIONS]
CASES += [(*operation, GenerationMode.NEGATIVE) for operation in OPERATIONS[:3]]
"""Only bodies and headers can be wrong."""


@pytest.mark.parametrize(("path", "method", "mode"), CASES)
def test_answers_are_what_the_document_says(document: Any, path: str, method: str, mode: GenerationMode) -> None:
    operation = document[path][method]

    @seed(7)
    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        towards_the_engine(case.body)
        case.call_and_validate(checks=CHECKS, timeout=60)

    check()


def test_after_all_that_it_still_answers(gateway: Any) -> None:
    body = {"model": "assistant", "prompt": "hello", "max_tokens": 2}
    assert gateway.client.post("/v1/completions", json=body).status_code == 200
