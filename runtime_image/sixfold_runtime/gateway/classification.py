"""POST /v1/classify."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from sixfold_api.scalars import Task
from sixfold_runtime.engine.protocol import Classify, Done
from sixfold_runtime.gateway.core import Gateway, exchange_of
from sixfold_runtime.gateway.dispatch import Call
from sixfold_runtime.gateway.errors import ApiError, json_response
from sixfold_runtime.gateway.exchange import Exchange
from sixfold_runtime.gateway.merge import merge
from sixfold_runtime.gateway.pool import Choice
from sixfold_runtime.gateway.replies import Usage
from sixfold_runtime.gateway.schema import ClassifyBody, documented
from sixfold_runtime.gateway.sse import while_connected


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/classify", openapi_extra=documented(ClassifyBody))
    async def classify(request: Request) -> Response:
        """Label one text or several, each in one forward pass."""
        body = ClassifyBody.parse(await gateway.admit(request, Task.CLASSIFICATION))
        return json_response(await while_connected(request.receive, _classify(gateway, exchange_of(request), body)))

    return routes


async def _classify(gateway: Gateway, exchange: Exchange, body: ClassifyBody) -> dict[str, Any]:
    texts = body.inputs()
    name = body.model or gateway.settings.policy
    calls = [
        Call(name, Task.CLASSIFICATION, _builder(exchange, index, text), buffered=True)
        for index, text in enumerate(texts)
    ]
    results: dict[int, Done] = {}
    async with aclosing(merge([gateway.dispatcher.events(call, exchange) for call in calls])) as events:
        async for index, item in events:
            if isinstance(item, Done):
                results[index] = item
    usage = Usage(prompt_tokens=sum(done.prompt_tokens for done in results.values()))
    exchange.input_tokens = usage.prompt_tokens
    return {
        "id": "cls-" + secrets.token_hex(12),
        "object": "classification",
        "model": exchange.model,
        "data": [_labelled(index, results[index], body.top_k) for index in range(len(texts))],
        "usage": {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens},
    }


def _labelled(index: int, done: Done, top_k: int | None) -> dict[str, Any]:
    scores = [{"label": score.label, "score": score.score} for score in done.scores[:top_k]]
    return {"index": index, "label": scores[0]["label"], "score": scores[0]["score"], "scores": scores}


def _builder(exchange: Exchange, index: int, text: str) -> Callable[[Choice], Awaitable[Classify]]:
    async def build(choice: Choice) -> Classify:
        context_tokens = choice.model.context_tokens
        ids = await choice.tokenizer.encode(text, context_tokens)
        if len(ids) > context_tokens:
            raise ApiError(
                400,
                "context_length_exceeded",
                f"input.{index} has {len(ids)} tokens or more, this model reads {context_tokens}; shorten it",
                f"input.{index}",
            )
        return Classify(id=secrets.token_hex(12), model=choice.model.name, token_ids=ids, tenant=exchange.tenant)

    return build
