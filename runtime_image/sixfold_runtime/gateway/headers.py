"""What a request asks for in its headers: how urgent it is, how long it may take, which conversation it continues."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers

from sixfold_api.gateway import Priority
from sixfold_api.runtime_config import RequestLimits, TenantConfig
from sixfold_runtime.gateway.errors import ApiError, bad_request

PRIORITY_HEADER = "X-Priority"
TIMEOUT_HEADER = "X-Request-Timeout"
CONVERSATION_HEADER = "X-Conversation-Id"
_PRIORITIES = {priority.lower(): priority for priority in Priority}
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?", re.ASCII)
_CONVERSATION = re.compile(r"[A-Za-z0-9._:-]{1,128}", re.ASCII)

PRIORITY_PARAMETER: dict[str, Any] = {
    "name": PRIORITY_HEADER,
    "in": "header",
    "required": False,
    "schema": {"type": "string", "enum": list(_PRIORITIES)},
    "description": "How urgent the request is while others wait; at most what the key may ask for.",
}
TIMEOUT_PARAMETER: dict[str, Any] = {
    "name": TIMEOUT_HEADER,
    "in": "header",
    "required": False,
    "schema": {"type": "string", "pattern": f"^{_SECONDS.pattern}$"},
    "description": "Seconds that the request may take in all; the server's own limit holds where it is less.",
}
CONVERSATION_PARAMETER: dict[str, Any] = {
    "name": CONVERSATION_HEADER,
    "in": "header",
    "required": False,
    "schema": {"type": "string", "pattern": f"^{_CONVERSATION.pattern}$"},
    "description": "Any name for the conversation: a hint where keys and values of its earlier turns may be found.",
}


@dataclass(frozen=True)
class Terms:
    """What a request may have.

    Attributes:
        timeout_seconds: how long it may take, from its arrival to the last byte of the answer.
        is_timeout_asked: the client itself asked for that limit.
        conversation: what the client calls the conversation; "" for none. Never logged.
    """

    priority: Priority
    timeout_seconds: float
    is_timeout_asked: bool = False
    conversation: str = ""


def asked_terms(headers: Headers, tenant: str, tenants: Sequence[TenantConfig], limits: RequestLimits) -> Terms:
    """The terms of a request of this tenant.

    Raises:
        ApiError: a header says something that means nothing (400), or more than the tenant may ask for (403).
    """
    seconds = _asked_seconds(headers)
    is_timeout_asked = seconds is not None and seconds < limits.timeout_seconds
    return Terms(
        _priority(headers, next((entry for entry in tenants if entry.name == tenant), None)),
        seconds if seconds is not None and is_timeout_asked else limits.timeout_seconds,
        is_timeout_asked,
        _conversation(headers),
    )


def _priority(headers: Headers, tenant: TenantConfig | None) -> Priority:
    usual, most = (Priority.NORMAL, Priority.NORMAL) if tenant is None else (tenant.priority, tenant.max_priority)
    name = _only(headers, PRIORITY_HEADER)
    if name is None:
        return usual
    asked = _PRIORITIES.get(name.lower())
    if asked is None:
        raise bad_request(f"{PRIORITY_HEADER} should be one of {', '.join(_PRIORITIES)}", PRIORITY_HEADER)
    if asked.rank > most.rank:
        message = f"{PRIORITY_HEADER} may be at most {most.lower()} with this key; ask for less or leave it out"
        raise ApiError(403, "priority_not_allowed", message, PRIORITY_HEADER)
    return asked


def _asked_seconds(headers: Headers) -> float | None:
    text = _only(headers, TIMEOUT_HEADER)
    if text is None:
        return None
    if not _SECONDS.fullmatch(text) or not float(text):
        raise bad_request(f"{TIMEOUT_HEADER} should be a number of seconds above 0, such as 2.5", TIMEOUT_HEADER)
    return float(text)


def _conversation(headers: Headers) -> str:
    name = _only(headers, CONVERSATION_HEADER)
    if name is not None and not _CONVERSATION.fullmatch(name):
        message = f"{CONVERSATION_HEADER} takes 1 to 128 letters, digits and the characters . _ : -"
        raise bad_request(message, CONVERSATION_HEADER)
    return name or ""


def _only(headers: Headers, name: str) -> str | None:
    """The header's value, without spaces around it; None where it isn't there. Raises ApiError where two differ."""
    values = {value.strip() for value in headers.getlist(name)}
    if len(values) > 1:
        raise bad_request(f"{name} is there more than once, with different values: send it once", name)
    return values.pop() if values else None
