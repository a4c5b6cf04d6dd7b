"""One request of a caller in this process, from submission to the whole answer."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from sixfold_runtime.engine.engine import Engine
from sixfold_runtime.engine.errors import RequestError
from sixfold_runtime.engine.protocol import Chunk, Done, Generate, TokenLogprob


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
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of each token, with its id; empty unless asked for."""


class _Inbox:
    """The sink of one request."""

    def __init__(self) -> None:
        self.events: SimpleQueue[Chunk | Done] = SimpleQueue()

    def deliver(self, chunks: Sequence[Chunk], dones: Sequence[Done]) -> None:
        for chunk in chunks:
            self.events.put(chunk)
        for done in dones:
            self.events.put(done)


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
        if (failure := event.failure) is not None:
            raise RequestError(failure.status, failure.code, failure.message, failure.retry_after_seconds)
        self.result = Generation(
            text="".join(texts),
            finish_reason=event.finish_reason.value,
            prompt_tokens=event.prompt_tokens,
            completion_tokens=event.completion_tokens,
            drafted=event.drafted_tokens,
            accepted=event.accepted_tokens,
            level=event.level,
            logprobs=tuple(logprobs),
        )
