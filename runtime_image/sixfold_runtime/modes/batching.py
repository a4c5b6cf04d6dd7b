"""Which waiting requests go to an engine together, to which one, and when. Pure: no clock, no I/O.

A batch is computed as if padded to its longest request, so it is put together from requests of like length around the
most urgent one, within a budget of padded tokens. An engine has at most one batch that it computes and one behind it;
the rest stays where its order can still change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

from sixfold_api.batching import LONG_TOKENS, SHORT_TOKENS
from sixfold_api.gateway import Priority
from sixfold_api.runtime_config import BatchingConfig
from sixfold_runtime.modes.batch_costs import FIRST_OVERHEAD_TOKENS
from sixfold_runtime.modes.fair_shares import WEIGHTS, Flow

LEAD_SECONDS = 0.005
"""How long before an engine is expected to be free the next batch is sent, so that it needn't wait for it."""
PATIENCE = 2.0
"""A request may wait this many times as long as its own tokens take while shorter ones go first. In simulations of
heavy-tailed lengths, this takes a tenth or more off the 50th and 95th percentile and nothing adds to the 99th."""
GRACE_BATCHES = 4
"""A tenant comes after another one that waits once it got so many full batches more."""
AFFINITY_REQUESTS = 4
"""Requests that an engine with keys and values of the prompt may have more than the least busy one."""
MAX_BATCHES = 2
"""Of an engine: one that it computes and one behind it."""
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
    overhead_tokens: float = FIRST_OVERHEAD_TOKENS
    """What a batch costs beside its tokens, in tokens: `batch_costs.Costs.overhead_tokens`."""
    token_seconds: float = 0.0
    """What a token costs: `batch_costs.Costs.token_seconds`; 0 before that was measured."""
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
    """To send now; then plan again, since only then is it known how long they keep their engines busy."""
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
    deadlines = [r.deadline_seconds for r in waiting if r.deadline_seconds is not None]
    wake = min((deadline for deadline in deadlines if deadline > now_seconds), default=math.inf)
    expired = {r.key for r in waiting if r.deadline_seconds is not None and r.deadline_seconds <= now_seconds}
    live = [request for request in waiting if request.key not in expired]
    batches: list[Batch[Key, EngineKey]] = []
    soonest = _soonest(engines, now_seconds)
    if live and soonest <= now_seconds:
        ranks = flow_ranks({request.flow for request in live}, config, served)
        queue, gone = in_order(live, engines, config, ranks), set[Key]()
        for first in queue:
            if first.key in gone:
                continue
            engine, starts_seconds = _engine_for(first, engines, partial(_start_seconds, first, now_seconds, config))
            if engine is None or starts_seconds > now_seconds:
                # Those behind it may be due before it, or go where it can't go.
                wake = min(wake, starts_seconds)
                continue
            rest = [request for request in queue if request.key not in gone and request is not first]
            members = [first, *companions(first, rest, engine, engines, config, ranks)]
            gone.update(request.key for request in members)
            batches.append(_batch(engine.key, members))
            engines = [_with_batch(other, len(members)) if other is engine else other for other in engines]
            soonest = _soonest(engines, now_seconds)
            if soonest > now_seconds:
                break
    if len(live) > sum(len(batch.keys) for batch in batches) and soonest > now_seconds:
        wake = min(wake, soonest)
    return Plan(tuple(batches), tuple(expired), _or_none(wake))


def at_once(request: Waiting[Key, EngineKey], engines: Sequence[Engine[EngineKey]]) -> EngineKey | None:
    """The engine for a request that doesn't wait for company; None where none takes it."""
    engine, _ = _engine_for(request, [replace(engine, batches=0) for engine in engines], lambda _: 0.0)
    return None if engine is None else engine.key


def flow_ranks(
    flows: Collection[Flow], config: BatchingConfig, served: Mapping[Flow, float]
) -> dict[Flow, tuple[int, int, int]]:
    """Whose requests go before whose; lower is first.

    Priority decides, except where a higher one got its share and a lower one didn't; then, among tenants of the same
    priority, who got less. Differences within the grace don't count, so that order is by time where load is light.
    """
    grace_tokens = GRACE_BATCHES * config.max_batch_tokens
    got = {flow: served.get(flow, 0.0) for flow in flows}
    least = min(got.values(), default=0.0)
    least_of = {priority: min(got[f] for f in flows if f[1] is priority) for priority in {flow[1] for flow in flows}}

    def rank(flow: Flow) -> tuple[int, int, int]:
        _, priority = flow
        tokens_ahead = (got[flow] - least_of[priority]) * WEIGHTS[priority]
        return int((got[flow] - least) / grace_tokens), -priority.rank, int(tokens_ahead / grace_tokens)

    return {flow: rank(flow) for flow in flows}


