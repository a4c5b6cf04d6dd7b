"""What one engine has to do for this gateway, and how fast it is: batches that were sent and aren't computed so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from sixfold_runtime.engine.protocol import Chunk, Request
from sixfold_runtime.gateway.pool import Choice
from sixfold_runtime.gateway.session import Event, Session, Stream
from sixfold_runtime.modes.batch_costs import Costs
from sixfold_runtime.modes.batching import Engine

_TOGETHER_SECONDS = 0.001
"""A batch that ends so soon after the one before was computed together with it: what it costs can't be told."""


@dataclass(eq=False)
class _Sent:
    """A batch on its way; `missing` are those of its requests that had no word from the engine."""

    missing: set[str]
    padded_tokens: int
    started_seconds: float
    """When the engine had nothing before it."""
    is_whole: bool = True
    """None of its requests was cancelled or refused: its time tells what a batch costs."""


class EngineLoad:
    """Of one session, for requests of one kind."""

    def __init__(self, clock: Callable[[], float], on_answer: Callable[[], None]) -> None:
        """`on_answer` is called when an engine has computed something, or lost it."""
        self._clock = clock
        self._on_answer = on_answer
        self._sent: list[_Sent] = []
        self._costs = Costs()

    def send(self, session: Session, requests: Sequence[Request]) -> list[Stream]:
        """One batch, computed in this order. Raises EngineLostError."""
        longest = max(len(request.token_ids) for request in requests)
        sent = _Sent({request.id for request in requests}, longest * len(requests), self._clock())
        streams = session.submit(requests, partial(self._answered, sent))
        self._sent.append(sent)
        return streams

    def engine(self, choice: Choice) -> Engine[Session]:
        """As the decision sees it."""
        return Engine(
            choice.session,
            batches=len(self._sent),
            free_at_seconds=self._free_at_seconds(),
            requests=choice.session.in_flight,
            overhead_tokens=self._costs.overhead_tokens,
            token_seconds=self._costs.token_seconds,
            last_used=choice.session.last_used,
            is_last_choice=choice.model.swapping,
        )

    def _free_at_seconds(self) -> float | None:
        durations = [self._costs.seconds(sent.padded_tokens) for sent in self._sent]
        known = [seconds for seconds in durations if seconds is not None]
        return self._sent[0].started_seconds + sum(known) if self._sent and len(known) == len(durations) else None

    def _answered(self, sent: _Sent, request_id: str, event: Event | None) -> None:
        """The first word on a request: a prompt was prefilled, a text labelled; or it won't be."""
        is_computed = isinstance(event, Chunk) or (event is not None and event.failure is None)
        sent.is_whole &= is_computed
        sent.missing.discard(request_id)
        if not sent.missing:
            now = self._clock()
            seconds = now - sent.started_seconds
            if sent is self._sent[0] and sent.is_whole and seconds > _TOGETHER_SECONDS:
                self._costs.observe(sent.padded_tokens, seconds)
            self._sent.remove(sent)
            if self._sent:
                self._sent[0].started_seconds = max(now, self._sent[0].started_seconds)
        self._on_answer()
