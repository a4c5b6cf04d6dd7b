"""Reconciling an InferencePolicy: observe -> plan -> apply."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace

from pydantic import ValidationError

from sixfold_api.conditions import Condition, ConditionStatus, merge
from sixfold_api.kv_reuse import KVStore
from sixfold_api.names import (
    CLASSIFIER,
    ENGINE,
    GATEWAY,
    POLICY_KIND,
    SEQUENCE_ANNOTATION,
    component_name,
    config_map_name,
)
from sixfold_api.policy import EngineSpec, InferencePolicySpec, InferencePolicyStatus
from sixfold_operator import metrics
from sixfold_operator.builders.common import Manifest
from sixfold_operator.builders.config_map import config_map, current_sequence, next_config
from sixfold_operator.builders.workload import components, engine_deployment, gateway_deployment, service
from sixfold_operator.control.tickets import Ticket, TicketPlan
from sixfold_operator.control.view import remembered
from sixfold_operator.kube import ApiError
from sixfold_operator.outbox import Outbox
from sixfold_operator.reconcile.children import is_controlled_by
from sixfold_operator.reconcile.config_rollout import pods_to_poke, poke_attempt, reach, wait_seconds
from sixfold_operator.reconcile.context import Context
from sixfold_operator.reconcile.decisions import Decider
from sixfold_operator.reconcile.findings import Findings
from sixfold_operator.reconcile.observe import observe
from sixfold_operator.reconcile.policy_status import (
    build_status,
    decision_notes,
    locked_out,
    notes,
    parts_not_found,
    workload_verdict,
)
from sixfold_operator.reconcile.policy_weights import weights_under_way
from sixfold_operator.reconcile.rollout import is_ready, is_running, last_status
from sixfold_operator.reconcile.scaling import autoscale, ensure_deployment, sleep_or_wake
from sixfold_operator.reconcile.served import Load
from sixfold_operator.reconcile.status_writer import transition_notes, write_status
from sixfold_operator.reconcile.surroundings import attempt, exposure_refused, isolate, surround
from sixfold_operator.reconcile.tickets import existing_tickets, with_sinks, write_tickets

log = logging.getLogger(__name__)

ASK_AGAIN_SECONDS = 10.0
"""How often pods are asked that aren't ready, miss something, or share a Redis."""
REFUSED_RETRY_SECONDS = 10.0
SPEC = "Spec"
"""Reason of decisions that follow from the spec, and will again."""


@dataclass
class Progress:
    """When the current sequence was written, as far as this process knows. Lost at a restart, which only means
    that pods are poked once more."""

    sequence: int
    since_seconds: float
    measured: bool


