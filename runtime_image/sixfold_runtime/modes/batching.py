"""Which waiting requests go to an engine together, to which one, and when. Pure: no clock, no I/O.

A batch is computed as if padded to its longest request, so it is put together from requests of like length around the
most urgent one, within a budget of padded tokens. An engine has at most one batch that it computes and one behind it;
the rest stays where its order can still change.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from sixfold_api.batching import LONG_TOKENS, SHORT_TOKENS
from sixfold_api.gateway import Priority
from sixfold_api.runtime_config import BatchingConfig
from sixfold_runtime.modes.fair_shares import Flow

LEAD_SECONDS = 0.005
"""How long before an engine is expected to be free the next batch is sent, so that it needn't wait for it."""
GRACE_BATCHES = 4
"""A tenant is put last once it got so many full batches more than another one that waits."""
AFFINITY_REQUESTS = 4
"""Requests that an engine with keys and values of the prompt may have more than the least busy one."""
_MOST_COMPANIONS = 256
"""Of so many requests, the most urgent ones, a batch is made."""

Key = TypeVar("Key", bound=Hashable)
"""Names a request."""
EngineKey = TypeVar("EngineKey", bound=Hashable)
"""Names an engine."""


@dataclass(frozen=True)
class Waiting(Generic[Key, EngineKey]):
    """A request in the queue. All times are of one monotonic clock."""

    key: Key
    tokens: int
    arrived_seconds: float
    tenant: str = ""
    priority: Priority = Priority.NORMAL
    deadline_seconds: float | None = None
    """From then on it is of no use to begin."""
    preferred: EngineKey | None = None
    """The engine that may hold keys and values of its prompt."""
    excluded: Collection[EngineKey] = ()
    """Engines that were tried in vain."""

    @property
    def flow(self) -> Flow:
        return self.tenant, self.priority


@dataclass(frozen=True)
class Engine(Generic[EngineKey]):
    """An engine that takes these requests."""

    key: EngineKey
    batches: int = 0
    """Sent and not computed so far: of prompts, not prefilled."""
    free_at_seconds: float | None = None
    """When the last of `batches` is expected to be computed; None where that can't be told."""
    requests: int = 0
    """In flight, those that are being decoded included."""
    overhead_tokens: float = 64.0
    """What a batch costs beside its tokens, in tokens: `batch_costs.Costs.overhead_tokens`."""
    last_used: int = 0
    """Grows with each use: breaks ties."""
    is_last_choice: bool = False
    """Its weights are being exchanged."""


@dataclass(frozen=True)
class Batch(Generic[Key, EngineKey]):
    engine: EngineKey
    keys: tuple[Key, ...]
    """In the order in which to compute them."""
    actual_tokens: int
    padded_tokens: int


@dataclass(frozen=True)
class Plan(Generic[Key, EngineKey]):
    batches: tuple[Batch[Key, EngineKey], ...] = ()
    """To send now."""
    expired: tuple[Key, ...] = ()
    """Their deadline is over."""
    wake_seconds: float | None = None
    """Plan again then, or at the next event, whichever comes first; None is at the next event only."""


def window_seconds(tokens: int, config: BatchingConfig) -> float:
    """How long a request of this length waits for company while engines are busy."""
    if tokens < SHORT_TOKENS:
        return config.short_wait_seconds
    return config.long_wait_seconds if tokens > LONG_TOKENS else config.max_wait_seconds


def due_seconds(request: Waiting[Key, EngineKey], config: BatchingConfig) -> float:
    """When it stops waiting for company."""
    return request.arrived_seconds + window_seconds(request.tokens, config)


def plan(
    waiting: Sequence[Waiting[Key, EngineKey]],
    engines: Sequence[Engine[EngineKey]],
    now_seconds: float,
    config: BatchingConfig,
    served: Mapping[Flow, float],
) -> Plan[Key, EngineKey]:
    """What to send now, of requests for one model (and one of its task slices).

    An idle engine gets work at once. A busy one gets the next batch shortly before it is free, once the batch's most
    urgent request has waited for company as long as it should.

    Args:
        waiting: in any order.
        engines: those that serve the model now.
        served: what each tenant got at each priority (`fair_shares.Shares`); {} where all are the same.
    """
    expired = tuple(r.key for r in waiting if r.deadline_seconds is not None and r.deadline_seconds <= now_seconds)
    deadlines = [r.deadline_seconds for r in waiting if r.deadline_seconds is not None]
    wake = min((deadline for deadline in deadlines if deadline > now_seconds), default=math.inf)
    room = [engine for engine in engines if engine.batches < 2]
    batches: list[Batch[Key, EngineKey]] = []
    if room:
        gone = set(expired)
        queue = in_order([request for request in waiting if request.key not in gone], config, served)
        while queue:
            engine, when = _engine_for(queue[0], room, now_seconds, config)
            if engine is None or when > now_seconds:
                wake = min(wake, when)
                # Others may go to engines that this one can't.
                queue = queue[1:]
                continue
            members = companions(queue, engine, room, config)
            batches.append(_batch(engine.key, members))
            sent = {request.key for request in members}
            queue = [request for request in queue if request.key not in sent]
            room = [_with_batch(other, len(members)) if other is engine else other for other in room]
            room = [other for other in room if other.batches < 2]
    return Plan(tuple(batches), expired, None if math.isinf(wake) else wake)


