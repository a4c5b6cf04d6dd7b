"""The task slices of one model: which of them are in memory, and how they come and go.

The engine's thread asks and never waits: the loader's thread wakes it when something is there. What is loaded and
unloaded is decided in `modes/subgraphs.py`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import assert_never

from sixfold_api.runtime_config import SubgraphsConfig, TaskConfig
from sixfold_runtime.engine.errors import RequestError
from sixfold_runtime.engine.protocol import TaskInfo
from sixfold_runtime.engine.slice_file import SliceInfo
from sixfold_runtime.engine.slice_loader import (
    Host,
    Load,
    Loaded,
    Remind,
    Reminded,
    Result,
    Scan,
    Scanned,
    SliceLoader,
    TrunkFolder,
)
from sixfold_runtime.engine.slice_metrics import SliceMetrics
from sixfold_runtime.engine.task_slice import TaskSlice
from sixfold_runtime.engine.work import engine_error
from sixfold_runtime.modes.subgraphs import RETRY_SECONDS, Offer, Plan, Residency

log = logging.getLogger(__name__)
SINGLE_TENANT_SECONDS = 600.0
"""A slice that isn't pinned and served one tenant for so long is reported: it may be a test that nobody stopped."""


@dataclass
class _Held:
    """A slice in memory, and for whom."""

    slice: TaskSlice
    since_seconds: float
    tenants: set[str] = field(default_factory=set)
    """At most two of them: more make no difference."""
    is_reported: bool = False


