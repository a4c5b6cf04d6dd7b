"""Task slices as clients name them: the header X-Task, or the field `task` of a body."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from starlette.datastructures import Headers

from sixfold_runtime.gateway.errors import ApiError, bad_request

TASK_HEADER = "X-Task"
TASK_PARAMETER: dict[str, Any] = {
    "name": TASK_HEADER,
    "in": "header",
    "required": False,
    "schema": {"type": "string"},
    "description": "The task slice to compute with, as the body's `task`. GET /v1/models lists those of each model.",
}
MAX_NAME_SHOWN = 100


def asked_task(headers: Headers, in_body: str | None) -> str:
    """The task that a request asks for; "" for none. Raises ApiError (400) where header and body name two."""
    names = {name.strip() for name in headers.getlist(TASK_HEADER)} | {in_body or ""}
    names.discard("")
    if len(names) > 1:
        raise bad_request(f"{TASK_HEADER} and task name different tasks: send one of them", "task")
    return names.pop() if names else ""


def unknown_task(name: str, known: Collection[str]) -> ApiError:
    listed = f"there are: {', '.join(known)}" if known else f"this model has no tasks, leave {TASK_HEADER} out"
    return ApiError(404, "task_not_found", f"there is no task '{name[:MAX_NAME_SHOWN]}'; {listed}", "task")


def task_required(known: Collection[str]) -> ApiError:
    message = f"this model has no head of its own: choose a task with {TASK_HEADER}; there are: {', '.join(known)}"
    return bad_request(message, "task", code="task_required")
