"""What passes between the engine's thread and whoever submits requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from sixfold_api.modes import Mode
from sixfold_api.runtime_config import CANARY, STABLE, EffectiveConfig, RuntimeConfig
from sixfold_runtime.engine.errors import RequestError
from sixfold_runtime.engine.protocol import Chunk, Done, Failure, FinishReason, Sampling

CurrentConfig = Callable[[], RuntimeConfig]
Wake = Callable[[], None]


def arms_in_use(config: RuntimeConfig) -> tuple[EffectiveConfig, ...]:
    """What requests that begin now may obey; the stable arm's first."""
    return (config.stable,) if config.canary is None else (config.stable, config.canary.config)


def arm_in_use(config: RuntimeConfig, asked: str) -> str:
    """The arm that a request which begins now runs in: a canary that has just ended is stable, and so is any other
    word of a gateway, so that none of it gets into a label."""
    return CANARY if asked == CANARY and config.canary is not None else STABLE


class Sink(Protocol):
    """Where results go: a gateway's connection, or a caller in this process. Compared by identity."""

    def deliver(self, chunks: Sequence[Chunk], dones: Sequence[Done]) -> None:
        """Take the results of a step. Called in the engine's thread or the submitter's: returns at once."""


Key = tuple[Sink, str]
"""A request: ids are unique within a sink only."""

Output = tuple[Sink, Chunk | Done]


@dataclass(frozen=True)
class RunnerNotes:
    """What a runner can't do as the configuration says, and why."""

    unsupported: dict[Mode, str] = field(default_factory=dict)
    draft_shortened: str = ""


class Runner(Protocol):
    """Serves one model. Used from the engine's thread; the counts may be read from any."""

    @property
    def context_tokens(self) -> int: ...

    @property
    def running(self) -> int: ...

    @property
    def waiting(self) -> int: ...

    @property
    def kv_bytes(self) -> int: ...

    @property
    def can_step(self) -> bool:
        """Whether a step would do something now: requests that wait for weights or task slices don't count."""

    def adapt(self) -> bool:
        """Follow the configuration, and take what was loaded meanwhile; after every step, and whenever something
        happened. Returns whether operator and gateways have to be told of a change."""

    def close(self) -> None:
        """End threads of its own; nothing is computed after that."""

    def submit(self, key: Key, request: Any) -> None:
        """Queue a Generate or a Classify, whichever the runner is for. Raises RequestError; then nothing was queued."""

    def cancel(self, key: Key) -> None:
        """Forget a request; an unknown one is ignored."""

    def step(self) -> list[Output]:
        """Compute one step. Called only while `can_step`; never raises for a request's sake."""


def failed(
    request_id: str, level: int, error: RequestError, prompt_tokens: int = 0, completion_tokens: int = 0
) -> Done:
    """The end of a request that can't be served, or not any further."""
    return Done(
        id=request_id,
        finish_reason=FinishReason.ERROR,
        level=level,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        failure=Failure(error.status, error.code, error.message, error.retry_after_seconds),
    )


def check_prompt(token_ids: list[int], vocabulary_tokens: int) -> None:
    """Refuse what would fail inside the model.

    Raises:
        RequestError: no token, or an id outside the vocabulary.
    """
    if not token_ids:
        raise RequestError(400, "empty_prompt", "the prompt has no tokens")
    if min(token_ids) < 0 or max(token_ids) >= vocabulary_tokens:
        raise RequestError(400, "invalid_token_ids", f"token ids must be between 0 and {vocabulary_tokens - 1}")


def check_context(prompt_tokens: int, context_tokens: int) -> None:
    """Refuse a prompt that leaves no room for an answer. Raises RequestError."""
    if prompt_tokens >= context_tokens:
        raise RequestError(
            400,
            "context_length_exceeded",
            f"the prompt has {prompt_tokens} tokens; with at least one to generate, "
            f"the context of {context_tokens} allows {context_tokens - 1}",
        )


def check_sampling(sampling: Sampling) -> None:
    """Refuse settings that have no meaning. Raises RequestError."""
    if sampling.max_tokens < 1:
        raise RequestError(400, "invalid_max_tokens", f"max_tokens is {sampling.max_tokens}, must be at least 1")
    if not 0 <= sampling.temperature < math.inf:
        raise RequestError(400, "invalid_temperature", f"temperature is {sampling.temperature}, must be 0 or more")
    if not 0 < sampling.top_p <= 1:
        raise RequestError(400, "invalid_top_p", f"top_p is {sampling.top_p}, must be above 0 and at most 1")
    if sampling.top_k < 0:
        raise RequestError(400, "invalid_top_k", f"top_k is {sampling.top_k}, must be 0 (all tokens) or more")
    if not 0 < sampling.repetition_penalty < math.inf:
        raise RequestError(
            400, "invalid_repetition_penalty", f"repetition_penalty is {sampling.repetition_penalty}, must be above 0"
        )
    for name in ("frequency_penalty", "presence_penalty"):
        penalty: float = getattr(sampling, name)
        if not math.isfinite(penalty):
            raise RequestError(400, f"invalid_{name}", f"{name} is {penalty}, must be a number")
    if sampling.logprobs is not None and sampling.logprobs < 0:
        raise RequestError(400, "invalid_logprobs", f"logprobs is {sampling.logprobs}, must be 0 or more")


def overloaded(waiting: int) -> RequestError:
    return RequestError(503, "engine_overloaded", f"{waiting} requests are waiting already: try again later")


def engine_error() -> RequestError:
    return RequestError(500, "engine_error", "the engine failed on this request; its log says why")


def out_of_memory() -> RequestError:
    return RequestError(503, "out_of_memory", "the engine ran out of memory for this request")


def failure_of(error: Exception) -> RequestError:
    """What the requests of a forward are told that raised this."""
    return out_of_memory() if isinstance(error, torch.OutOfMemoryError) else engine_error()


def non_finite() -> RequestError:
    return RequestError(500, "non_finite_logits", "the model computed NaN or infinite values for this request")