def in_order(
    waiting: Sequence[Waiting[Key, EngineKey]], config: BatchingConfig, served: Mapping[Flow, float]
) -> list[Waiting[Key, EngineKey]]:
    """The most urgent first: those whose tenant got its share come last, then by priority, then by when they are due."""
    got = {flow: served.get(flow, 0.0) for flow in {request.flow for request in waiting}}
    least = min(got.values(), default=0.0)
    grace = GRACE_BATCHES * config.max_batch_tokens
    ahead = {flow: int((tokens - least) / grace) for flow, tokens in got.items()}
    return sorted(waiting, key=lambda r: (ahead[r.flow], -r.priority.rank, due_seconds(r, config)))


def companions(
    queue: Sequence[Waiting[Key, EngineKey]],
    engine: Engine[EngineKey],
    room: Sequence[Engine[EngineKey]],
    config: BatchingConfig,
) -> list[Waiting[Key, EngineKey]]:
    """The batch around the first of the queue: the one that saves the engine the most, within the budget.

    A request that joins saves what a batch of its own would cost beside its tokens, and costs what it is padded by; it
    never joins where the latter is more. Of those that may, the most urgent do.
    """
    first = queue[0]
    others = {other.key for other in room if other.key != engine.key}
    near = [
        request
        for request in queue[:_MOST_COMPANIONS]
        if abs(request.tokens - first.tokens) <= engine.overhead_tokens
        and engine.key not in request.excluded
        and (request is first or request.preferred not in others)
    ]
    best, most_saved = [first], 0.0
    for longest in sorted({request.tokens for request in near if request.tokens >= first.tokens}):
        most = config.max_batch_tokens // longest
        members = [r for r in near if longest - engine.overhead_tokens <= r.tokens <= longest][: max(1, most)]
        saved = sum(engine.overhead_tokens - (longest - request.tokens) for request in members)
        saved -= engine.overhead_tokens
        if saved > most_saved:
            best, most_saved = members, saved
    return best


def _engine_for(
    request: Waiting[Key, EngineKey], room: Sequence[Engine[EngineKey]], now_seconds: float, config: BatchingConfig
) -> tuple[Engine[EngineKey] | None, float]:
    """The engine for a request, and when it may go there; infinity is not before something happens."""

    def when(engine: Engine[EngineKey]) -> float:
        if not engine.batches:
            return now_seconds
        free = now_seconds if engine.free_at_seconds is None else engine.free_at_seconds - LEAD_SECONDS
        return max(free, due_seconds(request, config), now_seconds)

    usable = [engine for engine in room if engine.key not in request.excluded]
    if not usable:
        return None, math.inf
    first = min(usable, key=lambda engine: (engine.is_last_choice, when(engine), engine.requests, engine.last_used))
    for engine in usable:
        if engine.key == request.preferred and engine.is_last_choice == first.is_last_choice:
            if when(engine) <= when(first) and engine.requests <= first.requests + AFFINITY_REQUESTS:
                return engine, when(engine)
    return first, when(first)


def _batch(engine: EngineKey, members: Sequence[Waiting[Key, EngineKey]]) -> Batch[Key, EngineKey]:
    """The urgent first, then the short, which an engine that computes a batch in parts answers first."""
    members = sorted(members, key=lambda request: (-request.priority.rank, request.tokens))
    longest = max(request.tokens for request in members)
    actual = sum(request.tokens for request in members)
    return Batch(engine, tuple(request.key for request in members), actual, longest * len(members))


def _with_batch(engine: Engine[EngineKey], requests: int) -> Engine[EngineKey]:
    return replace(engine, batches=engine.batches + 1, free_at_seconds=math.inf, requests=engine.requests + requests)
