"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.responses import Response

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
DEADLINE_EXCEEDED = "deadline_exceeded"


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: HTTP status.
        message: what was wrong and what to do, for the person who reads it.
        code: one word for machines.
        param: the field that is wrong.
        retry_after_seconds: sent as Retry-After, rounded up.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        retry_after_seconds: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.headers = dict(headers or {})
        if retry_after_seconds is not None:
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after_seconds)))

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return json_response(self.body(), self.status, self.headers)


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def bad_request(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    return ApiError(400, code, message, param)


def unavailable(message: str, code: str = "unavailable", retry_after_seconds: float = 1.0) -> ApiError:
    return ApiError(503, code, message, retry_after_seconds=retry_after_seconds)


def deadline_exceeded() -> ApiError:
    """The time that the request had is over."""
    message = "the request took longer than it may (X-Request-Timeout, or the server's own limit): allow it more time"
    return ApiError(504, DEADLINE_EXCEEDED, message)


def internal_error(request_id: str) -> ApiError:
    return ApiError(500, "internal_error", f"internal error; the gateway's log says more under {request_id}")


def from_validation(error: ValidationError) -> ApiError:
    """The first problem of a body that doesn't fit, as a 400."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    problem = problems[0]
    # Parts of the path that name a branch of a union rather than a field say nothing to the caller.
    path = [str(part) for part in problem["loc"] if isinstance(part, int) or ("[" not in part and part != "str")]
    param = ".".join(path) or None
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "json_invalid":
        return bad_request(f"the body is not valid JSON: {message.removeprefix('Invalid JSON: ')}", code="invalid_json")
    return bad_request(f"{param or 'body'}: {message}", param)
