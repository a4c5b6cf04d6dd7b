"""Requests of a caller in this process, from submission to the whole answer."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from queue import SimpleQueue
from typing import Self

from sixfold_runtime.engine.engine import Engine
from sixfold_runtime.engine.errors import RequestError
from sixfold_runtime.engine.protocol import Chunk, Classify, Done, Failure, Generate, LabelScore, TokenLogprob

_IN_FLIGHT = 64
"""Texts of one call that the engine is given at a time: enough for a batch, and room for other callers."""


@dataclass(frozen=True)
class Generation:
    """An answer, and what it took."""

    text: str
    finish_reason: str
    """`stop` or `length`."""
    prompt_tokens: int
    completion_tokens: int
    drafted: int
    """Tokens that the draft model proposed."""
    accepted: int
    """Tokens of the answer that were among them."""
    level: int
    cached_tokens: int = 0
    """Tokens of the prompt whose keys and values were found instead of computed."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of each token, with its id; empty unless asked for."""


@dataclass(frozen=True)
class TokenLabel:
    """A word of a text, and its label: that of its first token."""

    text: str
    start: int
    """Of its first character in the text."""
    end: int
    label: str
    score: float


@dataclass(frozen=True)
class Classification:
    """A text's label, and what it took. Where tokens are labelled, only `tokens` has labels."""

    label: str
    score: float
    scores: tuple[LabelScore, ...]
    """Best first; of the `top_k` best, or of all."""
    tokens: tuple[TokenLabel, ...]
    layers: int | None
    """Layers that the text ran through; None where the model runs as a whole."""
    exited: bool
    """Whether it left before the last one."""
    task: str
    """The task slice; "" is the model's own head."""
    prompt_tokens: int
    level: int

    @classmethod
    def of(cls, done: Done, task: str, tokens: Sequence[TokenLabel]) -> Self:
        best = done.scores[0] if done.scores else LabelScore("", 0.0)
        return cls(
            label=best.label,
            score=best.score,
            scores=tuple(done.scores),
            tokens=tuple(tokens),
            layers=done.layers,
            exited=done.exited,
            task=task,
            prompt_tokens=done.prompt_tokens,
            level=done.level,
        )


class _Inbox:
    """The sink of one call."""

    def __init__(self) -> None:
        self.events: SimpleQueue[Chunk | Done] = SimpleQueue()

    def deliver(self, chunks: Sequence[Chunk], dones: Sequence[Done]) -> None:
        for chunk in chunks:
            self.events.put(chunk)
        for done in dones:
            self.events.put(done)


def classified(engine: Engine, requests: Sequence[Classify]) -> list[Done]:
    """The results of requests with different ids, in their order.

    Raises RequestError: one of them can't be served; the others are cancelled.
    """
    inbox, waiting, dones = _Inbox(), iter(requests), dict[str, Done]()
    engine.submit(inbox, islice(waiting, _IN_FLIGHT))
    try:
        while len(dones) < len(requests):
            event = inbox.events.get()
            assert isinstance(event, Done), "a classification has no chunks"
            if event.failure is not None:
                raise _error(event.failure)
            dones[event.id] = event
            engine.submit(inbox, islice(waiting, 1))
    finally:
        engine.drop(inbox)
    return [dones[request.id] for request in requests]


def _error(failure: Failure) -> RequestError:
    return RequestError(failure.status, failure.code, failure.message, failure.retry_after_seconds)


class GenerationStream:
    """The pieces of an answer's text as they come. To stop before its end, `close()` it.

    Attributes:
        result: the whole answer; None before the last piece.
    """

    def __init__(self, engine: Engine, request: Generate) -> None:
        self.result: Generation | None = None
        self._pieces = self._read(engine, request)

    def __iter__(self) -> Iterator[str]:
        """Raises RequestError: the request can't be served, or not any further."""
        return self._pieces

    def close(self) -> None:
        """Stop the generation."""
        self._pieces.close()

    def _read(self, engine: Engine, request: Generate) -> Generator[str, None, None]:
        inbox, texts, logprobs = _Inbox(), [""], list[TokenLogprob]()
        engine.submit(inbox, [request])
        try:
            while isinstance(event := inbox.events.get(), Chunk):
                texts.append(event.text)
                logprobs += event.logprobs
                if event.text:
                    yield event.text
        finally:
            engine.drop(inbox)  # an ended request is none any more
        if event.failure is not None:
            raise _error(event.failure)
        self.result = Generation(
            text="".join(texts),
            finish_reason=event.finish_reason.value,
            prompt_tokens=event.prompt_tokens,
            completion_tokens=event.completion_tokens,
            drafted=event.drafted_tokens,
            accepted=event.accepted_tokens,
            level=event.level,
            cached_tokens=event.cached_tokens,
            logprobs=tuple(logprobs),
        )
