"""The Lease of the operator: at most one process acts, another one stands by."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

from sixfold_operator import metrics
from sixfold_operator.election import LOOK, Decision, Record, View, decide, pause_seconds
from sixfold_operator.kube import ApiError, Kube, Manifest

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.5


class Election:
    """Holds the Lease `namespace/name`, or waits for it.

    Args:
        identity: of this process. Processes that live at the same time must have different ones.
        duration_seconds: after which a Lease that isn't renewed is free, whole seconds.
    """

    def __init__(
        self,
        kube: Kube,
        place: tuple[str, str],
        identity: str,
        duration_seconds: int,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube, self._place, self._identity = kube, place, identity
        self._duration_seconds, self._monotonic = duration_seconds, monotonic
        self._view = View(since=monotonic())
        self._is_heard = True
        self._described: Manifest = {}
        """Labels and annotations of the Lease: whoever installed it finds it by them."""

    def leads(self) -> bool:
        """Whether this process may act at this moment."""
        return self._view.may_act(self._monotonic())

    def role(self) -> str:
        """For people."""
        record = self._view.record
        if self.leads():
            return "leader"
        return f"standby, {record.holder} leads" if record is not None and record.holder else "standby, nobody leads"

    async def run(self, begin: Callable[[], None]) -> None:
        """Call `begin` once this process leads, and return once it no longer does, which is for good: it must end."""
        await self._look()
        while (decision := self._decide()) is not Decision.STEP_DOWN:
            if decision is Decision.WAIT:
                await asyncio.sleep(pause_seconds(self._view, self._duration_seconds, self._monotonic()))
            elif await self._write():
                if decision is Decision.ACQUIRE:
                    metrics.LEADER.set(1)
                    log.info("this operator leads", extra={"fields": {"lease": self._place, "name": self._identity}})
                    begin()
                continue
            else:
                await asyncio.sleep(RETRY_SECONDS)
            if self._view.held_until is None or decision is Decision.RENEW:
                await self._look()

    async def release(self) -> None:
        """Let another one lead at once. Whatever this process was doing must have ended."""
        if not self.leads():
            return
        self._view = replace(self._view, held_until=None)
        metrics.LEADER.set(0)
        for _ in range(2):  # a renewal that was cut off may still arrive
            await self._look()
            if self._view.record is None or self._view.record.holder != self._identity:
                return
            try:
                await self._put(holder="", duration_seconds=1)
                log.info("the Lease is released")
                return
            except (ApiError, TimeoutError) as error:
                log.warning("the Lease can't be released, else it runs out: %s", str(error) or "no answer in time")

    def _decide(self) -> Decision:
        return decide(self._view, self._identity, self._duration_seconds, self._monotonic())

    async def _look(self) -> None:
        """Read the Lease. Where the API doesn't answer, what was known stays known."""
        try:
            async with asyncio.timeout(self._patience_seconds()):
                found = await self._kube.get("Lease", *self._place)
        except (ApiError, TimeoutError) as error:
            self._complain("read", error)
            return
        self._is_heard = True
        self._view = self._view.seen(None if found is None else self._record(found), self._monotonic())

    async def _write(self) -> bool:
        """Take or renew the Lease; False if that failed, or if somebody else was faster."""
        sent = self._monotonic()
        try:
            record = await self._put(self._identity, self._duration_seconds)
        except (ApiError, TimeoutError) as error:
            if not isinstance(error, ApiError) or error.status != 409:
                self._complain("written", error)
            return False
        self._view = self._view.wrote(record, sent, self._duration_seconds)
        return True

    async def _put(self, holder: str, duration_seconds: int) -> Record:
        """Write the Lease if it is still as it was seen; raises ApiError (409 if it isn't), TimeoutError."""
        before = self._view.record
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        is_mine = before is not None and before.holder == holder
        changes = before is not None and before.holder != holder and holder != ""
        namespace, name = self._place
        spec = {
            "leaseDurationSeconds": duration_seconds,
            "acquireTime": before.acquired if before is not None and is_mine else now,
            "renewTime": now,
            "leaseTransitions": (before.transitions if before is not None else 0) + int(changes),
            **({"holderIdentity": holder} if holder else {}),
        }
        metadata = {**self._described, "namespace": namespace, "name": name}
        if before is not None:
            metadata["resourceVersion"] = before.version
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
        async with asyncio.timeout(self._patience_seconds()):
            return self._record(await self._kube.put(lease))

    def _complain(self, what: str, error: Exception) -> None:
        """Once an outage."""
        level = logging.WARNING if self._is_heard else logging.DEBUG
        log.log(level, "the Lease can't be %s: %s", what, str(error) or "no answer in time")
        self._is_heard = False

    def _patience_seconds(self) -> float:
        """How long to wait for an answer: a holder must have decided by its deadline."""
        patience = LOOK * self._duration_seconds
        held_until = self._view.held_until
        return patience if held_until is None else max(0.0, min(patience, held_until - self._monotonic()))

    def _record(self, lease: Manifest) -> Record:
        spec, metadata = lease.get("spec", {}), lease["metadata"]
        self._described = {key: metadata[key] for key in ("labels", "annotations") if key in metadata}
        return Record(
            holder=spec.get("holderIdentity") or "",
            duration_seconds=float(spec.get("leaseDurationSeconds") or self._duration_seconds),
            transitions=int(spec.get("leaseTransitions") or 0),
            acquired=spec.get("acquireTime") or "",
            version=metadata["resourceVersion"],
        )
