"""Variants that need variants, what quantising and drafting cost, and what a policy makes of it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from sixfold_api.effective import effective
from sixfold_api.modes import Mode, ModeState
from sixfold_api.policy import EngineStatus, InferencePolicySpec, InferencePolicyStatus
from sixfold_api.runtime_config import PodState
from sixfold_api.scalars import FullWeights
from sixfold_api.variant import ModelVariantSpec
from sixfold_operator.builders.job import Inputs
from sixfold_operator.reconcile.config_rollout import reach
from sixfold_operator.reconcile.context import Clock
from sixfold_operator.reconcile.decided import NOTHING_WATCHED, Decided
from sixfold_operator.reconcile.decisions import Decider
from sixfold_operator.reconcile.findings import Findings
from sixfold_operator.reconcile.inputs import find_inputs
from sixfold_operator.reconcile.policy_status import build_status, notes
from sixfold_operator.reconcile.policy_weights import weights_under_way
from sixfold_operator.reconcile.rollout import Verdict
from sixfold_operator.reconcile.served import Served, resolve
from sixfold_operator.reconcile.variant_plan import VariantPlan, plan, status_of

NOW = datetime(2030, 1, 1, tzinfo=UTC)
TEXT = {"uri": "pvc://models/text.jsonl"}
FACTS: dict[str, Any] = {
    "digest": "sha256:" + "a" * 64,
    "sizeBytes": 10,
    "parameters": 5,
    "architecture": "LlamaForCausalLM",
    "dtype": "bfloat16",
    "contextTokens": 4096,
    "vocabularyTokens": 1024,
    "tokenizerFingerprint": "sha256:" + "b" * 64,
}
OTHER_TOKENIZER = {"tokenizerFingerprint": "sha256:" + "c" * 64}
QUALITY = {
    "metric": "perplexity",
    "source": "12.25",
    "prepared": "12.31",
    "loss": "0.49",
    "budget": "1",
    "samples": 64,
    "tries": 2,
}
DRAFT = {"target": "chat", "latencyRatio": "0.12", "parameterRatio": "0.08", "kl": "0.11"}
QUANTISED = {
    "source": {"variantRef": {"name": "chat"}},
    "precision": {"scheme": "GPTQ"},
    "calibration": {"uri": "pvc://models/calibration.jsonl"},
    "evaluation": TEXT,
    "artifact": {"claimName": "models"},
}
DRAFTING = {"draftFor": {"name": "chat"}, "evaluation": TEXT}


def decided(spec: InferencePolicySpec) -> Decided:
    """What the spec alone says, where nothing is watched."""
    policy = {"metadata": {"name": "bot", "namespace": "n", "generation": 1}}
    return Decider(NOTHING_WATCHED, Clock(now=lambda: NOW)).decide(policy, spec, {}, lambda _: None)


def variant(name: str, ready: str = "True", reason: str = "Prepared", /, **fields: Any) -> dict[str, Any]:
    """A variant as it lies in the API; `facts` join those of its artifact."""
    facts = fields.pop("facts", {})
    spec = {"task": "Generation", "source": {"uri": f"pvc://models/{name}"}, **fields}
    status: dict[str, Any] = {"conditions": [{"type": "Ready", "status": ready, "reason": reason, "message": "m"}]}
    if ready == "True":
        status["artifact"] = {**FACTS, **facts, "claimName": "models", "path": name}
    metadata = {"name": name, "namespace": "ns", "uid": name, "generation": 1}
    return {"metadata": metadata, "spec": spec, "status": status}


def inputs_of(one: dict[str, Any], *others: dict[str, Any]) -> Inputs | Verdict:
    found = {other["metadata"]["name"]: other for other in (one, *others)}
    return find_inputs(one["metadata"]["name"], ModelVariantSpec.model_validate(one["spec"]), found.get)


def test_a_variant_waits_for_the_variants_that_it_is_made_from() -> None:
    quantised, draft = variant("small", **QUANTISED), variant("tiny", **DRAFTING)
    assert inputs_of(variant("chat")) == Inputs("pvc://models/chat")
    assert inputs_of(quantised, variant("chat")) == Inputs("pvc://models/chat")
    assert inputs_of(draft, variant("chat")) == Inputs("pvc://models/tiny", "pvc://models/chat")
    for one in (quantised, draft):
        for others, reason in (
            ([], "VariantMissing"),
            ([variant("chat", "False", "Preparing")], "VariantNotReady"),
            ([variant("chat", task="Classification")], "WrongTask"),
            ([variant("chat", "False", source={"variantRef": {"name": one["metadata"]["name"]}})], "VariantCycle"),
        ):
            waiting = inputs_of(one, *others)
            assert isinstance(waiting, Verdict)
            assert (waiting.ok, waiting.reason) == (False, reason)
            assert "chat" in waiting.message
    itself = inputs_of(variant("chat", "False", source={"variantRef": {"name": "chat"}}))
    assert isinstance(itself, Verdict)
    assert itself.reason == "VariantCycle"
    loop = [
        variant(one, "False", source={"variantRef": {"name": other}}) for one, other in (("chat", "b"), ("b", "chat"))
    ]
    behind = inputs_of(variant("tiny", **DRAFTING), *loop)
    assert isinstance(behind, Verdict)
    assert behind.reason == "VariantNotReady"


def job(*conditions: str) -> dict[str, Any]:
    entries = [{"type": type_, "status": "True", "reason": "PodFailurePolicy"} for type_ in conditions]
    return {"metadata": {"name": "j", "uid": "j"}, "status": {"conditions": entries, "completionTime": NOW.isoformat()}}


def ended(summary: dict[str, Any], exit_code: int = 0) -> dict[str, Any]:
    terminated = {"exitCode": exit_code, "finishedAt": "2030-01-01T00:00:00Z", "message": json.dumps(summary)}
    status = {"phase": "Failed", "containerStatuses": [{"state": {"terminated": terminated}}]}
    return {"metadata": {"name": "p"}, "status": status}


def conditions_of(one: dict[str, Any], step: VariantPlan) -> dict[str, tuple[str, str, str]]:
    status = status_of(step, one, NOW)
    return {entry.type: (entry.status.value, entry.reason, entry.message) for entry in status.conditions}


def planned(one: dict[str, Any], *how: str, summary: dict[str, Any]) -> VariantPlan:
    """The plan for a variant whose Job ended so, with that summary."""
    fresh = {**one, "status": {}}
    spec = ModelVariantSpec.model_validate(one["spec"])
    pods = [ended(summary, 0 if how == ("Complete",) else 2)]
    return plan(fresh, spec, job(*how), pods, Inputs("pvc://models/chat"), [], NOW)


def test_quantised_weights_within_their_budget() -> None:
    small = variant("small", **QUANTISED)
    step = planned(small, "Complete", summary={"facts": FACTS, "quality": QUALITY})
    assert step.artifact is not None
    assert (step.artifact.claim_name, step.artifact.path) == ("models", "small")
    seen = conditions_of(small, step)
    assert seen["Ready"][:2] == ("True", "Prepared")
    assert seen["WithinBudget"][:2] == ("True", "WithinBudget")
    assert "12.31, 12.25 before: 0.49% lost of at most 1%" in seen["WithinBudget"][2]
    assert "DraftCompatible" not in seen
    status = status_of(step, small, NOW)
    assert status.quality is not None
    again = plan({**small, "status": status.to_dict()}, step_spec(small), None, [], Inputs(""), [], NOW)
    assert conditions_of(small, again) == seen, "what was measured stands as long as the artifact"


def step_spec(one: dict[str, Any]) -> ModelVariantSpec:
    return ModelVariantSpec.model_validate(one["spec"])


@pytest.mark.parametrize("how", ["Failed", "Complete"])
def test_quantised_weights_over_their_budget_are_not_ready(how: str) -> None:
    """The Job says so by failing; weights that came through all the same aren't served either."""
    small = variant("small", **QUANTISED)
    quality = {**QUALITY, "loss": "3.5", "tries": 4}
    failure = {"reason": "OverBudget", "message": "perplexity rose by 3.5% at 4 bits"}
    summary = {"quality": quality, **({"failure": failure} if how == "Failed" else {"facts": FACTS})}
    step = planned(small, how, summary=summary)
    seen = conditions_of(small, step)
    assert seen["Ready"][:2] == ("False", "OverBudget")
    assert seen["WithinBudget"][:2] == ("False", "OverBudget")
    assert "3.5% lost of at most 1%" in seen["WithinBudget"][2]
    assert "4 precisions" in seen["WithinBudget"][2]
    assert seen["Prepared"][0] == ("False" if how == "Failed" else "True")
    policy = spec(quantized={"variantRef": {"name": "small"}})
    found = {"chat": variant("chat"), "small": variant("small", *seen["Ready"][:2], **QUANTISED)}
    assert resolve(policy, found.get).verdict.reason == "VariantNotReady"


