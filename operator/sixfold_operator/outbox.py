"""Tells sinks about tickets in the background: a queue a sink, with back-off, and never in the control loop's way."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import aiohttp
from prometheus_client import Counter

from sixfold_api.ticket import OptimizationTicketStatus, Phase, SinkState, SinkStatus
from sixfold_operator import sink_github, sink_jira, sink_webhook
from sixfold_operator.control.tickets import Ticket
from sixfold_operator.keyed_queue import Backoff, KeyedQueue, Workers
from sixfold_operator.reconcile.context import Clock
from sixfold_operator.sinks import Message, SinkConfig, SinkError, SinksFile, SinkType

log = logging.getLogger(__name__)

DELIVERIES = Counter("sixfold_operator_sink_deliveries", "Tries to tell a sink about a ticket", ["sink", "result"])
BACKOFF = Backoff(first_seconds=1.0, longest_seconds=600.0)
MESSAGE_CHARACTERS = 512
_TELL = {SinkType.WEBHOOK: sink_webhook.tell, SinkType.GITHUB: sink_github.tell, SinkType.JIRA: sink_jira.tell}
Place = tuple[str, str, str]
"""Namespace and name of a ticket, and when it was first seen: one that was deleted may come again."""


class Outbox:
    """What `status.sinks` of tickets says is what was told: it is enough to go on after a restart.

    Args:
        wake: called with namespace and policy when there is something new for a ticket's status.
        jitter: between 0 and 1, so that what failed together isn't tried again together.
        may_tell: asked right before each delivery.
        cluster: name of the cluster, for sinks that several share.
    """

    def __init__(
        self,
        file: SinksFile,
        wake: Callable[[str, str], None],
        clock: Clock | None = None,
        backoff: Backoff = BACKOFF,
        jitter: Callable[[], float] = random.random,
        may_tell: Callable[[], bool] = lambda: True,
        cluster: str = "",
    ) -> None:
        self._may_tell, self._cluster = may_tell, cluster
        self._file, self._wake, self._clock = file, wake, clock or Clock()
        self._backoff, self._jitter = backoff, jitter
        self._session: aiohttp.ClientSession | None = None
        self._lanes: dict[str, tuple[Workers[Place], asyncio.Task[None]]] = {}
        self._waiting: dict[tuple[str, Place], Message] = {}
        self._failures: dict[tuple[str, Place], int] = {}
        self._paused_until: dict[str, float] = {}
        self._results: dict[tuple[str, Place], SinkStatus] = {}

    async def stop(self) -> None:
        for _, task in self._lanes.values():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        if self._session is not None:
            await self._session.close()

    def told(self, namespace: str, ticket: Ticket, names: Sequence[str]) -> OptimizationTicketStatus:
        """The ticket's status with what its sinks know, once it is written; what they don't know is on its way.

        Args:
            names: spec.tickets.sinks.
        """
        known = {entry.name: entry for entry in ticket.status.sinks}
        configured = self._file.current()
        place = (namespace, ticket.name, ticket.status.first_seen or "")
        sinks = []
        for name in sorted(names):
            entry = (
                self._results.get((name, place)) or known.get(name) or SinkStatus(name=name, state=SinkState.PENDING)
            )
            if name not in configured:
                message = f"the chart's values have no sink {name}"
                entry = entry.model_copy(update={"state": SinkState.FAILED, "message": message})
            elif entry.phase is not ticket.status.phase:
                if entry.state is SinkState.DELIVERED:
                    entry = entry.model_copy(update={"state": SinkState.PENDING, "message": ""})
                news = Message(namespace, ticket.name, ticket.spec, ticket.status, entry.reference, self._cluster)
                self._send(name, place, news)
            sinks.append(entry)
        return ticket.status.model_copy(update={"sinks": sinks})

    def forget(self, namespace: str, ticket: str) -> None:
        """A ticket that was deleted."""
        self._results = {key: value for key, value in self._results.items() if key[1][:2] != (namespace, ticket)}
        self._waiting = {key: value for key, value in self._waiting.items() if key[1][:2] != (namespace, ticket)}
        self._failures = {key: value for key, value in self._failures.items() if key[1][:2] != (namespace, ticket)}

    def _send(self, sink: str, place: Place, message: Message) -> None:
        before = self._waiting.get((sink, place))
        if before is not None and before.id == message.id:
            return
        self._waiting[sink, place] = message
        if sink not in self._lanes:
            workers: Workers[Place] = Workers(KeyedQueue(), self._handler(sink), 1, self._clock.monotonic)
            self._lanes[sink] = (workers, asyncio.create_task(workers.run(), name=f"sink {sink}"))
        self._lanes[sink][0].enqueue(place)

    def _handler(self, sink: str) -> Callable[[Place], Awaitable[float | None]]:
        async def handle(place: Place) -> float | None:
            return await self._deliver(sink, place)

        return handle

    async def _deliver(self, sink: str, place: Place) -> float | None:
        """One try; seconds to the next one, or None if it is done."""
        key, now = (sink, place), self._clock.monotonic()
        message, config = self._waiting.get(key), self._file.current().get(sink)
        if message is None or config is None:
            self._waiting.pop(key, None)
            return None
        if (pause := self._paused_until.get(sink, now) - now) > 0:
            return pause
        try:
            reference = await self._told(config, message)
        except SinkError as error:
            return self._failed(key, message, error)
        except Exception as error:  # an answer of another shape than documented must not end the queue
            log.exception("sink %s", sink, extra={"fields": {"ticket": place[1]}})
            return self._failed(key, message, SinkError(f"its answer can't be understood: {type(error).__name__}"))
        DELIVERIES.labels(sink, "delivered").inc()
        self._failures.pop(key, None)
        status = SinkStatus(
            name=sink, state=SinkState.DELIVERED, phase=message.status.phase, reference=reference[:MESSAGE_CHARACTERS]
        )
        self._finish(key, message, status)
        is_newest = self._waiting.get(key) is message
        if is_newest:
            del self._waiting[key]
        return None if is_newest else 0.0

    async def _told(self, config: SinkConfig, message: Message) -> str:
        if self._session is None:
            self._session = aiohttp.ClientSession()
        if not self._may_tell():
            raise SinkError("another operator may lead by now")
        return await _TELL[config.type](self._session, config, message, self._clock.now())

    def _failed(self, key: tuple[str, Place], message: Message, error: SinkError) -> float:
        """Twice as long each time, up to a quarter more by chance, and no sooner than the sink asked for."""
        sink, place = key
        DELIVERIES.labels(sink, "failed").inc()
        self._failures[key] = self._failures.get(key, 0) + 1
        if self._failures[key] == 1:
            log.warning("sink %s was not told: %s", sink, error, extra={"fields": {"ticket": place[1]}})
        if error.retry_after_seconds:
            self._paused_until[sink] = self._clock.monotonic() + error.retry_after_seconds
        before = self._results.get(key)
        status = SinkStatus(
            name=sink,
            state=SinkState.FAILED,
            phase=before.phase if before is not None else self._phase_before(sink, message),
            reference=message.reference,
            message=str(error)[:MESSAGE_CHARACTERS],
        )
        self._finish(key, message, status)
        delay = self._backoff.seconds(self._failures[key]) * (1 + self._jitter() / 4)
        return max(delay, error.retry_after_seconds)

    def _finish(self, key: tuple[str, Place], message: Message, status: SinkStatus) -> None:
        if self._results.get(key) != status:
            self._results[key] = status
            self._wake(message.namespace, message.spec.policy_ref.name)

    @staticmethod
    def _phase_before(sink: str, message: Message) -> Phase | None:
        return next((entry.phase for entry in message.status.sinks if entry.name == sink), None)