class PolicyReconciler:
    def __init__(self, context: Context, decider: Decider, outbox: Outbox) -> None:
        self._context = context
        self._decider = decider
        self._outbox = outbox
        self._progress: dict[tuple[str, str], Progress] = {}

    async def reconcile(self, namespace: str, name: str) -> float | None:
        """One pass; returns after how many seconds to look again, or None. Raises ApiError."""
        policy = self._context.cache.get(POLICY_KIND, namespace, name)
        if policy is None or "deletionTimestamp" in policy["metadata"]:
            self._forget(namespace, name)
            return None
        try:
            spec = InferencePolicySpec.model_validate(policy["spec"])
        except ValidationError as error:
            await self._write_invalid(policy, error)
            return None
        findings, loads = observe(self._context.cache, self._decider, policy, spec)
        await self._record(findings)
        # The level first: it must reach the pods even if nothing else can be done.
        sequence, just_written = await self._write_config(findings)
        if just_written:
            await self._poke(findings, pods_to_poke(_all(findings), {}, sequence, 0, just_written=True))
        await isolate(self._context, findings)
        await self._apply_workload(findings, loads)
        await surround(self._context, findings)
        await autoscale(self._context, findings)
        await self._write_tickets(policy, spec, findings.decided.tickets)
        if sequence:
            await self._ask(findings, sequence, just_written)
            findings.look_seconds = await sleep_or_wake(self._context, findings)
        await self._write(findings)
        return self._again_seconds(findings, sequence)

    async def _write_tickets(self, policy: Manifest, spec: InferencePolicySpec, plan: TicketPlan) -> None:
        namespace = policy["metadata"]["namespace"]

        def told(ticket: Ticket) -> Ticket:
            return replace(ticket, status=self._outbox.told(namespace, ticket, spec.tickets.sinks))

        existing = existing_tickets(self._context.cache, policy)
        try:
            await write_tickets(self._context, policy, with_sinks(plan, existing, told))
        except ApiError as error:  # tickets tell people; what runs doesn't depend on them
            if not error.is_refusal:
                raise
            log.warning("tickets can't be written: %s", error, extra={"fields": {"namespace": namespace}})
        for name in plan.expired:
            self._outbox.forget(namespace, name)

    async def _record(self, findings: Findings) -> None:
        """The operator's own decisions stand in the status before anything follows from them: one that dies in
        between goes on from there."""
        state, decisions = findings.decided.state, findings.decided.decisions
        if not any(entry.reason != SPEC for entry in decisions):
            return
        policy = findings.policy
        status = remembered(last_status(InferencePolicyStatus, policy), state, decisions)
        await write_status(self._context, policy, status, decision_notes(decisions))
        place = policy["metadata"]["namespace"], policy["metadata"]["name"]
        findings.policy = self._context.cache.get(POLICY_KIND, *place) or policy
        findings.decided = replace(findings.decided, decisions=(), recorded=decisions)

    async def _write_config(self, findings: Findings) -> tuple[int, bool]:
        """Sequence of the configuration in the ConfigMap (0 if it couldn't be written), and whether it is new."""
        policy, namespace = findings.policy, findings.policy["metadata"]["namespace"]
        live = self._context.cache.get("ConfigMap", namespace, config_map_name(policy["metadata"]["name"]))
        before = last_status(InferencePolicyStatus, policy)
        last = before.config.sequence if before.config else 0
        unix_ms = int(self._context.clock.now().timestamp() * 1000)
        config = next_config(findings.effective, live, last, unix_ms, findings.canary)
        if await attempt(findings, self._context.children.ensure(config_map(policy, config))) is None:
            return 0, False
        just_written = config.sequence != current_sequence(live)
        key = namespace, policy["metadata"]["name"]
        known = self._progress.get(key)
        if just_written or known is None or known.sequence != config.sequence:
            self._progress[key] = Progress(config.sequence, self._context.clock.monotonic(), not just_written)
        return config.sequence, just_written

    async def _ask(self, findings: Findings, sequence: int, just_written: bool) -> None:
        """Take in what the pods say, and poke those that lag once more."""
        pods = _all(findings)
        findings.states = await self._context.pod_states.read(filter(is_running, pods))
        if not just_written:
            attempt = poke_attempt(self._elapsed_seconds(findings.policy))
            await self._poke(findings, pods_to_poke(pods, findings.states, sequence, attempt, just_written=False))
        findings.reach = reach(pods, findings.states, sequence)
        self._measure(findings)

    async def _poke(self, findings: Findings, values: dict[str, str]) -> None:
        """Annotate pods, all at once: it makes their kubelets refresh the mounted ConfigMap."""
        namespace = findings.policy["metadata"]["namespace"]

        async def one(pod: str, value: str) -> None:
            annotations = {SEQUENCE_ANNOTATION: value}
            try:
                answer = await self._context.kube.annotate("Pod", namespace, pod, annotations)
                self._context.cache.put(answer, written=("metadata",))
            except ApiError as error:
                if error.status != 404:
                    raise

        await asyncio.gather(*(one(pod, value) for pod, value in values.items()))

    def _measure(self, findings: Findings) -> None:
        metadata = findings.policy["metadata"]
        progress = self._progress[metadata["namespace"], metadata["name"]]
        if findings.reach.complete and not progress.measured:
            progress.measured = True
            if findings.reach.status.pods:
                metrics.CONFIG_SECONDS.observe(self._elapsed_seconds(findings.policy))

    async def _apply_workload(self, findings: Findings, loads: dict[str, Load] | None) -> None:
        """Services always; Deployments only when every variant can be served, so that what runs keeps running."""
        policy, spec = findings.policy, findings.spec
        deployments = dict(findings.deployments)
        for part in components(spec):
            await attempt(findings, self._context.children.ensure(service(policy, part)))
        if loads is None:
            return
        for part in components(spec):
            wanted = self._deployment(policy, spec, part, loads)
            applied = await attempt(findings, ensure_deployment(self._context, wanted))
            if applied is not None:
                deployments[part] = applied
        findings.deployments = deployments
        if CLASSIFIER not in components(spec):
            await self._remove_classifier(findings)

    def _deployment(self, policy: Manifest, spec: InferencePolicySpec, part: str, loads: dict[str, Load]) -> Manifest:
        if part == GATEWAY:
            return gateway_deployment(policy, spec, self._context.settings)
        engine: EngineSpec = spec.engine
        if part == CLASSIFIER and spec.classification is not None and spec.classification.engine is not None:
            engine = spec.classification.engine
        load = loads.get(part, Load())
        reuse = spec.generation and spec.generation.kv_cache_reuse
        redis = reuse.redis if reuse and part == ENGINE else None
        return engine_deployment(
            policy, part, engine, load.models, load.claims, self._context.settings, redis, spec.drain_seconds, spec.tls
        )

    async def _remove_classifier(self, findings: Findings) -> None:
        """It goes when the engine has taken over its work, not before."""
        metadata = findings.policy["metadata"]
        name = component_name(metadata["name"], CLASSIFIER)
        if not workload_verdict(findings).ok:
            return
        for kind in ("Deployment", "Service"):
            old = self._context.cache.get(kind, metadata["namespace"], name)
            if old is not None and is_controlled_by(old, metadata["uid"]):
                await self._context.kube.delete(old)

    def _again_seconds(self, findings: Findings, sequence: int) -> float | None:
        """The shortest of: pods lag or don't answer, come up, change weights, may lose their Redis; something stands
        in the way."""
        metadata, waits = findings.policy["metadata"], []
        look = self._decider.again_seconds(metadata["namespace"], metadata["name"], findings.decided.view)
        waits += [seconds for seconds in (look, findings.look_seconds) if seconds is not None]
        if sequence and not findings.reach.complete:
            waits.append(wait_seconds(self._elapsed_seconds(findings.policy)))
        if any(is_running(pod) and not is_ready(pod) for pod in _all(findings)):
            waits.append(ASK_AGAIN_SECONDS)
        if locked_out(findings) or parts_not_found(findings) or weights_under_way(findings) or _shares_redis(findings):
            waits.append(ASK_AGAIN_SECONDS)
        if findings.conflicts or findings.refusals or exposure_refused(findings):
            waits.append(REFUSED_RETRY_SECONDS)
        return min(waits, default=None)

    def _elapsed_seconds(self, policy: Manifest) -> float:
        progress = self._progress[policy["metadata"]["namespace"], policy["metadata"]["name"]]
        return self._context.clock.monotonic() - progress.since_seconds

    async def _write(self, findings: Findings) -> None:
        policy = findings.policy
        status = build_status(findings, self._context.clock.now())
        before = last_status(InferencePolicyStatus, policy)
        await write_status(self._context, policy, status, notes(before, status, findings.decided.decisions))
        for decision in (*findings.decided.recorded, *findings.decided.decisions):
            metrics.DECISIONS.labels(decision.decision, decision.reason).inc()
        place = policy["metadata"]["namespace"], policy["metadata"]["name"]
        metrics.levels(place, findings.effective.config.level, findings.spec.rollback_level)
        metrics.watched(place, findings.decided.observed)
        metrics.tickets(place, [ticket.status.phase for ticket in findings.decided.tickets.now])
        metrics.costs(place, findings.spec)

    async def _write_invalid(self, policy: Manifest, error: ValidationError) -> None:
        """A stored spec that this version can't read: an older operator beside newer CRDs."""
        before = last_status(InferencePolicyStatus, policy)
        generation = policy["metadata"]["generation"]
        message = f"This operator can't read the spec; nothing is changed. {error}"[:2048]
        condition = Condition(
            type="Ready",
            status=ConditionStatus.FALSE,
            reason="InvalidSpec",
            message=message,
            observed_generation=generation,
        )
        conditions = merge(before.conditions, [condition], self._context.clock.now())
        status = before.model_copy(update={"observed_generation": generation, "conditions": conditions})
        await write_status(self._context, policy, status, transition_notes(before.conditions, conditions, ("Ready",)))

    def _forget(self, namespace: str, name: str) -> None:
        self._decider.forget(namespace, name)
        if self._progress.pop((namespace, name), None) is not None:
            metrics.forget(namespace, name)


def _shares_redis(findings: Findings) -> bool:
    """Nothing in the cluster's API tells when Redis goes or comes back: only the pods do, when they are asked."""
    reuse = findings.effective.config.kv_reuse
    return reuse is not None and reuse.store is KVStore.REDIS


def _all(findings: Findings) -> list[Manifest]:
    return [pod for part in findings.pods.values() for pod in part]
