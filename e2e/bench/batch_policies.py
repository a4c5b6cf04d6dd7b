"""Ways of making batches: the gateway's own, and the two that others use."""

from __future__ import annotations

from collections import deque

from batch_replay import Group, Policy
from batch_trace import Request

from sixfold_api.runtime_config import BatchingConfig
from sixfold_runtime.modes import batching
from sixfold_runtime.modes.batch_costs import Costs

DEFAULTS = BatchingConfig(
    max_batch_tokens=1024,
    short_wait_seconds=0.010,
    long_wait_seconds=0.005,
    max_wait_seconds=0.015,
    max_queued_requests=100_000,
)


class FixedBatches(Policy):
    """As many requests as a batch holds, as they came; fewer when the oldest has waited for `timeout_seconds`. What
    arrives while the engine is busy fills the batch, as in Triton's dynamic batcher."""

    def __init__(self, size: int, timeout_seconds: float) -> None:
        self._size, self._timeout_seconds = size, timeout_seconds
        self._queue: deque[Request] = deque()

    def arrive(self, request: Request) -> None:
        self._queue.append(request)

    def decide(self, now_seconds: float, outstanding: int) -> tuple[list[Group], float | None]:
        if outstanding or not self._queue:
            return [], None
        due = self._queue[0].arrived_seconds + self._timeout_seconds
        if len(self._queue) < self._size and now_seconds < due:
            return [], due
        return [tuple(self._queue.popleft() for _ in range(min(self._size, len(self._queue))))], None


class TokenBudget(Policy):
    """text-embeddings-inference's queue (core/src/queue.rs): first come, first served, until the next request would
    take the batch beyond its budget of padded tokens; no waiting window. There a request beyond the budget is refused;
    here it goes alone."""

    def __init__(self, budget_tokens: int, depth: int, is_padded: bool = True) -> None:
        """
        Args:
            depth: batches that the engine has at most: 2 as there, where two tasks fetch batches; 1 takes a batch only
                when the engine is free, so that it can grow meanwhile.
            is_padded: what it counts, as there: padded tokens, or the tokens themselves where the model packs them.
        """
        self._budget_tokens, self._depth, self._is_padded = budget_tokens, depth, is_padded
        self._queue: deque[Request] = deque()

    def arrive(self, request: Request) -> None:
        self._queue.append(request)

    def decide(self, now_seconds: float, outstanding: int) -> tuple[list[Group], float | None]:
        groups: list[Group] = []
        while self._queue and outstanding + len(groups) < self._depth:
            groups.append(self._next())
        return groups, None

    def _next(self) -> Group:
        group = [self._queue.popleft()]
        while self._queue and self._tokens([*group, self._queue[0]]) <= self._budget_tokens:
            group.append(self._queue.popleft())
        return tuple(group)

    def _tokens(self, group: list[Request]) -> int:
        tokens = [request.tokens for request in group]
        return len(tokens) * max(tokens) if self._is_padded else sum(tokens)


class LengthAware(Policy):
    """The gateway's, modes/batching.py, with the costs that it learns as it goes."""

    _ENGINE = "engine"

    def __init__(self, config: BatchingConfig = DEFAULTS) -> None:
        self._config = config
        self._waiting: dict[int, Request] = {}
        self._sent: deque[tuple[int, float]] = deque()
        """Padded tokens of what the engine has, and since when it has nothing before it, if that is so."""
        self._costs = Costs()

    def arrive(self, request: Request) -> None:
        self._waiting[request.index] = request

    def decide(self, now_seconds: float, outstanding: int) -> tuple[list[Group], float | None]:
        engine = batching.Engine(
            key=self._ENGINE,
            batches=outstanding,
            free_at_seconds=self._free_at(),
            requests=outstanding,
            overhead_tokens=self._costs.overhead_tokens,
            token_seconds=self._costs.token_seconds,
        )
        waiting = [
            batching.Waiting[int, str](request.index, request.tokens, request.arrived_seconds)
            for request in self._waiting.values()
        ]
        plan = batching.plan(waiting, [engine], now_seconds, self._config, {})
        groups = []
        for batch in plan.batches:
            groups.append(tuple(self._waiting.pop(key) for key in batch.keys))
            self._sent.append((batch.padded_tokens, now_seconds))
        return groups, plan.wake_seconds

    def computed(self, group: Group, now_seconds: float) -> None:
        padded, began = self._sent.popleft()
        self._costs.observe(padded, now_seconds - began)
        if self._sent:
            self._sent[0] = (self._sent[0][0], now_seconds)

    def _free_at(self) -> float | None:
        if not self._sent:
            return None
        seconds = [self._costs.seconds(padded) for padded, _ in self._sent]
        known = [taken for taken in seconds if taken is not None]
        return self._sent[0][1] + sum(known) if len(known) == len(seconds) else None