def in_order(
    waiting: Sequence[Waiting[Key, EngineKey]],
    engines: Sequence[Engine[EngineKey]],
    config: BatchingConfig,
    ranks: Mapping[Flow, tuple[int, int, int]],
) -> list[Waiting[Key, EngineKey]]:
    """The most urgent first.

    Of requests of one rank that is the one that is due first, to which comes some patience for one that takes long.
    That is bounded, so nobody is passed for ever.
    """
    patience_seconds = PATIENCE * min((engine.token_seconds for engine in engines), default=0.0)

    def order(request: Waiting[Key, EngineKey]) -> tuple[tuple[int, int, int], float]:
        return ranks[request.flow], due_seconds(request, config) + patience_seconds * request.tokens

    return sorted(waiting, key=order)


def companions(
    first: Waiting[Key, EngineKey],
    rest: Sequence[Waiting[Key, EngineKey]],
    engine: Engine[EngineKey],
    engines: Sequence[Engine[EngineKey]],
    config: BatchingConfig,
    ranks: Mapping[Flow, tuple[int, int, int]],
) -> list[Waiting[Key, EngineKey]]:
    """Those that go with `first`: the set that saves the engine the most, within the budget.

    A request that joins saves what a batch of its own would cost beside its tokens, and costs what it is padded by; it
    never joins where the latter is more. If more may than there is room for, those do that are padded least: for
    tenants and priorities it stays with the order of the queue.
    """
    elsewhere = {other.key for other in engines if other.batches < MAX_BATCHES and other.key != engine.key}
    overhead = engine.overhead_tokens
    near = [
        request
        for request in rest[:_MOST_COMPANIONS]
        if abs(request.tokens - first.tokens) <= overhead
        and engine.key not in request.excluded
        and request.preferred not in elsewhere
    ]
    near.sort(key=lambda request: (ranks[request.flow], -request.tokens))
    best, most_saved = list[Waiting[Key, EngineKey]](), 0.0
    for longest in sorted({first.tokens, *(request.tokens for request in near)}):
        if longest < first.tokens:
            continue
        most = max(0, config.max_batch_tokens // longest - 1)
        if most * overhead <= most_saved:
            break  # longer ones leave room for still fewer
        chosen = [request for request in near if longest - overhead <= request.tokens <= longest][:most]
        saved = sum(overhead - (longest - request.tokens) for request in chosen) - (longest - first.tokens)
        if saved > most_saved:
            best, most_saved = chosen, saved
    return best


def _soonest(engines: Sequence[Engine[EngineKey]], now_seconds: float) -> float:
    return min((_free_seconds(engine, now_seconds) for engine in engines), default=math.inf)


def _free_seconds(engine: Engine[EngineKey], now_seconds: float) -> float:
    """When it takes another batch; infinity is not before something happens."""
    if not engine.batches:
        return now_seconds
    if engine.batches >= MAX_BATCHES:
        return math.inf
    return now_seconds if engine.free_at_seconds is None else max(now_seconds, engine.free_at_seconds - LEAD_SECONDS)


def _start_seconds(
    request: Waiting[Key, EngineKey], now_seconds: float, config: BatchingConfig, engine: Engine[EngineKey]
) -> float:
    """When a request goes to an engine, if it is the most urgent one."""
    free = _free_seconds(engine, now_seconds)
    return max(free, due_seconds(request, config)) if engine.batches else free


def _engine_for(
    request: Waiting[Key, EngineKey],
    engines: Sequence[Engine[EngineKey]],
    when: Callable[[Engine[EngineKey]], float],
) -> tuple[Engine[EngineKey] | None, float]:
    """The engine that is the best for a request, and when it goes there, of what `when` says of each."""
    usable = [engine for engine in engines if engine.key not in request.excluded]
    usable = [engine for engine in usable if not engine.is_last_choice] or usable
    if not usable:
        return None, math.inf
    first = min(usable, key=lambda engine: (when(engine), engine.batches, engine.requests, engine.last_used))
    for engine in usable:
        is_as_soon = when(engine) <= when(first) and engine.batches <= first.batches
        if engine.key == request.preferred and is_as_soon and engine.requests <= first.requests + AFFINITY_REQUESTS:
            return engine, when(engine)
    return first, when(first)


def _batch(engine: EngineKey, members: Sequence[Waiting[Key, EngineKey]]) -> Batch[Key, EngineKey]:
    """The urgent first, then the short, which an engine that computes a batch in parts answers first."""
    members = sorted(members, key=lambda request: (-request.priority.rank, request.tokens))
    longest = max(request.tokens for request in members)
    actual = sum(request.tokens for request in members)
    return Batch(engine, tuple(request.key for request in members), actual, longest * len(members))


def _with_batch(engine: Engine[EngineKey], requests: int) -> Engine[EngineKey]:
    """How long the batch takes is not known here; the next plan, after it was sent, has it."""
    return replace(engine, batches=engine.batches + 1, free_at_seconds=math.inf, requests=engine.requests + requests)


def _or_none(seconds: float) -> float | None:
    return None if math.isinf(seconds) else seconds
