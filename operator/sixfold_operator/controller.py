"""What runs: watches fill the cache and, in the operator that leads, the queue; workers reconcile; a tick enqueues
the resync."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from sixfold_api.names import POLICY_KIND, POLICY_LABEL, TICKET_KIND, VARIANT_KIND, VARIANT_LABEL
from sixfold_operator import metrics
from sixfold_operator.builders.common import MANAGED_BY, MANAGED_BY_LABEL, Manifest
from sixfold_operator.cache import Cache, Place, place_of
from sixfold_operator.keyed_queue import KeyedQueue, Workers
from sixfold_operator.kube import RESOURCES, ApiError, Kube
from sixfold_operator.outbox import Outbox
from sixfold_operator.pod_states import PodStates
from sixfold_operator.reconcile.children import Children
from sixfold_operator.reconcile.context import Clock, Context
from sixfold_operator.reconcile.decisions import Decider
from sixfold_operator.reconcile.policy import PolicyReconciler
from sixfold_operator.reconcile.variant import reconcile_variant
from sixfold_operator.settings import OperatorSettings
from sixfold_operator.sinks import SinksFile
from sixfold_operator.watch import Watch

log = logging.getLogger(__name__)

TICK_SECONDS = 5.0
FIRST_RESYNC_SECONDS = 10.0
"""What was deleted after the first listing and before kopf's watches began is told by nobody."""
LIST_RETRY_SECONDS = 1.0
STALE_TICK_SECONDS = 30.0
RECONCILE_TIMEOUT_SECONDS = 60.0
STALLED_SECONDS = 2 * RECONCILE_TIMEOUT_SECONDS
RESYNC = "Resync"
CHILD_KINDS = (
    *("ConfigMap", "Service", "Deployment", "Job", "Pod", TICKET_KIND),
    *("PodDisruptionBudget", "NetworkPolicy", "Ingress"),
)
WATCHED_KINDS = (VARIANT_KIND, POLICY_KIND, *CHILD_KINDS)
OPTIONAL_KINDS = ("HTTPRoute", "ScaledObject", "HorizontalPodAutoscaler")
"""Children of kinds that not every cluster serves, or whose statuses never rest: listed with the rest, and never
watched."""
CHILD_SELECTOR = f"{MANAGED_BY_LABEL}={MANAGED_BY}"


class Key(NamedTuple):
    kind: str
    namespace: str = ""
    name: str = ""


def tags(manifest: Manifest) -> Iterable[str]:
    """Under which owners or references an object is found: `policy/<name>`, `variant/<name>`."""
    if manifest["kind"] in (POLICY_KIND, VARIANT_KIND):
        return (f"variant/{name}" for name in _variant_names(manifest.get("spec", {})))
    labels = manifest["metadata"].get("labels", {})
    owners = (("policy", POLICY_LABEL), ("variant", VARIANT_LABEL))
    return (f"{kind}/{labels[label]}" for kind, label in owners if label in labels)


def _variant_names(spec: Any) -> set[str]:
    """Names in every reference to a variant in a spec, wherever it stands."""
    if isinstance(spec, list):
        return {name for item in spec for name in _variant_names(item)}
    if not isinstance(spec, dict):
        return set()
    names = {name for value in spec.values() for name in _variant_names(value)}
    references = (spec.get(field) for field in ("variantRef", "draftVariantRef", "draftFor"))
    return names | {ref["name"] for ref in references if isinstance(ref, dict) and "name" in ref}


