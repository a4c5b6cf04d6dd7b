"""Observations -> decisions: drift, pods and Deployments, variants, configuration, statuses, the cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sixfold_api.analysis import HashBy
from sixfold_api.conditions import Condition, ConditionStatus
from sixfold_api.control_status import Suspension
from sixfold_api.effective import effective
from sixfold_api.modes import Mode, ModeState
from sixfold_api.policy import InferencePolicySpec, InferencePolicyStatus, ModeStatus
from sixfold_api.runtime_config import CanaryConfig, PodState
from sixfold_api.variant import ModelVariantSpec
from sixfold_operator.builders.common import with_hash
from sixfold_operator.builders.job import Inputs
from sixfold_operator.cache import Cache
from sixfold_operator.controller import tags
from sixfold_operator.reconcile.children import covers, has_drifted
from sixfold_operator.reconcile.config_rollout import pods_to_poke, poke_attempt, reach, wait_seconds
from sixfold_operator.reconcile.context import Clock
from sixfold_operator.reconcile.decided import NOTHING_WATCHED, Decided
from sixfold_operator.reconcile.decisions import Decider
from sixfold_operator.reconcile.findings import Findings
from sixfold_operator.reconcile.policy_status import build_status, notes
from sixfold_operator.reconcile.rollout import Verdict, judge_deployment, last_status, pod_problem
from sixfold_operator.reconcile.served import resolve
from sixfold_operator.reconcile.status_writer import transition_notes
from sixfold_operator.reconcile.variant_plan import plan, size_text

NOW = datetime(2030, 1, 1, tzinfo=UTC)
READY = {"type": "Ready", "status": "True"}


def decided(spec: InferencePolicySpec) -> Decided:
    """What the spec alone says, where nothing is watched."""
    policy = {"metadata": {"name": "bot", "namespace": "n", "generation": 1}}
    return Decider(NOTHING_WATCHED, Clock(now=lambda: NOW)).decide(policy, spec, {}, lambda _: None)


def pod(name: str = "p", **status: Any) -> dict[str, Any]:
    status = {"phase": "Running", "podIP": "10.0.0.1", "conditions": [READY], **status}
    return {"kind": "Pod", "metadata": {"name": name, "creationTimestamp": "2030-01-01T00:00:00Z"}, "status": status}


def leaving(name: str) -> dict[str, Any]:
    gone = pod(name)
    gone["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z"
    return gone


def state(name: str, sequence: int, level: int = 3, **fields: Any) -> PodState:
    return PodState.model_validate(
        {"role": "engine", "pod": name, "ready": True, "sequence": sequence, "level": level, **fields}
    )


JSON = st.recursive(
    st.one_of(st.booleans(), st.integers(-5, 5), st.text("ab1mGi", max_size=3)),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("xyz", min_size=1, max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(JSON)
def test_what_is_wanted_covers_itself(value: Any) -> None:
    assert covers(json.loads(json.dumps(value)), value)


@given(st.dictionaries(st.text("xyz", min_size=1, max_size=2), JSON, max_size=4), JSON)
def test_defaults_of_the_api_are_no_drift(wanted: dict[str, Any], default: Any) -> None:
    assert covers({**wanted, "filledIn": default}, wanted)


@pytest.mark.parametrize(
    ("live", "wanted", "same"),
    [
        ({"cpu": "1"}, {"cpu": "1000m"}, True),
        ({"memory": "1Gi"}, {"memory": "1024Mi"}, True),
        ({"memory": "1G"}, {"memory": "1Gi"}, False),
        ({"n": "0.5"}, {"n": "500m"}, True),
        ({}, {"optional": False, "empty": {}, "text": ""}, True),
        ({"a": [1, 2]}, {"a": [1]}, False),
        ({"a": [{"x": 1, "default": 2}]}, {"a": [{"x": 1}]}, True),
        ({"replicas": 5}, {"replicas": 1}, False),
        ({"flag": True}, {"flag": 1}, True),
        (None, {"x": 1}, False),
        ({"hash": "12e99999999999999999"}, {"hash": "1"}, False),
    ],
)
def test_drift(live: Any, wanted: Any, same: bool) -> None:
    assert covers(live, wanted) is same


def test_labels_and_annotations_are_texts() -> None:
    """A hash may look like a number: `1e3` is not `1000` there."""
    wanted = with_hash({"metadata": {"name": "a", "labels": {"x": "1000"}}, "spec": {}})
    assert not has_drifted(wanted, wanted)
    assert has_drifted({**wanted, "metadata": {**wanted["metadata"], "labels": {"x": "1e3"}}}, wanted)


def test_a_field_that_is_no_longer_wanted_is_drift() -> None:
    before = {"metadata": {"name": "a", "labels": {}}, "spec": {"x": 1, "y": 2}}
    live = with_hash(before)
    assert not has_drifted(live, with_hash(before))
    assert has_drifted(live, with_hash({**before, "spec": {"x": 1}}))


def test_problems_of_pods_in_the_clusters_words() -> None:
    message = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    problem = pod_problem(pod(phase="Pending", conditions=[unscheduled]))
    assert problem is not None
    assert (problem.reason, message in problem.message) == ("Unschedulable", True)
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}
    last = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}
    problem = pod_problem(pod(containerStatuses=[{"name": "engine", "state": waiting, "lastState": last}]))
    assert problem is not None
    assert problem.reason == "CrashLoopBackOff"
    assert "OOMKilled with exit code 137" in problem.message
    creating = {"waiting": {"reason": "ContainerCreating"}}
    assert pod_problem(pod(containerStatuses=[{"name": "engine", "state": creating}])) is None


def deployment(**status: int) -> dict[str, Any]:
    return {"metadata": {"generation": 2}, "spec": {"replicas": 2}, "status": status}


@pytest.mark.parametrize(
    ("live", "reason"),
    [
        (deployment(observedGeneration=2), "RollingOut"),
        (deployment(observedGeneration=1, availableReplicas=2), "RollingOut"),
        (None, "NotCreated"),
    ],
)
def test_a_deployment_that_is_under_way(live: dict[str, Any] | None, reason: str) -> None:
    assert judge_deployment("engine", live, [], {})[:2] == (False, reason)


def counts(replicas: int, updated: int, available: int, observed: int = 2, wanted: int = 2) -> dict[str, Any]:
    status = {"observedGeneration": observed, "replicas": replicas, "updatedReplicas": updated}
    return {
        "metadata": {"generation": 2},
        "spec": {"replicas": wanted},
        "status": {**status, "availableReplicas": available},
    }


def test_old_pods_that_still_answer_are_not_ready() -> None:
    assert judge_deployment("engine", counts(2, 2, 2), [], {}).ok
    assert not judge_deployment("engine", counts(3, 1, 3), [], {}).ok
    assert not judge_deployment("engine", counts(2, 2, 2, observed=1), [], {}).ok
    assert judge_deployment("engine", counts(2, 2, 1), [], {}).reason == "PodsNotReady"
    assert judge_deployment("engine", counts(0, 0, 0, wanted=0), [], {}).reason == "ScaledToZero"


def test_a_model_that_cannot_be_loaded_is_the_reason() -> None:
    models = [{"name": "chat", "task": "Generation", "ready": False, "error": "tensor lm_head is missing"}]
    told = {"p": state("p", 1, ready=False, models=models)}
    verdict = judge_deployment("engine", counts(2, 2, 1), [pod("p", conditions=[])], told)
    assert verdict.reason == "ModelLoadFailed"
    assert "lm_head" in verdict.message


VARIANT = {
    "metadata": {"name": "chat", "namespace": "ns", "uid": "v", "generation": 1},
    "spec": {"task": "Generation", "source": {"uri": "pvc://models/chat"}},
}
SPEC = ModelVariantSpec.model_validate(VARIANT["spec"])
INPUTS = Inputs("pvc://models/chat")
FACTS = {
    "digest": "sha256:" + "a" * 64,
    "sizeBytes": 10,
    "parameters": 5,
    "architecture": "LlamaForCausalLM",
    "dtype": "bfloat16",
    "contextTokens": 4096,
    "vocabularyTokens": 1024,
    "tokenizerFingerprint": "sha256:" + "b" * 64,
}


def job(*conditions: str, reason: str = "") -> dict[str, Any]:
    entries = [{"type": type_, "status": "True", "reason": reason, "message": "m"} for type_ in conditions]
    return {
        "metadata": {"name": "chat-job", "uid": "j"},
        "status": {"conditions": entries, "completionTime": "2030-01-01T00:00:00Z"},
    }


def ended(summary: Any, exit_code: int = 0, finished: str = "2030-01-01T00:00:00Z") -> dict[str, Any]:
    message = summary if isinstance(summary, str) else json.dumps(summary)
    terminated = {"exitCode": exit_code, "finishedAt": finished, "message": message, "reason": "Error"}
    return pod(phase="Failed", conditions=[], containerStatuses=[{"state": {"terminated": terminated}}])


def test_the_way_of_a_variant() -> None:
    missing = plan(VARIANT, SPEC, None, [], INPUTS, ["models"], NOW)
    assert missing.verdict.reason == "ClaimMissing"
    assert missing.again_seconds
    assert plan(VARIANT, SPEC, None, [], INPUTS, [], NOW).create_job
    assert plan(VARIANT, SPEC, job(), [], INPUTS, [], NOW).verdict.reason == "Preparing"
    done = plan(VARIANT, SPEC, job("Complete"), [ended({"facts": FACTS})], INPUTS, [], NOW)
    assert done.verdict.ok
    assert done.artifact is not None
    assert (done.artifact.claim_name, done.artifact.path) == ("models", "chat")
    recorded = {**VARIANT, "status": {"artifact": done.artifact.to_dict()}}
    assert plan(recorded, SPEC, None, [], INPUTS, [], NOW).verdict.ok


def test_the_reasons_of_a_failed_preparation() -> None:
    failure = {"failure": {"reason": "CorruptWeights", "message": "model.safetensors is cut off"}}
    while_trying = plan(VARIANT, SPEC, job(), [ended(failure, 1)], INPUTS, [], NOW)
    assert while_trying.verdict.reason == "CorruptWeights"
    assert "tries again" in while_trying.verdict.message
    for last in ([ended(failure, 1)] * 3, [ended(failure, 1), ended(failure, 2)]):
        assert "tries again" not in plan(VARIANT, SPEC, job(), last, INPUTS, [], NOW).verdict.message
    assert plan(VARIANT, SPEC, job("Failed"), [ended(failure, 1)], INPUTS, [], NOW).verdict.reason == "CorruptWeights"
    killed = plan(VARIANT, SPEC, job("Failed", reason="DeadlineExceeded"), [ended("", 137)], INPUTS, [], NOW)
    assert killed.verdict.reason == "DeadlineExceeded"
    assert "137" in killed.verdict.message


@given(st.text(max_size=200) | st.sampled_from(["{}", "[]", "null", '{"facts": {}}', '{"failure": {"reason": "no"}}']))
def test_a_termination_message_that_makes_no_sense_is_never_an_artifact(message: str) -> None:
    late = datetime(2030, 1, 2, tzinfo=UTC)
    step = plan(VARIANT, SPEC, job("Complete"), [ended(message)], INPUTS, [], late)
    assert step.artifact is None
    assert step.discard_job


def test_a_summary_may_arrive_after_its_job() -> None:
    assert not plan(VARIANT, SPEC, job("Complete"), [], INPUTS, [], NOW).discard_job
    assert plan(VARIANT, SPEC, job("Complete"), [], INPUTS, [], datetime(2030, 1, 2, tzinfo=UTC)).discard_job


@pytest.mark.parametrize(
    ("size", "text"), [(5, "5 B"), (7_450_000, "7.1 MiB"), (2**40, "1.0 TiB"), (2**62, "4096.0 PiB")]
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert size_text(size) == text


def test_what_a_component_serves() -> None:
    artifact = {**FACTS, "claimName": "models", "path": "chat"}
    chat = {**VARIANT, "status": {"conditions": [READY], "artifact": artifact}}
    parsed = InferencePolicySpec.model_validate({"generation": {"variantRef": {"name": "chat"}}})
    served = resolve(parsed, {"chat": chat}.get)
    assert served.verdict.ok
    assert served.loads is not None
    assert served.loads["engine"].models[0].path == "/claims/models/chat"
    assert served.loads["engine"].claims == ["models"]
    assert resolve(parsed, {}.get).verdict.reason == "VariantMissing"
    assert resolve(parsed, {"chat": VARIANT}.get).verdict.reason == "VariantNotReady"
    wrong = {**chat, "spec": {**chat["spec"], "task": "Classification"}}
    assert resolve(parsed, {"chat": wrong}.get).verdict.reason == "WrongTask"
    going = {**chat, "metadata": {**chat["metadata"], "deletionTimestamp": "x"}}
    assert resolve(parsed, {"chat": going}.get).verdict.reason == "VariantMissing"


def test_a_status_of_a_newer_operator_is_read_as_far_as_it_goes() -> None:
    status = {"modes": [{"name": "Telepathy", "state": "Active"}], "effectiveLevel": 2, "level": {"target": 9}}
    read = last_status(InferencePolicyStatus, {"status": status})
    assert (read.effective_level, read.level, read.modes) == (2, None, [])


def test_how_far_a_configuration_has_reached() -> None:
    pods = [pod("a"), pod("b"), leaving("old"), pod("loading", conditions=[])]
    both = reach(pods, {"a": state("a", 5, 1), "b": state("b", 5, 1), "old": state("old", 1, 3)}, 5)
    assert both.verdict.ok
    assert (both.status.pods, both.status.applied, both.level) == (2, 2, 1)
    half = reach(pods, {"a": state("a", 5, 1), "b": state("b", 4, 3)}, 5)
    assert (half.verdict.reason, half.level, half.status.applied) == ("Waiting", None, 1)
    silent = reach(pods, {"a": state("a", 5, 1)}, 5)
    assert (silent.verdict.reason, silent.known, silent.level) == ("PodsUnreachable", False, None)
    refused = reach(pods, {"a": state("a", 4, config_error="level: 9"), "b": state("b", 5)}, 5)
    assert refused.verdict.reason == "ConfigRejected"
    assert "level: 9" in refused.verdict.message
    unknown = reach([pod("a")], {"a": state("a", 5, unknown_fields=["/stable/newer"])}, 5)
    assert unknown.verdict.ok
    assert "/stable/newer" in unknown.verdict.message
    assert reach([], {}, 5).verdict.reason == "NoReadyPods"


@pytest.mark.parametrize(("tenants", "ready"), [(0, "NoApiKeys"), (2, "NotCreated"), (None, "NotCreated")])
def test_a_gateway_that_lets_nobody_in_is_not_ready(tenants: int | None, ready: str) -> None:
    """The Secret is missing or empty: only the gateways know, and the status says it in words."""
    spec = InferencePolicySpec.model_validate(
        {"generation": {"variantRef": {"name": "chat"}}, "gateway": {"apiKeysSecretRef": {"name": "keys"}}}
    )
    findings = Findings(
        policy={"metadata": {"name": "bot", "namespace": "n", "generation": 1}},
        spec=spec,
        decided=decided(spec),
        effective=effective(spec),
        reach=reach([], {}, 0),
        variants=Verdict(True, "Ready", ""),
        deployments={},
        pods={},
        states={"gateway": state("gateway", 1, tenants=tenants), "engine": state("engine", 1)},
    )
    conditions = {entry.type: entry for entry in build_status(findings, NOW).conditions}
    assert conditions["Ready"].reason == ready
    assert "OpenGateway" not in conditions


def test_pods_that_go_without_redis_tell() -> None:
    """The operator never reads the Secret: a missing one, a wrong password and a dead server look alike to it."""
    redis = {"store": "Redis", "redis": {"urlSecretRef": {"name": "redis", "key": "url"}}}
    told = "Redis: /etc/sixfold/redis/url is missing; blocks are reused from this pod's memory only"
    states = {"b": state("b", 1, unsupported={"KVCacheReuse": told}), "a": state("a", 1)}

    def findings(reuse: dict[str, Any], level: int = 3, states: dict[str, PodState] = states) -> Findings:
        spec = InferencePolicySpec.model_validate(
            {"rollbackLevel": level, "generation": {"variantRef": {"name": "chat"}, "kvCacheReuse": reuse}}
        )
        return Findings(
            policy={"metadata": {"name": "bot", "namespace": "n", "generation": 1}},
            spec=spec,
            decided=decided(spec),
            effective=effective(spec),
            reach=reach([], {}, 0),
            variants=Verdict(True, "Ready", ""),
            deployments={},
            pods={},
            states=states,
        )

    degraded = build_status(findings(redis), NOW)
    (condition,) = (entry for entry in degraded.conditions if entry.type == "KVReuseDegraded")
    assert (condition.status, condition.message) == (ConditionStatus.TRUE, f"pod b: {told}")
    (mode,) = (mode for mode in degraded.modes if mode.name == "KVCacheReuse")
    assert (mode.state, mode.reason) == ("Unsupported", f"pod b: {told}")
    healthy = build_status(findings(redis, states={}), NOW)
    (note,) = (note for note in notes(healthy, degraded) if told in note.message)
    assert (note.reason, note.warning) == ("PodsGoWithout", True)
    for other in (findings(redis, states={"a": state("a", 1)}), findings(redis, level=2)):
        assert "KVReuseDegraded" not in {entry.type for entry in build_status(other, NOW).conditions}


def test_a_mode_on_trial_that_a_pod_cannot_run_is_unsupported_and_stays_so() -> None:
    """While it is tried, and after its trial ended because of that; once it is tried again, it is on trial."""
    spec = InferencePolicySpec.model_validate(
        {
            "generation": {"variantRef": {"name": "chat"}, "quantized": {"variantRef": {"name": "int8"}}},
            "canary": {"steps": [5]},
        }
    )
    found, why = decided(spec), "pod a: no kernel"

    def modes(
        states: dict[str, PodState], reason: str, *, tried: bool, before: Sequence[ModeStatus] = ()
    ) -> ModeStatus:
        off = Suspension(mode=Mode.QUANTIZED, reason=reason, since="2030-01-01T00:00:00Z")
        trial = CanaryConfig(percent=5, hash_by=HashBy.REQUEST, config=effective(spec).config) if tried else None
        findings = Findings(
            policy={
                "metadata": {"name": "bot", "namespace": "n", "generation": 1},
                "status": InferencePolicyStatus(modes=list(before)).to_dict(),
            },
            spec=spec,
            decided=replace(found, state=replace(found.state, suspended=(off,))),
            effective=effective(spec, suspended={Mode.QUANTIZED: reason}),
            reach=reach([], {}, 0),
            variants=Verdict(True, "Ready", ""),
            deployments={},
            pods={},
            states=states,
            canary=trial,
        )
        return next(mode for mode in build_status(findings, NOW).modes if mode.name is Mode.QUANTIZED)

    told = modes({"a": state("a", 1, unsupported={"Quantized": "no kernel"})}, "Canary", tried=True)
    assert (told.state, told.reason) == (ModeState.UNSUPPORTED, why)
    later = modes({"a": state("a", 2)}, "Unsupported", tried=False, before=[told])
    assert (later.state, later.reason) == (ModeState.UNSUPPORTED, why)
    other = modes({"a": state("a", 2)}, "AcceptanceRate", tried=False, before=[told])
    assert other.state is ModeState.SUSPENDED
    again = modes({"a": state("a", 3)}, "Canary", tried=True, before=[later])
    assert (again.state, again.reason) == (ModeState.CANARY, "on for 5 % of the requests")


def test_pods_are_poked_when_they_lag_and_never_twice_with_the_same_value() -> None:
    starting = pod("starting", conditions=[])
    pods = [pod("a"), starting, leaving("old")]
    assert pods_to_poke(pods, {}, 5, 0, just_written=True) == {"a": "5", "starting": "5"}
    assert pods_to_poke(pods, {}, 5, 0, just_written=False) == {"a": "5"}
    lagging = {"a": state("a", 4)}
    assert pods_to_poke(pods, lagging, 5, 2, just_written=False) == {"a": "5-2"}
    pods[0]["metadata"]["annotations"] = {"sixfold.dev/config-sequence": "5-2"}
    assert pods_to_poke(pods, lagging, 5, 2, just_written=False) == {}
    assert pods_to_poke(pods, {}, 5, 3, just_written=False) == {}
    assert pods_to_poke(pods, {"a": state("a", 5)}, 5, 3, just_written=False) == {}


def test_questions_become_rarer() -> None:
    assert [poke_attempt(seconds) for seconds in (0.0, 0.8, 3.0, 100.0)] == [0, 1, 2, 5]
    assert wait_seconds(0.0) == 0.1
    assert wait_seconds(4.0) == 1.0
    assert wait_seconds(1e6) == 60.0


def condition_of(type_: str, status: str, reason: str) -> Condition:
    return Condition(type=type_, status=ConditionStatus(status), reason=reason)


def test_events_tell_changes_once() -> None:
    waiting = condition_of("Ready", "False", "RollingOut")
    broken = condition_of("Ready", "False", "CrashLoopBackOff")
    good = condition_of("Ready", "True", "Ready")
    assert transition_notes([good], [good], ("Ready",)) == []
    assert [note.warning for note in transition_notes([good], [waiting], ("Ready",))] == [False]
    assert [note.warning for note in transition_notes([good], [broken], ("Ready",))] == [True]
    conflict = condition_of("Conflict", "True", "Conflict")
    assert [note.warning for note in transition_notes([], [conflict], ("Conflict",))] == [True]


def stored(kind: str, name: str, version: int, uid: str = "u", **fields: Any) -> dict[str, Any]:
    metadata = {"namespace": "ns", "name": name, "uid": uid, "resourceVersion": str(version)}
    return {"kind": kind, "metadata": {**metadata, **fields.pop("metadata", {})}, **fields}


def test_the_cache_keeps_the_newest_and_finds_by_owner() -> None:
    cache = Cache(tags)
    labels = {"labels": {"sixfold.dev/policy": "bot"}, "managedFields": [{"manager": "x"}]}
    assert cache.put(
        stored("Pod", "p", 5, metadata=labels, spec={"big": 1}, status={"phase": "Running", "qosClass": "x"})
    )
    assert not cache.put(stored("Pod", "p", 5))
    assert not cache.put(stored("Pod", "p", 4))
    (kept,) = cache.tagged("Pod", "ns", "policy/bot")
    assert "spec" not in kept
    assert "managedFields" not in kept["metadata"]
    assert kept["status"] == {"phase": "Running"}
    assert not cache.remove(stored("Pod", "p", 9, uid="another"))
    assert cache.remove(stored("Pod", "p", 9))
    assert list(cache.tagged("Pod", "ns", "policy/bot")) == []


def test_the_cache_finds_the_policies_of_a_variant() -> None:
    cache = Cache(tags)
    spec = {"generation": {"variantRef": {"name": "chat"}}, "classification": {"variantRef": {"name": "mood"}}}
    cache.put(stored("InferencePolicy", "bot", 1, spec=spec))
    references = {"quantized": {"variantRef": {"name": "small"}}, "speculative": {"draftVariantRef": {"name": "tiny"}}}
    cache.put(stored("InferencePolicy", "bot", 2, spec={**spec, "generation": {**spec["generation"], **references}}))
    for name in ("chat", "mood", "small", "tiny"):
        assert [policy["metadata"]["name"] for policy in cache.tagged("InferencePolicy", "ns", f"variant/{name}")] == [
            "bot"
        ]
    cache.put(stored("InferencePolicy", "bot", 3, spec={"generation": {"variantRef": {"name": "other"}}}))
    assert list(cache.tagged("InferencePolicy", "ns", "variant/chat")) == []


def test_the_cache_finds_the_variants_that_need_a_variant() -> None:
    cache = Cache(tags)
    cache.put(stored("ModelVariant", "chat", 1, spec={"source": {"uri": "pvc://models/chat"}}))
    cache.put(stored("ModelVariant", "small", 2, spec={"source": {"variantRef": {"name": "chat"}}}))
    cache.put(stored("ModelVariant", "tiny", 3, spec={"source": {"uri": "pvc://m/t"}, "draftFor": {"name": "chat"}}))
    found = [variant["metadata"]["name"] for variant in cache.tagged("ModelVariant", "ns", "variant/chat")]
    assert found == ["small", "tiny"]


def test_a_list_finds_what_the_watches_missed() -> None:
    cache = Cache(tags)
    for name, version in (("gone", 1), ("kept", 2), ("newer", 9)):
        cache.put(stored("Service", name, version))
    missed = cache.replace("Service", "ns", [stored("Service", "kept", 2), stored("Service", "new", 4)], 5)
    assert sorted(missed) == [("ns", "gone"), ("ns", "new")]
    assert sorted(cache.places("Service")) == [("ns", "kept"), ("ns", "new"), ("ns", "newer")]