@pytest.mark.parametrize(
    ("figures", "status", "reason"),
    [
        ({}, "True", "Compatible"),
        ({"latencyRatio": "0.2", "parameterRatio": "0.1", "kl": "0.149999"}, "True", "Compatible"),
        ({"latencyRatio": "0.31"}, "False", "DraftTooSlow"),
        ({"parameterRatio": "0.5"}, "False", "DraftTooLarge"),
        ({"kl": "0.15"}, "False", "DraftUnlike"),
        ({"kl": "0.4", "latencyRatio": "0.31"}, "False", "DraftTooSlow"),
        ({"warnings": ["pad id 0, the target's is 3"]}, "False", "DraftDiffers"),
    ],
)
def test_a_draft_that_may_not_pay_is_a_warning(figures: dict[str, Any], status: str, reason: str) -> None:
    tiny = variant("tiny", **DRAFTING)
    step = planned(tiny, "Complete", summary={"facts": FACTS, "draft": {**DRAFT, **figures}})
    seen = conditions_of(tiny, step)
    assert seen["Ready"][:2] == ("True", "Prepared")
    assert seen["DraftCompatible"][:2] == (status, reason)
    for figure in figures.values():
        assert (figure if isinstance(figure, str) else figure[0]) in seen["DraftCompatible"][2]
    assert "WithinBudget" not in seen


