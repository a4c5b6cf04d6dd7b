"""Errors of the engine that a person reads."""

from __future__ import annotations


class ModelLoadError(Exception):
    """A model folder that can't be served: what is wrong, in which file, and what to do."""


class RequestError(Exception):
    """A request that can't be served. Becomes a Done with a Failure.

    Attributes:
        status: the HTTP status that the gateway answers with.
        code: a word for machines.
        retry_after_seconds: when another try may do; None where nobody knows.
    """

    def __init__(self, status: int, code: str, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.retry_after_seconds = retry_after_seconds