class Controller:
    """One a process: after `start` it stands by, with a cache that the watches keep filled; after `lead` it acts."""

    def __init__(self, settings: OperatorSettings, kube: Kube, clock: Clock | None = None) -> None:
        self._settings = settings
        self._kube = kube
        self._namespaces: list[str | None] = [*settings.watch_namespaces] or [None]
        self._clock = clock or Clock()
        self._cache = Cache(tags)
        self._pod_states = PodStates()
        children = Children(kube, self._cache)
        self._context = Context(settings, kube, self._cache, children, self._pod_states, self._clock)
        self._watch = Watch(settings, self._cache, self._wake_policy, self._clock)
        self._outbox = Outbox(
            SinksFile(settings.sinks_file),
            self._wake_policy,
            self._clock,
            may_tell=kube.may_write,
            cluster=settings.cluster_name,
        )
        self._policies = PolicyReconciler(self._context, Decider(self._watch.watched, self._clock), self._outbox)
        self._queue: KeyedQueue[Key] = KeyedQueue()
        self._workers = Workers(self._queue, self.handle, settings.workers, self._clock.monotonic)
        self._last_tick_seconds = self._clock.monotonic()
        self._leads = False
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """List everything once, then stand by. Raises ApiError."""
        await self._list_all()
        self._last_tick_seconds = self._clock.monotonic()
        self._tasks = [asyncio.create_task(self._tick(), name="tick")]
        await self._watch.start()

    def lead(self) -> None:
        """Act from now on, in the background."""
        self._tasks.append(asyncio.create_task(self._lead(), name="leader"))

    async def stop(self) -> None:
        """Returns when nothing is written any more."""
        self._leads = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._watch.stop()
        await self._outbox.stop()
        await self._pod_states.close()
        await self._kube.settle()

    def observe(self, event_type: str | None, manifest: Manifest) -> None:
        """Take in a watch event. What is already known (our own writes) wakes nobody."""
        news = self._cache.remove(manifest) if event_type == "DELETED" else self._cache.put(manifest)
        if news:
            self._wake(manifest)

    def stalled(self) -> str:
        """Why the process should be restarted; empty while it works."""
        if not self._tasks:
            return ""
        now = self._clock.monotonic()
        if any(task.done() for task in self._tasks):
            return "a background task has ended"
        if now - self._last_tick_seconds > STALE_TICK_SECONDS:
            return f"no tick for {now - self._last_tick_seconds:.0f} s"
        stuck = max(self._queue.longest_run_seconds(now), self._queue.overdue_seconds(now))
        return f"a key has been stuck for {stuck:.0f} s" if stuck > STALLED_SECONDS else ""

    def unready(self) -> str:
        """Why the operator doesn't work yet; empty when it does."""
        return self.stalled() if self._tasks else "the first listing isn't done"

    async def handle(self, key: Key) -> float | None:
        """Reconcile one key, with metrics and a log line for what goes wrong, which is then raised again."""
        started = time.perf_counter()
        result = "error"
        try:
            async with asyncio.timeout(RECONCILE_TIMEOUT_SECONDS):
                again_seconds = await self._reconcile(key)
            result = "ok"
            return again_seconds
        except ApiError as error:
            log.warning("reconcile failed, it will be tried again: %s", error, extra={"fields": key._asdict()})
            raise
        except Exception:
            log.exception("reconcile failed, it will be tried again", extra={"fields": key._asdict()})
            raise
        finally:
            metrics.RECONCILES.labels(key.kind, result).inc()
            metrics.RECONCILE_SECONDS.labels(key.kind).observe(time.perf_counter() - started)
            self._report_queue()

    async def _reconcile(self, key: Key) -> float | None:
        if key.kind == POLICY_KIND:
            return await self._policies.reconcile(key.namespace, key.name)
        if key.kind == VARIANT_KIND:
            return await reconcile_variant(self._context, key.namespace, key.name, self._wake)
        for kind, missed in (await self._list_all()).items():
            metrics.MISSED_EVENTS.labels(kind).inc(missed)
        self._enqueue_all()
        return None

    async def _lead(self) -> None:
        """The watches may lag behind what the last leader wrote: everything is listed anew before anything is done."""
        while True:
            try:
                await self._list_all()
                break
            except ApiError as error:
                log.warning("the API can't be listed, it will be tried again: %s", error)
                await asyncio.sleep(LIST_RETRY_SECONDS)
        self._leads = True
        self._enqueue_all()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._workers.run(), name="workers")
            group.create_task(self._watch.lead(), name="collector")

    def _wake_policy(self, namespace: str, name: str) -> None:
        if self._leads:
            self._workers.enqueue(Key(POLICY_KIND, namespace, name))

    def _wake(self, manifest: Manifest) -> None:
        for key in self._concerned(manifest) if self._leads else ():
            self._workers.enqueue(key)

    def _concerned(self, manifest: Manifest) -> Iterable[Key]:
        """An object's own key or its owner's; for a variant also those of the policies and variants that use it."""
        kind, metadata = manifest["kind"], manifest["metadata"]
        namespace = metadata["namespace"]
        if kind in (POLICY_KIND, VARIANT_KIND):
            yield Key(kind, namespace, metadata["name"])
        if kind == VARIANT_KIND:
            for waiting in (VARIANT_KIND, POLICY_KIND):
                for user in self._cache.tagged(waiting, namespace, f"variant/{metadata['name']}"):
                    yield Key(waiting, namespace, user["metadata"]["name"])
        labels = metadata.get("labels", {})
        if kind in CHILD_KINDS and POLICY_LABEL in labels:
            yield Key(POLICY_KIND, namespace, labels[POLICY_LABEL])
        if kind in CHILD_KINDS and VARIANT_LABEL in labels:
            yield Key(VARIANT_KIND, namespace, labels[VARIANT_LABEL])

    async def _list_all(self) -> dict[str, int]:
        """Bring the cache in line with the API: kopf doesn't tell what went while a watch was down. Returns how
        many objects of each kind had been missed."""
        missed: dict[str, int] = {}
        served = [kind for kind in OPTIONAL_KINDS if kind in await self._kube.serves(RESOURCES[kind][0])]
        self._context.served_kinds.clear()
        self._context.served_kinds.update(served)
        for kind in (*WATCHED_KINDS, *served):
            for namespace in self._namespaces:
                selector = "" if kind in (POLICY_KIND, VARIANT_KIND) else CHILD_SELECTOR
                missed[kind] = missed.get(kind, 0) + await self._list(kind, namespace, selector)
        return missed

    async def _list(self, kind: str, namespace: str | None, selector: str) -> int:
        """Page by page: all objects of a large cluster at once take more memory than all the rest."""
        missed, version = 0, 0
        seen: set[Place] = set()
        async for page in self._kube.pages(kind, namespace, selector):
            version = page.version
            for manifest in page.items:
                seen.add(place_of(manifest))
                missed += self._cache.put(manifest)
        return missed + len(self._cache.keep(kind, namespace, seen, version))

    def _enqueue_all(self) -> None:
        for kind in (VARIANT_KIND, POLICY_KIND):
            for namespace, name in self._cache.places(kind):
                self._workers.enqueue(Key(kind, namespace, name))

    async def _tick(self) -> None:
        resync_seconds = self._clock.monotonic() + min(FIRST_RESYNC_SECONDS, self._settings.resync_seconds)
        while True:
            now = self._last_tick_seconds = self._clock.monotonic()
            metrics.LAST_TICK.set(self._clock.now().timestamp())
            self._report_queue()
            if self._leads and now >= resync_seconds:
                resync_seconds = now + self._settings.resync_seconds
                self._workers.enqueue(Key(RESYNC))
            await asyncio.sleep(TICK_SECONDS)

    def _report_queue(self) -> None:
        metrics.QUEUE_KEYS.set(len(self._queue))
        metrics.QUEUE_OVERDUE_SECONDS.set(self._queue.overdue_seconds(self._clock.monotonic()))