def test_a_draft_with_another_tokenizer_is_refused() -> None:
    tiny = variant("tiny", **DRAFTING)
    failure = {"reason": "TokenizerMismatch", "message": "tiny has 512 tokens, chat 1024"}
    seen = conditions_of(tiny, planned(tiny, "Failed", summary={"failure": failure}))
    assert seen["Ready"][:2] == ("False", "TokenizerMismatch")
    assert seen["DraftCompatible"][:2] == ("False", "TokenizerMismatch")
    plain = variant("chat")
    assert "DraftCompatible" not in conditions_of(plain, planned(plain, "Failed", summary={"failure": failure}))


def spec(**generation: Any) -> InferencePolicySpec:
    return InferencePolicySpec.model_validate({"generation": {"variantRef": {"name": "chat"}, **generation}})


CHEAP = spec(quantized={"variantRef": {"name": "small"}}, speculative={"draftVariantRef": {"name": "tiny"}})


def served(policy: InferencePolicySpec = CHEAP, **variants: dict[str, Any] | None) -> Served:
    """What a policy comes to; `variants` replace chat, small (quantised) and tiny (the draft)."""
    found = {"chat": variant("chat"), "small": variant("small", **QUANTISED), "tiny": variant("tiny", **DRAFTING)}
    return resolve(policy, {**found, **variants}.get)


def test_an_engine_gets_full_and_quantised_weights_and_the_draft() -> None:
    result = served()
    assert result.verdict == (True, "Ready", "Verified: chat, small, tiny")
    assert result.loads is not None
    (model,) = result.loads["engine"].models
    assert model.quantized is not None
    assert model.draft is not None
    assert (model.path, model.quantized.path, model.draft.path) == (
        "/claims/models/chat",
        "/claims/models/small",
        "/claims/models/tiny",
    )
    assert (model.full_weights, model.draft.device) == ("Auto", "Auto")
    on_cpu = CHEAP.model_copy(update={"engine": CHEAP.engine.model_copy(update={"full_weights": FullWeights.SWAP})})
    elsewhere = variant("tiny", **DRAFTING)
    elsewhere["status"]["artifact"]["claimName"] = "drafts"
    result = served(on_cpu, tiny=elsewhere)
    assert result.loads is not None
    assert result.loads["engine"].models[0].full_weights == "Swap"
    assert set(result.loads["engine"].claims) == {"models", "drafts"}


@pytest.mark.parametrize(
    ("variants", "reason"),
    [
        ({"small": None}, "VariantMissing"),
        ({"small": variant("small", "False", "OverBudget", **QUANTISED)}, "VariantNotReady"),
        ({"small": variant("small", **QUANTISED, facts=OTHER_TOKENIZER)}, "TokenizerMismatch"),
        ({"small": variant("small", **QUANTISED, facts={"vocabularyTokens": 2048})}, "TokenizerMismatch"),
        ({"small": variant("small")}, "NotQuantized"),
        ({"tiny": None}, "VariantMissing"),
        ({"tiny": variant("tiny", "False", "Preparing")}, "VariantNotReady"),
        ({"tiny": variant("tiny", task="Classification")}, "WrongTask"),
    ],
)
def test_what_keeps_a_policy_from_being_served(variants: dict[str, Any], reason: str) -> None:
    result = served(**variants)
    assert (result.loads, result.verdict.reason, result.unsupported) == (None, reason, {})
    assert next(iter(variants)) in result.verdict.message


def test_a_checkpoint_that_came_quantised_needs_no_precision() -> None:
    assert served(small=variant("small", facts={"scheme": "GPTQ"})).verdict.ok


