"""Reads all signals once a round, for all policies, and keeps what was said until the next one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import yaml

from sixfold_operator import metrics
from sixfold_operator.control.answers import Policy, Readings, snapshot
from sixfold_operator.control.model import Signal, Snapshot
from sixfold_operator.control.signals import BUILT_IN, SignalsError, load
from sixfold_operator.prometheus import Prometheus, PrometheusError

log = logging.getLogger(__name__)

SHORTEST_ROUND_SECONDS = 1.0


class SignalsFile:
    """The chart's signals, read again when the file changes; a bad one leaves the last good ones in place."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._content: bytes | None = None
        self.current: tuple[Signal, ...] = BUILT_IN
        self.problem = ""

    def read(self) -> None:
        if self._path is None:
            return
        try:
            content = self._path.read_bytes()
            if content == self._content:
                return
            self._content = content
            self.current = load(yaml.safe_load(content))
            self.problem = ""
            log.info("signals read", extra={"fields": {"file": str(self._path), "signals": len(self.current)}})
        except (OSError, SignalsError, yaml.YAMLError) as error:
            self.problem = f"the signals file isn't right, the last good one stays in use: {error}"
            log.error("%s", self.problem)


class Collector:
    """One task that asks Prometheus.

    Args:
        policies: those that there are now.
        interval_seconds: of a round: the shortest that any policy wants.
        wake: called for each policy after a round.
    """

    def __init__(
        self,
        prometheus: Prometheus,
        signals: SignalsFile,
        policies: Callable[[], Iterable[Policy]],
        interval_seconds: Callable[[], float],
        wake: Callable[[str, str], None],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._prometheus = prometheus
        self._signals = signals
        self._policies = policies
        self._interval_seconds = interval_seconds
        self._wake = wake
        self._now = now
        self._snapshots: dict[Policy, Snapshot] = {}
        self._told: Mapping[str, str] = {}
        self._signals.read()

    def signals(self) -> Sequence[Signal]:
        return self._signals.current

    def snapshot(self, namespace: str, policy: str) -> Snapshot | None:
        return self._snapshots.get((namespace, policy))

    async def run(self) -> None:
        """Round after round until cancelled. Nothing that Prometheus says ends it."""
        while True:
            began = time.monotonic()
            try:
                await self.round()
            except Exception:
                log.exception("a round of reading signals failed, the next one comes")
            wait = max(SHORTEST_ROUND_SECONDS, self._interval_seconds()) - (time.monotonic() - began)
            await asyncio.sleep(max(0.1, wait))

    async def round(self) -> None:
        """Ask for every signal, then tell the policies."""
        self._signals.read()
        signals = self._signals.current
        began = time.perf_counter()
        answers = await asyncio.gather(*(self._prometheus.ask(signal) for signal in signals), return_exceptions=True)
        metrics.PROMETHEUS_SECONDS.observe(time.perf_counter() - began)
        found: dict[str, Readings] = {}
        problems: dict[str, str] = {}
        for signal, answer in zip(signals, answers, strict=True):
            if isinstance(answer, PrometheusError):
                problems[signal.name] = str(answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found[signal.name] = answer
        metrics.PROMETHEUS_UP.set(bool(found))
        for name in sorted(problems.keys() - self._told.keys()) if found else ():
            log.warning("signal %s can't be read: %s", name, problems[name])
        self._told = problems if found else {}
        at = self._now()
        places = set(self._policies())
        interval = self._interval_seconds()
        self._snapshots = {place: snapshot(place, at, found, problems, interval) for place in places}
        for place in places:
            self._wake(*place)
