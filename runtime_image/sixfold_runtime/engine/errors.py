"""Errors of the engine that a person reads."""

from __future__ import annotations


class ModelLoadError(Exception):
    """A model folder that can't be served: what is wrong, in which file, and what to do."""


class RequestError(Exception):
    """A request that can't be served. Becomes a Done with a Failure.

    Attributes:
        status: the HTTP status that the gateway answers with.
        code: a word for machines.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
