"""Exits and slices: what the Job is asked, what its summary says about the variant, what policies make of it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from sixfold_api.effective import effective
from sixfold_api.exit_heads import ExitHeads
from sixfold_api.modes import Mode, ModeState
from sixfold_api.policy import InferencePolicySpec, InferencePolicyStatus
from sixfold_api.runtime_config import PodState
from sixfold_api.subgraphs import SliceSpec
from sixfold_api.variant import ModelVariantSpec
from sixfold_operator.builders.job import Inputs, claims, preparation_job
from sixfold_operator.reconcile.config_rollout import reach
from sixfold_operator.reconcile.context import Clock
from sixfold_operator.reconcile.decided import NOTHING_WATCHED, Decided
from sixfold_operator.reconcile.decisions import Decider
from sixfold_operator.reconcile.findings import Findings
from sixfold_operator.reconcile.policy_status import build_status, notes
from sixfold_operator.reconcile.policy_weights import weights_under_way
from sixfold_operator.reconcile.rollout import Verdict
from sixfold_operator.reconcile.served import Served, resolve
from sixfold_operator.reconcile.variant_plan import plan, recorded, status_of
from sixfold_operator.settings import OperatorSettings

NOW = datetime(2030, 1, 1, tzinfo=UTC)
FACTS: dict[str, Any] = {
    "digest": "sha256:" + "a" * 64,
    "sizeBytes": 10,
    "parameters": 5,
    "architecture": "BertForSequenceClassification",
    "dtype": "float32",
    "contextTokens": 512,
    "vocabularyTokens": 1024,
    "tokenizerFingerprint": "sha256:" + "b" * 64,
}
CHOICE = {
    "depths": [2, 4],
    "thresholds": ["0.93", "0.88"],
    "exitRate": "0.713542",
    "meanLayers": "3.412",
    "disagreement": "0.014",
    "disagreementBound": "0.029",
}
NO_EXIT = {"depths": [], "thresholds": [], "exitRate": "0", "meanLayers": "6"}
REPORT: dict[str, Any] = {
    "layers": 6,
    "calibrated": CHOICE,
    "quantile": CHOICE,
    "samples": 2000,
    "meanLayers": "3.5",
    "disagreement": "0.021",
    "accuracy": "0.902",
    "fullAccuracy": "0.904",
    "calibrationError": "0.012",
}
NER = {"name": "ner", "task": "TokenClassification", "sizeBytes": 4096}
TOPIC = {"name": "topic", "task": "Classification", "sizeBytes": 2048}
EXITING: dict[str, Any] = {
    "exitHeads": {"training": {"uri": "pvc://training/t.jsonl", "samples": 512}, "depths": [2, 4]},
    "calibration": {"uri": "pvc://texts/c.jsonl"},
    "evaluation": {"uri": "pvc://texts/e.jsonl"},
    "artifact": {"claimName": "models"},
    "slices": [
        {"name": "topic", "checkpoint": "pvc://tuned/topic"},
        {"name": "ner", "task": "TokenClassification", "training": {"uri": "pvc://entities/n.jsonl"}},
        {"name": "old"},
    ],
}


def decided(spec: InferencePolicySpec) -> Decided:
    """What the spec alone says, where nothing is watched."""
    policy = {"metadata": {"name": "bot", "namespace": "n", "generation": 1}}
    return Decider(NOTHING_WATCHED, Clock(now=lambda: NOW)).decide(policy, spec, {}, lambda _: None)


def variant(name: str = "intent", task: str = "Classification", /, **fields: Any) -> dict[str, Any]:
    """A prepared variant as it lies in the API, with `exits` and slices (`has`) in its status."""
    status: dict[str, Any] = {
        "conditions": [{"type": "Ready", "status": "True", "reason": "Prepared"}],
        "artifact": {**FACTS, "claimName": "models", "path": name},
        "slices": fields.pop("has", []),
    }
    if "exits" in fields:
        status["exits"] = fields.pop("exits")
    return {
        "apiVersion": "sixfold.dev/v1alpha1",
        "kind": "ModelVariant",
        "metadata": {"name": name, "namespace": "ns", "uid": name, "generation": 1},
        "spec": {"task": task, "source": {"uri": f"pvc://source/{name}"}, **fields},
        "status": status,
    }


def job_of(fields: dict[str, Any]) -> tuple[dict[str, str], dict[str, bool | None]]:
    """Options of `sixfold prepare` and the claims' mounts (path -> read-only) of a classifier's Job."""
    fresh = variant("intent", "Classification", **fields)
    spec = ModelVariantSpec.model_validate(fresh["spec"])
    job = preparation_job(fresh, spec, Inputs("pvc://source/intent"), OperatorSettings(runtime_image="r:1"))
    container = job["spec"]["template"]["spec"]["containers"][0]
    _, *args = container["args"]
    mounts = {mount["mountPath"]: mount.get("readOnly") for mount in container["volumeMounts"]}
    return dict(zip(args[::2], args[1::2], strict=True)), mounts


def test_a_job_learns_which_exits_and_slices_to_make() -> None:
    args, mounts = job_of(EXITING)
    heads = ExitHeads.model_validate_json(args["--exit-heads"])
    assert (heads.depths, heads.training.samples, heads.max_disagreement) == ([2, 4], 512, "0.03")
    slices = [SliceSpec.model_validate(entry) for entry in json.loads(args["--slices"])]
    assert [(entry.name, entry.is_made) for entry in slices] == [("topic", True), ("ner", True), ("old", False)]
    assert (args["--artifact-claim"], args["--artifact-path"]) == ("models", "intent")
    read = {f"/claims/{claim}": True for claim in ("source", "training", "texts", "tuned", "entities")}
    assert mounts == {"/tmp": None, "/claims/models": None, **read}
    spec = ModelVariantSpec.model_validate(variant("intent", **EXITING)["spec"])
    assert claims(spec, Inputs("pvc://source/intent")) == {path.removeprefix("/claims/") for path in mounts} - {"/tmp"}


def test_a_job_that_only_verifies_slices_writes_nothing() -> None:
    args, mounts = job_of({"slices": [{"name": "ner", "task": "TokenClassification"}]})
    assert json.loads(args["--slices"]) == [{"name": "ner", "task": "TokenClassification"}]
    assert not {"--exit-heads", "--artifact-claim"} & set(args)
    assert mounts == {"/tmp": None, "/claims/source": True}
    assert "--slices" not in job_of({})[0]


def test_a_variant_says_what_its_exits_and_slices_are() -> None:
    fresh = variant("intent", **EXITING)
    spec = ModelVariantSpec.model_validate(fresh["spec"])
    summary = {"facts": FACTS, "exits": REPORT, "slices": [TOPIC, NER]}
    ended = {"exitCode": 0, "finishedAt": "2030-01-01T00:00:00Z", "message": json.dumps(summary)}
    pod = {"metadata": {"name": "p"}, "status": {"containerStatuses": [{"state": {"terminated": ended}}]}}
    complete = [{"type": "Complete", "status": "True"}]
    job = {"metadata": {"name": "j"}, "status": {"conditions": complete, "completionTime": NOW.isoformat()}}
    step = plan({**fresh, "status": {}}, spec, job, [pod], Inputs("pvc://source/intent"), [], NOW)
    status = status_of(step, fresh, NOW)
    assert status.exits is not None
    assert status.exits.calibrated.depths == [2, 4]
    assert [(entry.name, entry.size_bytes) for entry in status.slices] == [("topic", 2048), ("ner", 4096)]
    again = plan({**fresh, "status": status.to_dict()}, spec, None, [], Inputs(""), [], NOW)
    assert status_of(again, fresh, NOW).to_dict() == status.to_dict(), "what was measured stands as long as the weights"


def exits_condition(report: dict[str, Any] | None) -> tuple[str, str, str] | None:
    one = variant("intent", **EXITING, **({} if report is None else {"exits": report}))
    spec = ModelVariantSpec.model_validate(one["spec"])
    status = status_of(plan(one, spec, None, [], Inputs(""), [], NOW), one, NOW)
    (ready,) = (entry for entry in status.conditions if entry.type == "Ready")
    assert ready.status == "True", "exits that save nothing are a warning"
    found = (entry for entry in status.conditions if entry.type == "ExitsCalibrated")
    return next(((entry.status.value, entry.reason, entry.message) for entry in found), None)


def test_the_condition_of_exits_has_their_figures() -> None:
    assert exits_condition(REPORT) == (
        "True",
        "Calibrated",
        "exit rate 0.71, 3.4 of 6 layers on average, at most 2.9% disagree (95%), 2.1% on held-out text",
    )
    broken = exits_condition(REPORT | {"disagreement": "0.05"})
    assert broken is not None
    assert broken[:2] == ("False", "BoundExceeded")
    assert "5% on held-out text; the calibration text isn't like it" in broken[2]
    for nothing in (NO_EXIT, {"exitRate": "0", "meanLayers": "6"}):
        none = exits_condition(REPORT | {"calibrated": CHOICE | nothing})
        assert none is not None
        assert none[:2] == ("False", "NoSafeExit")
        assert "6 layers" in none[2]
    assert exits_condition(None) is None


def test_a_spec_that_cannot_be_read_takes_nothing_from_the_status() -> None:
    one = variant("intent", exits=REPORT, has=[NER])
    before = status_of(plan(one, ModelVariantSpec.model_validate(one["spec"]), None, [], Inputs(""), [], NOW), one, NOW)
    kept = status_of(recorded(before, Verdict(False, "InvalidSpec", "m")), one, NOW)
    assert (kept.exits, kept.slices, kept.artifact) == (before.exits, before.slices, before.artifact)
    assert "InvalidSpec" in {entry.reason for entry in kept.conditions}


def labelling(generation: dict[str, Any] | None = None, **blocks: Any) -> InferencePolicySpec:
    spec: dict[str, Any] = {"classification": {"variantRef": {"name": "intent"}, **blocks}}
    if generation is not None:
        spec["generation"] = {"variantRef": {"name": "chat"}, **generation}
    return InferencePolicySpec.model_validate(spec)


def served(policy: InferencePolicySpec, *variants: dict[str, Any]) -> Served:
    found = {one["metadata"]["name"]: one for one in (variant("chat", "Generation"), *variants)}
    return resolve(policy, found.get)


def tasks(*names: str) -> dict[str, Any]:
    return {"tasks": [{"name": name} for name in names]}


@pytest.mark.parametrize("task", ["Classification", "TokenClassification"])
def test_both_kinds_of_classifier_are_served(task: str) -> None:
    result = served(labelling(), variant("intent", task))
    assert result.verdict.ok
    assert result.loads is not None
    (model,) = result.loads["engine"].models
    assert (model.name, model.task, model.path) == ("intent", task, "/claims/models/intent")
    assert (result.unsupported, result.warnings) == ({}, {})
    wrong = served(labelling(), variant("intent", "Generation"))
    assert wrong.verdict.reason == "WrongTask"
    assert "Classification or TokenClassification is needed" in wrong.verdict.message
    generating = InferencePolicySpec.model_validate({"generation": {"variantRef": {"name": "intent"}}})
    assert served(generating, variant("intent", task)).verdict.reason == "WrongTask"


@pytest.mark.parametrize(
    ("early_exit", "one", "why"),
    [
        ({}, variant("intent"), "has no exit heads"),
        ({"rule": "Quantile"}, variant("intent"), "has no exit heads"),
        ({}, variant("intent", "TokenClassification"), "labels tokens"),
        ({}, variant("intent", exits=REPORT), None),
        ({}, variant("intent", exits=REPORT | {"calibrated": CHOICE | NO_EXIT}), "in at most 0.03 of the texts"),
        (
            {"maxDisagreement": "0.01"},
            variant("intent", exits=REPORT | {"calibrated": CHOICE | NO_EXIT}),
            "in at most 0.01 of the texts",
        ),
        ({"maxDisagreement": "0.1"}, variant("intent", exits=REPORT | {"calibrated": CHOICE | NO_EXIT}), None),
        ({"lengthRelaxation": "0"}, variant("intent", exits=REPORT | {"calibrated": CHOICE | NO_EXIT}), None),
        ({"rule": "Quantile"}, variant("intent", exits=REPORT | {"calibrated": CHOICE | NO_EXIT}), None),
        ({"rule": "Quantile"}, variant("intent", exits=REPORT | {"quantile": CHOICE | NO_EXIT}), "the rule Quantile"),
        (
            {"rule": "Fixed", "threshold": "0.9"},
            variant("intent", exits=REPORT | {"calibrated": CHOICE | NO_EXIT, "quantile": CHOICE | NO_EXIT}),
            None,
        ),
    ],
)
def test_a_classifier_without_exits_runs_without_the_mode(
    early_exit: dict[str, Any], one: dict[str, Any], why: str | None
) -> None:
    policy = labelling(earlyExit=early_exit)
    result = served(policy, one)
    assert result.verdict.ok
    assert (Mode.EARLY_EXIT in result.unsupported) is (why is not None)
    if why is not None:
        reason = result.unsupported[Mode.EARLY_EXIT]
        assert reason.startswith("ModelVariant intent ")
        assert why in reason
        assert len(reason) <= 256
    config = effective(policy, unsupported=result.unsupported).config
    assert (config.early_exit is None) is (why is not None)


def test_exits_count_by_the_budget_that_the_variant_was_made_with() -> None:
    heads = EXITING["exitHeads"] | {"maxDisagreement": "0.005"}
    strict = variant("intent", exitHeads=heads, exits=REPORT | {"calibrated": CHOICE | NO_EXIT})
    assert "at most 0.005" in served(labelling(earlyExit={}), strict).unsupported[Mode.EARLY_EXIT]
    assert served(labelling(earlyExit={"maxDisagreement": "0.01"}), strict).unsupported == {}


def test_tasks_that_the_variants_lack_are_told_and_the_policy_goes_on() -> None:
    policy = labelling({"subgraphs": tasks("sql")}, subgraphs=tasks("ner", "poetry"))
    result = served(policy, variant("intent", has=[NER, TOPIC]))
    assert result.loads is not None
    assert result.unsupported == {}
    missing = result.warnings["TasksMissing"]
    assert missing.reason == "NoSuchSlice"
    assert (
        "classification.subgraphs: ModelVariant intent has no slice for poetry; it has ner, topic; "
        "generation.subgraphs: ModelVariant chat has no slice for sql; it has none. "
    ) in missing.message
    chat = variant("chat", "Generation", has=[{"name": "sql", "task": "Generation", "sizeBytes": 1}])
    assert served(policy, variant("intent", has=[NER]), chat).warnings["TasksMissing"].message.count("no slice") == 1
    whole = labelling({"subgraphs": tasks("sql")}, subgraphs=tasks("ner"))
    assert served(whole, variant("intent", has=[NER]), chat).warnings == {}


def test_without_a_single_task_the_mode_does_not_run() -> None:
    result = served(labelling(subgraphs=tasks("ner")), variant("intent"))
    assert "has no slice for ner; it has none" in result.unsupported[Mode.SUBGRAPHS]
    assert "TasksMissing" in result.warnings
    unknown = served(labelling(subgraphs=tasks("ner")))
    assert (unknown.verdict.reason, unknown.unsupported, unknown.warnings) == ("VariantMissing", {}, {})


def test_the_list_of_missing_tasks_is_bounded() -> None:
    many = [f"a-task-with-quite-a-long-name-{number:02}" for number in range(32)]
    slices = [{"name": f"have-{number:02}", "task": "Classification", "sizeBytes": 1} for number in range(32)]
    message = served(labelling(subgraphs=tasks(*many)), variant("intent", has=slices)).warnings["TasksMissing"].message
    assert message.count(" and 20 more") == 2
    assert len(message) < 1024


@pytest.mark.parametrize(
    ("one", "used"),
    [
        (variant("intent"), True),
        (variant("intent", "TokenClassification", has=[NER, TOPIC]), True),
        (variant("intent", "TokenClassification", has=[NER]), False),
        (variant("intent", "TokenClassification"), False),
    ],
)
def test_labels_of_tokens_are_not_escalated(one: dict[str, Any], used: bool) -> None:
    escalate = {"belowConfidence": "0.6", "promptTemplate": "{text}"}
    found = served(labelling({}, escalate=escalate, subgraphs=tasks("ner", "topic")), one).warnings
    assert ("EscalationUnused" in found) is not used


def findings(policy: InferencePolicySpec, result: Served, *states: PodState) -> Findings:
    return Findings(
        policy={"metadata": {"name": "bot", "namespace": "n", "generation": 1}},
        spec=policy,
        decided=decided(policy),
        effective=effective(policy, unsupported=result.unsupported),
        reach=reach([], {}, 0),
        variants=result.verdict,
        deployments={},
        pods={},
        states={state.pod: state for state in states},
        warnings=result.warnings,
        missing_tasks=result.missing_tasks,
    )


def test_a_policys_status_says_what_is_missing_while_it_is() -> None:
    policy = labelling(earlyExit={}, subgraphs=tasks("ner", "poetry"))
    status = build_status(findings(policy, served(policy, variant("intent", has=[NER]))), NOW)
    seen = {entry.type: (entry.status, entry.reason) for entry in status.conditions}
    assert seen["TasksMissing"] == ("True", "NoSuchSlice")
    assert seen["VariantsReady"] == ("True", "Ready")
    told = {(note.reason, note.warning) for note in notes(InferencePolicyStatus(), status)}
    assert ("NoSuchSlice", True) in told
    assert "ModeUnsupported" in {reason for reason, _ in told}
    whole = variant("intent", exits=REPORT, has=[NER, {"name": "poetry", "task": "Classification", "sizeBytes": 1}])
    healthy = build_status(findings(policy, served(policy, whole)), NOW)
    assert "TasksMissing" not in {entry.type for entry in healthy.conditions}
    assert {mode.name for mode in healthy.modes if mode.state is ModeState.ACTIVE} == {Mode.EARLY_EXIT, Mode.SUBGRAPHS}


def test_what_a_pod_cannot_do_joins_in() -> None:
    policy = labelling(earlyExit={}, subgraphs=tasks("ner"))
    unable = PodState.model_validate(
        {
            "role": "engine",
            "pod": "e1",
            "ready": True,
            "sequence": 1,
            "level": 3,
            "unsupported": {"EarlyExit": "exits.safetensors is damaged", "Subgraphs": "slices/ner: other trunk"},
        }
    )
    result = served(policy, variant("intent", exits=REPORT, has=[NER]))
    modes = {mode.name: mode for mode in build_status(findings(policy, result, unable), NOW).modes}
    assert modes[Mode.EARLY_EXIT].reason == "pod e1: exits.safetensors is damaged"
    assert modes[Mode.SUBGRAPHS].state is ModeState.UNSUPPORTED


def test_a_task_that_a_pod_cannot_serve_is_told_while_it_lasts() -> None:
    policy = labelling(subgraphs=tasks("ner", "topic"))
    result = served(policy, variant("intent", has=[NER, TOPIC]))

    def told(errors: dict[str, str]) -> PodState:
        model = {"name": "intent", "task": "Classification", "ready": True, "sliceErrors": errors}
        state = {"role": "engine", "pod": "e1", "ready": True, "sequence": 1, "level": 3, "models": [model]}
        return PodState.model_validate(state)

    ill = findings(policy, result, told({"topic": "slices/topic.safetensors is damaged", "ner": "other trunk"}))
    status = build_status(ill, NOW)
    (failed,) = (entry for entry in status.conditions if entry.type == "SlicesFailed")
    assert (failed.status, failed.reason) == ("True", "LoadFailed")
    assert failed.message == "pod e1: intent: ner: other trunk; topic: slices/topic.safetensors is damaged"
    assert ("LoadFailed", True) in {(note.reason, note.warning) for note in notes(InferencePolicyStatus(), status)}
    assert weights_under_way(ill), "the pod is asked again until it is well"
    well = findings(policy, result, told({}))
    assert "SlicesFailed" not in {entry.type for entry in build_status(well, NOW).conditions}
    assert not weights_under_way(well)
    lacking = served(policy, variant("intent", has=[NER]))
    known = findings(policy, lacking, told({"topic": "slices/topic.safetensors is missing"}))
    assert {"TasksMissing", "SlicesFailed"} & {entry.type for entry in build_status(known, NOW).conditions} == {
        "TasksMissing"
    }
    assert not weights_under_way(known)
