"""The queue in front of the engines: `modes.batching` decides, this carries it out.

While the mode is off nothing waits here. All of it runs on one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry

from sixfold_api.runtime_config import BatchingConfig, RuntimeConfig
from sixfold_runtime.config import ConfigStore
from sixfold_runtime.engine.protocol import ModelInfo, Request
from sixfold_runtime.gateway.affinity import nearest
from sixfold_runtime.gateway.batch_metrics import BatchMetrics, Outcome
from sixfold_runtime.gateway.engine_load import EngineLoad
from sixfold_runtime.gateway.errors import ApiError, deadline_exceeded, unavailable
from sixfold_runtime.gateway.pool import Choice, Pool
from sixfold_runtime.gateway.session import Session, Stream
from sixfold_runtime.modes.batching import Batch, Engine, Waiting, at_once, plan
from sixfold_runtime.modes.fair_shares import Shares, displaced

_MOST_RETRY_SECONDS = 30.0


@dataclass(frozen=True)
class Group:
    """What the requests of a batch have in common: an engine that can compute one of them can compute all."""

    model: str
    tokenizer: str
    context_tokens: int
    slice: str

    @classmethod
    def of(cls, model: ModelInfo, slice_name: str) -> Group:
        return cls(model.name, model.tokenizer, model.context_tokens, slice_name)

    def is_served_by(self, model: ModelInfo) -> bool:
        has_slice = not self.slice or any(info.name == self.slice for info in model.tasks)
        return has_slice and Group.of(model, self.slice) == self


@dataclass(frozen=True)
class Placed:
    """A request that an engine has. Whoever gets this closes the stream."""

    session: Session
    stream: Stream


@dataclass(eq=False)
class Ticket:
    """A request that wants to be sent.

    Attributes:
        waiting: as the decision sees it.
        affinity: the same for requests that find each other's keys and values; None where no engine is better.
    """

    request: Request
    group: Group
    waiting: Waiting[str, Session]
    affinity: bytes | None = None
    placed: asyncio.Future[Placed | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    pods: tuple[str, ...] = ()
    """That `waiting.preferred` was chosen from."""


class Batcher:
    """The requests that wait in this gateway."""

    def __init__(
        self,
        pool: Pool,
        config: ConfigStore,
        registry: CollectorRegistry,
        where: tuple[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`where` is namespace and policy, for the metrics in `registry`."""
        self._pool = pool
        self._config = config
        self._clock = clock
        self._metrics = BatchMetrics(registry, where, lambda: len(self._tickets))
        self._tickets: dict[str, Ticket] = {}
        """By request id, in the order in which they came."""
        self._loads: WeakKeyDictionary[Session, dict[Group, EngineLoad]] = WeakKeyDictionary()
        self._shares = Shares()
        self._changed = asyncio.Event()
        pool.subscribe(self._changed.set)

    async def run(self) -> None:
        """Send batches until cancelled."""
        loop = asyncio.get_running_loop()

        def on_config(_: RuntimeConfig) -> None:
            loop.call_soon_threadsafe(self._changed.set)

        self._config.subscribe(on_config)
        while True:
            self._changed.clear()
            wake = self._step()
            with suppress(TimeoutError):
                async with asyncio.timeout(None if wake is None else max(0.0, wake - self._clock())):
                    await self._changed.wait()

    async def place(self, ticket: Ticket) -> Placed | None:
        """Wait until an engine has the request; None where those that could take it are gone.

        Raises:
            ApiError: the queue is full (429, 503), or the deadline is over (504).
        """
        config = self._batching
        if config is None:
            return self._place_at_once(ticket)
        self._make_room(ticket, config)
        self._tickets[ticket.request.id] = ticket
        self._changed.set()
        try:
            return await ticket.placed
        except asyncio.CancelledError:
            self._forget(ticket)
            raise

    @property
    def _batching(self) -> BatchingConfig | None:
        return self._config.current.stable.batching

    # -- sending

    def _step(self) -> float | None:
        """Send what is to be sent now. Returns when to look again if nothing happens before."""
        config = self._batching
        queues: dict[Group, list[Ticket]] = {}
        for ticket in self._tickets.values():
            if not ticket.placed.done():  # else the client has just left
                queues.setdefault(ticket.group, []).append(ticket)
        self._shares.follow({ticket.waiting.flow for queue in queues.values() for ticket in queue})
        wakes = [self._step_group(group, queue, config) for group, queue in queues.items()]
        return min((wake for wake in wakes if wake is not None), default=None)

    def _step_group(self, group: Group, queue: list[Ticket], config: BatchingConfig | None) -> float | None:
        choices = self._choices(group)
        sessions = set(choices)
        queue = [ticket for ticket in queue if self._has_engine(ticket, sessions)]
        if config is None:  # it was on when they came
            for ticket in queue:
                self._leave(ticket, Outcome.SENT)
                ticket.placed.set_result(self._place_at_once(ticket))
            return None
        self._prefer(queue, choices.values())
        engines = self._engines(group, choices.values())
        decided = plan([ticket.waiting for ticket in queue], engines, self._clock(), config, self._shares)
        for request_id in decided.expired:
            ticket = self._tickets[request_id]
            self._leave(ticket, Outcome.EXPIRED)
            ticket.placed.set_exception(deadline_exceeded())
        for batch in decided.batches:
            self._send(group, batch)
        return decided.wake_seconds

    def _send(self, group: Group, batch: Batch[str, Session]) -> None:
        tickets = [self._tickets[request_id] for request_id in batch.keys]
        session, now = batch.engine, self._clock()
        streams = self._load(session, group).send(session, [ticket.request for ticket in tickets])
        self._changed.set()  # how long the batch takes is known only now: what may go behind it is decided anew
        self._metrics.batch(batch)
        for ticket, stream in zip(tickets, streams, strict=True):
            waiting = ticket.waiting
            self._shares.charge(waiting.flow, batch.padded_tokens // len(tickets))
            self._metrics.waited(waiting.priority, now - waiting.arrived_seconds)
            self._leave(ticket, Outcome.SENT)
            ticket.placed.set_result(Placed(session, stream))

    def _place_at_once(self, ticket: Ticket) -> Placed | None:
        choices = self._choices(ticket.group)
        self._prefer([ticket], choices.values())
        engine = at_once(ticket.waiting, self._engines(ticket.group, choices.values()))
        if engine is None:
            return None
        [stream] = self._load(engine, ticket.group).send(engine, [ticket.request])
        return Placed(engine, stream)

    # -- engines

    def _choices(self, group: Group) -> dict[Session, Choice]:
        return {choice.session: choice for choice in self._pool.choices(group.is_served_by)}

    def _engines(self, group: Group, choices: Iterable[Choice]) -> list[Engine[Session]]:
        return [self._load(choice.session, group).engine(choice) for choice in choices]

    def _load(self, session: Session, group: Group) -> EngineLoad:
        loads = self._loads.setdefault(session, {})
        if group not in loads:
            loads[group] = EngineLoad(self._clock, self._changed.set)
        return loads[group]

    def _prefer(self, queue: Iterable[Ticket], choices: Collection[Choice]) -> None:
        """Find out which engine each request had best go to, where that has changed."""
        sessions = {choice.pod: choice.session for choice in choices if choice.model.kv_block_tokens}
        pods = tuple(sessions)
        for ticket in queue:
            if ticket.affinity is not None and ticket.pods != pods:
                pod = nearest(ticket.affinity, pods)
                ticket.waiting = replace(ticket.waiting, preferred=None if pod is None else sessions[pod])
                ticket.pods = pods

    def _has_engine(self, ticket: Ticket, sessions: set[Session]) -> bool:
        """Whether a request can be taken; else it goes back to where it came from."""
        if sessions and not sessions <= set(ticket.waiting.excluded):
            return True
        self._leave(ticket, Outcome.NO_ENGINE)
        ticket.placed.set_result(None)
        return False

    # -- the queue

    def _make_room(self, ticket: Ticket, config: BatchingConfig) -> None:
        """Raises ApiError: the queue is full, and others have the better claim to it."""
        if len(self._tickets) < config.max_queued_requests:
            return
        tickets = list(self._tickets.values())
        index = displaced([waiting.waiting.flow for waiting in tickets], ticket.waiting.flow)
        if index is None:
            self._metrics.left(Outcome.REFUSED)
            is_shared = any(other.waiting.tenant != ticket.waiting.tenant for other in tickets)
            raise self._overloaded(ticket.group, is_shared)
        other = tickets[index]
        self._leave(other, Outcome.DISPLACED)
        if not other.placed.done():
            other.placed.set_exception(self._overloaded(other.group, other.waiting.tenant != ticket.waiting.tenant))

    def _overloaded(self, group: Group, is_shared: bool) -> ApiError:
        """429 where other tenants wait too and this one has had its share, 503 where all are its own."""
        retry_seconds = self._backlog_seconds(group)
        if is_shared:
            message = "the queue is full, and this key's requests have their share of it; try again in a moment"
            return ApiError(429, "queue_share_exceeded", message, retry_after_seconds=retry_seconds)
        message = "as many requests wait here as may; try again in a moment"
        return unavailable(message, "gateway_overloaded", retry_seconds)

    def _backlog_seconds(self, group: Group) -> float:
        """About how long the engines take for what waits."""
        tokens = sum(ticket.waiting.tokens for ticket in self._tickets.values() if ticket.group == group)
        engines = self._engines(group, self._choices(group).values())
        seconds = [tokens * engine.token_seconds / len(engines) for engine in engines]
        return min(_MOST_RETRY_SECONDS, max(1.0, *seconds)) if seconds else 1.0

    def _forget(self, ticket: Ticket) -> None:
        """The client left: before its request was sent, or in the very moment."""
        if self._tickets.get(ticket.request.id) is ticket:
            self._leave(ticket, Outcome.LEFT)
            self._changed.set()
        elif ticket.placed.done() and not ticket.placed.cancelled() and ticket.placed.exception() is None:
            placed = ticket.placed.result()
            if placed is not None:
                placed.stream.close()

    def _leave(self, ticket: Ticket, outcome: Outcome) -> None:
        self._metrics.left(outcome)
        del self._tickets[ticket.request.id]
