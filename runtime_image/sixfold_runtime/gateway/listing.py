"""GET /v1/models: the policy's name as the stable alias, the variants behind it, and the tasks of each."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from sixfold_api.scalars import Task
from sixfold_runtime.gateway.core import Gateway
from sixfold_runtime.gateway.errors import ApiError, json_response


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter()

    def model(name: str) -> dict[str, Any]:
        entry = {"id": name, "object": "model", "created": gateway.started_unix_seconds, "owned_by": "sixfold"}
        slices = [
            {"name": info.name, "task": info.task, "labels": info.labels}
            for task in (Task.GENERATION, Task.CLASSIFICATION)
            for info in gateway.pool.tasks(name, task).values()
        ]
        return entry | {"tasks": slices}

    def names() -> list[str]:
        variants = sorted(known.name for known in gateway.pool.models)
        return list(dict.fromkeys([gateway.settings.policy, *variants])) if variants else []

    @routes.get("/v1/models")
    async def models(request: Request) -> Response:
        """What can be asked for as `model`."""
        gateway.authenticate(request)
        return json_response({"object": "list", "data": [model(name) for name in names()]})

    @routes.get("/v1/models/{name}")
    async def one_model(request: Request, name: str) -> Response:
        """One of them."""
        gateway.authenticate(request)
        if name not in names():
            raise ApiError(404, "model_not_found", f"the model '{name[:100]}' does not exist", "model")
        return json_response(model(name))

    return routes
