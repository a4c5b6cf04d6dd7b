"""What can be wrong with Redis, in one word for a metric and a sentence for people."""

from __future__ import annotations

import ssl
from typing import Any

from redis import exceptions

_REASONS: tuple[tuple[type[BaseException], str], ...] = (
    (exceptions.TimeoutError, "timeout"),
    (TimeoutError, "timeout"),
    (exceptions.OutOfMemoryError, "full"),
    (exceptions.ReadOnlyError, "readonly"),
    (exceptions.BusyLoadingError, "loading"),
    (exceptions.AuthenticationError, "authentication"),
    (exceptions.NoPermissionError, "permission"),
    (exceptions.AuthorizationError, "permission"),
    (exceptions.ClusterDownError, "cluster"),
    (exceptions.RedisClusterException, "cluster"),
    (exceptions.ConnectionError, "connection"),
    (OSError, "connection"),
)


class RedisFault(Exception):  # noqa: N818 - a fault is what it is
    """Redis can't do it now. `reason` is one word; the message has no secrets."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def as_fault(error: Exception) -> RedisFault:
    """What an error of the client means."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError):
            return RedisFault("tls", f"no TLS connection: {cause.reason or type(cause).__name__}")
        cause = cause.__cause__ or cause.__context__
    reason = next((reason for kind, reason in _REASONS if isinstance(error, kind)), "other")
    return RedisFault(reason, "it doesn't answer in time" if reason == "timeout" else str(error))


def all_done(results: list[Any]) -> list[Any]:
    """The results of a pipeline; raises the first error among them."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def strings(results: list[Any]) -> list[bytes]:
    """As `all_done`, of commands that read strings: a key of another type is no fault of Redis, but b""."""
    return all_done([b"" if is_foreign(result) else result for result in results])


def is_foreign(result: Any) -> bool:
    """Whether a command found something that isn't ours in its place."""
    return isinstance(result, exceptions.ResponseError) and str(result).startswith("WRONGTYPE")