class SlicePool:
    """Used from the engine's thread; attributes and numbers may be read from any.

    Attributes:
        tasks: that the configuration offers, in its order, whether they can be had or not.
        failures: offered tasks that can't be had as things are, and why.
        changes: grows whenever `acquire` may have another answer than before.
    """

    def __init__(
        self,
        folder: TrunkFolder,
        host: Host,
        section: Callable[[], SubgraphsConfig | None],
        metrics: SliceMetrics,
        *,
        name: str = "",
        wake: Callable[[], None] = lambda: None,
        is_enlisted: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Loads the slices that are to be in memory from the start, and returns when they are.

        Args:
            section: what the configuration says about the model's tasks; None: it has none.
            name: of the model, for logs.
            wake: called in another thread when `adapt` has something to do.
            is_enlisted: `host` computes what new requests get.
        """
        self._folder, self._section, self._metrics = folder, section, metrics
        self._name, self._clock, self._is_enlisted = name, clock, is_enlisted
        self._loader = SliceLoader(folder, host, name, wake, clock)
        self._books = Residency()
        self._held: dict[str, _Held] = {}
        self._seen = self._wanted = section()
        self._known: SubgraphsConfig | None = None
        """The last one whose headers were read."""
        self._headers: dict[str, SliceInfo | str] = {}
        self.tasks: tuple[TaskInfo, ...] = ()
        self.failures: dict[str, str] = {}
        self.changes = 0
        results: deque[Result] = deque([self._loader.scan(self._wanted)])
        while results:
            results += [self._loader.load(task) for task in self._take(results.popleft())]

    # -- for requests

    def check(self, task: str) -> None:
        """Refuse a task that can't be served. Raises RequestError: 404, 503."""
        if task not in self._books:
            known = ", ".join(info.name for info in self.tasks)
            has = f"it has {known}" if known else "it has none"
            raise RequestError(404, "task_not_found", f"this model has no task {task!r}: {has}")
        if problem := self._books.problem(task, self._clock()):
            raise RequestError(503, "slice_unusable", f"task {task!r} can't be served: {problem}", RETRY_SECONDS)

    def acquire(self, task: str, tenant: str, *, had_to_wait: bool = False) -> TaskSlice | None:
        """The slice of a task, to be released exactly once; None while it is on its way: ask again after a change.

        Args:
            had_to_wait: the request has asked before: it is counted as a miss, once it gets its slice.

        Raises:
            RequestError: as `check`, and for a fault of ours, which ends this request and not the others.
        """
        self.check(task)
        try:
            held = self._acquire(task, tenant)
        except Exception as error:
            log.exception("the slice of task %s can't be had", task)
            raise engine_error() from error
        if held is not None:
            self._metrics.requested(task, not had_to_wait)
        return held

    def _acquire(self, task: str, tenant: str) -> TaskSlice | None:
        now = self._clock()
        if not self._books.acquire(task, now):
            self._start(self._follow(self._books.plan(now)))
            return None
        held = self._held[task]
        if len(held.tenants) < 2:
            held.tenants.add(tenant)
        self._report_single_tenant(task, held)
        return held.slice

    def borrow(self, task: str) -> TaskSlice | None:
        """The slice of a task if it is in memory now, to be released exactly once; for what is no request: nothing is
        loaded or counted for it."""
        held = self._held.get(task)
        return held.slice if held is not None and self._books.acquire(task, self._clock()) else None

    def release(self, task: str) -> None:
        """Give back what `acquire` or `borrow` gave."""
        now = self._clock()
        self._books.release(task, now)
        self._start(self._follow(self._books.plan(now)))

    # -- for the engine

    def adapt(self) -> bool:
        """Follow the configuration, and take what was loaded. Returns whether `tasks` or `failures` have changed."""
        told = self.tasks, self.failures
        section = self._section()
        if section is not self._seen:
            self._seen = section
            if section != self._wanted:
                self._wanted = section
                self._loader.start(Scan(section))
        for result in self._loader.take_results():
            self._start(self._take(result))
        return told != (self.tasks, self.failures)

    def enlist(self) -> None:
        """New requests get what the host computes."""
        if not self._is_enlisted:
            self._is_enlisted = True
            self._start(self._offer())

    def retire(self) -> None:
        """They don't any more: slices go as soon as running requests are done with them."""
        if self._is_enlisted:
            self._is_enlisted = False
            self._start(self._offer())

    def close(self) -> None:
        """End the thread, without waiting for a load; nothing may be asked for after that."""
        self._metrics.unwatch()
        self._loader.close()

    @property
    def resident_bytes(self) -> int:
        return sum(held.slice.size_bytes for held in list(self._held.values()))

    # -- books

    @property
    def _offered(self) -> tuple[TaskConfig, ...]:
        return self._known.tasks if self._known is not None and self._is_enlisted else ()

    def _take(self, result: Result) -> tuple[str, ...]:
        """Note what the loader has done; which tasks to load now."""
        now = self._clock()
        self.changes += 1
        if isinstance(result, Scanned):
            if result.section != self._wanted:
                return ()  # the configuration has changed again, and a later scan is on its way
            self._known, self._headers = result.section, result.headers
            return self._offer()
        if isinstance(result, Loaded):
            self._settle(result, now)
            self._tell()
        elif not isinstance(result, Reminded):
            assert_never(result)
        return self._follow(self._books.plan(now))

    def _offer(self) -> tuple[str, ...]:
        """Bring the books in line with the configuration; which tasks to load now."""
        is_on_demand = self._known is not None and self._known.on_demand
        offers = {}
        for task in self._offered:
            header = self._headers[task.name]
            size_bytes = header.size_bytes if isinstance(header, SliceInfo) else 0
            offers[task.name] = Offer(size_bytes, task.pinned or not is_on_demand)
        # While the mode is off all of them stay in memory, as if there were no budget.
        self._books.offer(offers, self._known.cache_bytes if self._known is not None and is_on_demand else None)
        for name in offers:
            if isinstance(problem := self._headers[name], str):
                log.error("model %s: task %s can't be served: %s", self._name, name, problem)
                self._books.failed(name, problem, self._clock())
        self._metrics.watch(self, set(offers))
        self._tell()
        return self._follow(self._books.plan(self._clock()))

    def _settle(self, result: Loaded, now: float) -> None:
        if result.slice is None:
            self._metrics.failed(result.task)
            log.error("model %s: the slice of task %s can't be loaded: %s", self._name, result.task, result.problem)
            self._books.failed(result.task, result.problem, now)
            return
        self._metrics.loaded(result.task, result.seconds)
        if self._books.loaded(result.task, result.slice.size_bytes, now):
            self._held[result.task] = _Held(result.slice, now)
        else:
            self._loader.start(result.slice)

    def _follow(self, plan: Plan) -> tuple[str, ...]:
        """Let go of what the plan unloads; what it loads."""
        for task in plan.unload:
            held = self._held[task]
            self._report_single_tenant(task, held)
            del self._held[task]
            self._metrics.unloaded(task, self._clock() - held.since_seconds)
            self._loader.start(held.slice)
        if plan.unload or plan.load:
            self.changes += 1
        return plan.load

    def _start(self, tasks: Iterable[str]) -> None:
        for task in tasks:
            self._loader.start(Load(task))
        if (seconds := self._books.reminder_seconds(self._clock())) is not None:
            self._loader.start(Remind(seconds))

    def _tell(self) -> None:
        self.tasks = tuple(self._info(task.name) for task in self._offered)
        self.failures = self._books.failures

    def _info(self, task: str) -> TaskInfo:
        held, header = self._held.get(task), self._headers[task]
        if held is not None:  # its file may have been mended since its header was read
            return TaskInfo(task, held.slice.task.value, list(held.slice.labels))
        if isinstance(header, SliceInfo):
            return TaskInfo(task, header.task.value, list(header.labels))
        return TaskInfo(task, self._folder.task.value)

    # -- numbers

    def slice_bytes(self, task: str) -> int:
        """0 while it isn't in memory."""
        held = self._held.get(task)
        return 0 if held is None else held.slice.size_bytes

    def age_seconds(self, task: str) -> float:
        """How long it has been in memory."""
        held = self._held.get(task)
        return 0.0 if held is None else self._clock() - held.since_seconds

    def single_tenant_seconds(self, task: str) -> float:
        """How long it has been in memory without being pinned and for one tenant only; 0 where that isn't so."""
        held = self._held.get(task)
        if held is None or self._books.is_pinned(task) or len(held.tenants) != 1 or "" in held.tenants:
            return 0.0  # "" is everybody: a gateway without API keys
        return self._clock() - held.since_seconds

    def _report_single_tenant(self, task: str, held: _Held) -> None:
        seconds = 0.0 if held.is_reported else self.single_tenant_seconds(task)
        if seconds >= SINGLE_TENANT_SECONDS:
            held.is_reported = True
            log.warning(
                "model %s: task %s isn't pinned and has been in memory for %.0f minutes for the tenant %s alone",
                self._name, task, seconds / 60, next(iter(held.tenants)),
            )  # fmt: skip