@pytest.mark.parametrize(
    "draft",
    [
        variant("tiny", facts=OTHER_TOKENIZER),
        variant("tiny", "False", "TokenizerMismatch", **DRAFTING),
    ],
)
def test_a_draft_that_doesnt_fit_is_left_out(draft: dict[str, Any]) -> None:
    result = served(tiny=draft)
    assert result.verdict.ok
    assert result.loads is not None
    assert result.loads["engine"].models[0].draft is None
    assert result.loads["engine"].models[0].quantized is not None
    reason = result.unsupported[Mode.SPECULATIVE]
    assert "tiny" in reason
    assert "chat" in reason
    unready = served(tiny=draft, small=None)
    assert (unready.loads, unready.unsupported) == (None, result.unsupported)
    states = {mode.name: mode.state for mode in effective(CHEAP, unsupported=result.unsupported).modes}
    assert states[Mode.SPECULATIVE] is ModeState.UNSUPPORTED
    assert states[Mode.QUANTIZED] is ModeState.ACTIVE


def findings(policy: InferencePolicySpec, *states: PodState) -> Findings:
    return Findings(
        policy={"metadata": {"name": "bot", "namespace": "n", "generation": 1}},
        spec=policy,
        decided=decided(policy),
        effective=effective(policy),
        reach=reach([], {}, 0),
        variants=Verdict(True, "Ready", ""),
        deployments={},
        pods={},
        states={state.pod: state for state in states},
    )


def engine(pod: str = "e1", **model: Any) -> PodState:
    told = {"name": "chat", "task": "Generation", "ready": True, **model}
    return PodState.model_validate(
        {"role": "engine", "pod": pod, "ready": True, "sequence": 1, "level": 3, "models": [told]}
    )


def test_where_full_weights_are_is_what_the_pods_say() -> None:
    def told(policy: InferencePolicySpec, *states: PodState) -> FullWeights | None:
        status = build_status(findings(policy, *states), NOW)
        assert status.engine is not None
        return status.engine.full_weights

    assert told(CHEAP, engine(fullWeights="Resident")) is FullWeights.RESIDENT
    assert told(CHEAP, engine(fullWeights="Resident"), engine("e2", fullWeights="Swap")) is FullWeights.SWAP
    assert told(CHEAP, engine()) is None
    assert told(spec(), engine(fullWeights="Resident")) is None
    asked = findings(CHEAP)
    asked.policy["status"] = InferencePolicyStatus(engine=EngineStatus(full_weights=FullWeights.SWAP)).to_dict()
    kept = build_status(asked, NOW).engine
    assert kept is not None
    assert kept.full_weights is FullWeights.SWAP, "pods that can't be asked don't change it"


def test_failed_weights_and_shortened_drafts_are_conditions_while_they_last() -> None:
    ill = engine(weights="chat", weightsError="/claims/models/small: truncated", draftShortened="k is 2: 40 MiB left")
    status = build_status(findings(CHEAP, ill), NOW)
    seen = {entry.type: (entry.status, entry.reason, entry.message) for entry in status.conditions}
    assert seen["WeightsFailed"] == (
        "True",
        "LoadFailed",
        "pod e1: chat: /claims/models/small: truncated; chat goes on answering",
    )
    assert seen["DraftShortened"] == ("True", "MemoryShort", "pod e1: chat: k is 2: 40 MiB left")
    warnings = {note.reason for note in notes(InferencePolicyStatus(), status) if note.warning}
    assert warnings >= {"LoadFailed", "MemoryShort"}
    healthy = build_status(findings(CHEAP, engine(weights="small")), NOW)
    assert not {"WeightsFailed", "DraftShortened"} & {entry.type for entry in healthy.conditions}


def test_people_hear_once_of_a_mode_that_cannot_run() -> None:
    unable = engine().model_copy(update={"unsupported": {Mode.SAMPLER_PIPELINE: "the buffer is too small"}})
    status = build_status(findings(spec(samplerPipeline={}), unable), NOW)
    (note,) = (note for note in notes(InferencePolicyStatus(), status) if note.reason == "ModeUnsupported")
    assert note.message == "SamplerPipeline doesn't run: pod e1: the buffer is too small"
    assert "ModeUnsupported" not in {note.reason for note in notes(status, status)}
    plain = build_status(findings(spec()), NOW)
    assert "ModeUnsupported" not in {note.reason for note in notes(InferencePolicyStatus(), plain)}


@pytest.mark.parametrize(
    ("policy", "state", "again"),
    [
        (CHEAP, engine(weights="chat"), True),
        (CHEAP, engine(weights="small"), False),
        (CHEAP, engine(weights="small", draftShortened="memory"), True),
        (CHEAP, engine(), False),
        (spec(), engine(weights="chat"), False),
    ],
)
def test_pods_that_change_weights_are_asked_again(policy: InferencePolicySpec, state: PodState, again: bool) -> None:
    assert weights_under_way(findings(policy, state)) is again
