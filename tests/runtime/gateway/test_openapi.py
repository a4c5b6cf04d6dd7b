"""The OpenAPI document says what a running gateway does: its paths, headers, and the shapes of its answers."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.routing import iter_route_contexts
from jsonschema import Draft202012Validator

CHAT = {"model": "assistant", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
COMPLETION = {"model": "assistant", "prompt": "hello", "max_tokens": 2}
CLASSIFY = {"input": ["fine", "not fine"]}
BODIES = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION, "/v1/classify": CLASSIFY}
GENERATION_HEADERS = {"X-Task", "X-Priority", "X-Request-Timeout", "X-Conversation-Id", "X-Stream-Compression"}
HEADERS = {
    "/v1/chat/completions": GENERATION_HEADERS,
    "/v1/completions": GENERATION_HEADERS,
    "/v1/classify": {"X-Task", "X-Priority", "X-Request-Timeout"},
}


@pytest.fixture(scope="module")
def document(gateway: Any) -> dict[str, Any]:
    answer = gateway.client.get("/openapi.json")
    assert answer.status_code == 200
    return dict(answer.json())


def fits(document: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    Draft202012Validator({**schema, "components": document["components"]}).validate(value)


def schema_of(document: dict[str, Any], method: str, path: str, status: str, kind: str = "application/json") -> Any:
    return document["paths"][path][method]["responses"][status]["content"][kind]["schema"]


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    def references(node: Any) -> set[str]:
        if isinstance(node, dict):
            own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
            return own.union(*map(references, node.values()))
        return set().union(*map(references, node)) if isinstance(node, list) else set()

    schemas = document["components"]["schemas"]
    assert references(document) == {f"#/components/schemas/{name}" for name in schemas}, "and nothing is left over"
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)


def test_every_endpoint_of_the_api_is_in_it_with_its_errors(gateway: Any, document: dict[str, Any]) -> None:
    served = {
        (path, method.lower())
        for route in gateway.app.router.routes
        for path, methods in _paths(route)
        if path.startswith("/v1/")
        for method in methods - {"HEAD"}
    }
    described = {(path, method) for path, methods in document["paths"].items() for method in methods}
    assert served == described
    assert ("/v1/kv-cache", "delete") in described
    for path, method in described:
        assert schema_of(document, method, path, "default") == {"$ref": "#/components/schemas/Error"}


def _paths(route: Any) -> list[tuple[str, set[str]]]:
    return [(context.path, set(context.methods or ())) for context in iter_route_contexts([route]) if context.path]


@pytest.mark.parametrize("path", BODIES)
def test_bodies_and_headers(gateway: Any, document: dict[str, Any], path: str) -> None:
    operation = document["paths"][path]["post"]
    fits(document, operation["requestBody"]["content"]["application/json"]["schema"], BODIES[path])
    assert {parameter["name"] for parameter in operation["parameters"]} == HEADERS[path]
    examples = {
        "X-Priority": "low",
        "X-Request-Timeout": "30.5",
        "X-Conversation-Id": "a-1",
        "X-Stream-Compression": "identity",
    }
    for parameter in operation["parameters"]:
        assert parameter["in"] == "header"
        assert parameter["description"]
        name, schema = parameter["name"], parameter["schema"]
        if name in examples:
            fits(document, schema, examples[name])
            answer = gateway.client.post(path, json=BODIES[path], headers={name: examples[name]})
            assert answer.status_code == 200
        if not Draft202012Validator(schema).is_valid("not / this"):
            answer = gateway.client.post(path, json=BODIES[path], headers={name: "not / this"})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("path", BODIES)
def test_answers_and_errors_have_the_shapes(gateway: Any, document: dict[str, Any], path: str) -> None:
    answer = gateway.client.post(path, json=BODIES[path])
    fits(document, schema_of(document, "post", path, "200"), answer.json())
    for body in ({}, [], {**BODIES[path], "surprise": 1}, {**BODIES[path], "model": "nobody"}):
        refused = gateway.client.post(path, json=body)
        assert 400 <= refused.status_code < 500
        fits(document, schema_of(document, "post", path, "default"), refused.json())
    if path != "/v1/classify":
        streamed = gateway.client.post(path, json={**BODIES[path], "stream": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert schema_of(document, "post", path, "200", "text/event-stream") == {"type": "string"}
        assert "cached_tokens" in document["paths"][path]["post"]["responses"]["200"]["description"]


def test_erasure(gateway: Any, document: dict[str, Any]) -> None:
    answer = gateway.client.delete("/v1/kv-cache")
    assert answer.status_code == 200
    fits(document, schema_of(document, "delete", "/v1/kv-cache", "200"), answer.json())
    described = document["components"]["schemas"]["CacheErased"]["properties"]
    assert set(answer.json()) == set(described) == {"object", "blocks"}
