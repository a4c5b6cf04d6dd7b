"""Every CEL rule, on its valid and its invalid side, with the message that a person reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from sixfold_api.crdgen import crd
from sixfold_api.kinds import KINDS, POLICY, TICKET, VARIANT, Kind

COMMIT = "0123456789" * 4
GENERATION = {"variantRef": {"name": "chat"}}
CLASSIFICATION = {"variantRef": {"name": "intent"}}

NAME = "metadata.name must have at most 40 characters: lower-case letters, digits and dashes, a letter first"
NEITHER = "at least one of spec.generation and spec.classification is needed"
OWN_ENGINE = "spec.classification.engine is for policies that generate too; without spec.generation use spec.engine"
GPU_ONLY = "count and resourceName are for type: GPU; remove them or set type: GPU"
STARTUP = "startupDeadline must be between 10s and 24h"
DRAIN = "drainDeadline must be between 1s and 24h"
PEER = "name either cidr, or namespaceLabels, podLabels or both"
SCALED_TWICE = "replicas and autoscaling exclude each other: remove one"
SCALED_BY_NOTHING = "name what to scale by: cpuPercent, queuedRequests or both"
MIN_OVER_MAX = "minReplicas may not be over maxReplicas"
NEVER_IDLE = "idleAfter is for minReplicas: 0; remove it or set minReplicas to 0"
IDLE_BOUNDS = "idleAfter must be between 1s and 168h"
KEYLESS = "a toleration without a key needs operator: Exists"
EXISTS_VALUE = "a toleration with operator: Exists takes no value; remove it or set operator: Equal"
NO_EXECUTE = "tolerationSeconds is for effect: NoExecute"
URI = (
    "uri must be hf://org/name@commit with the 40 hex digits of a commit (a branch or tag could move),"
    " or pvc://claim/path"
)
DEADLINE = "deadline must be between 1s and 720h"
NEEDS_CLAIM = "an hf:// source needs artifact.claimName: the claim that the weights are written to"
IN_PLACE = "these weights are used in place: remove artifact"
CREDENTIALS = "credentialsSecretRef is for hf:// sources: remove it"
IMMUTABLE = "what shapes the weights is immutable: create another ModelVariant and point the policy to it"
SELF_QUANTIZED = "quantized.variantRef must be another variant than variantRef"
SELF_DRAFT = "speculative.draftVariantRef must be another, much smaller variant than variantRef"
COSINE = "minCosine is for guard: Coherence; remove it"
THRESHOLD = "threshold is for acceptance: Threshold; remove it or set acceptance"
FULL_WEIGHTS = "engine.fullWeights is for policies with generation.quantized; remove it"
CLASSIFIER_WEIGHTS = "fullWeights is for the engine that generates: remove it from classification.engine"
SOURCE = "source needs either uri or variantRef"
NEW_WEIGHTS = (
    "precision, lora, exitHeads and slices that are made need artifact.claimName: the claim that the new weights are"
    " written to"
)
CALIBRATION = "calibration is needed for precision.scheme: GPTQ and for exitHeads, and only there"
EVALUATION = "evaluation is needed with precision, draftFor or exitHeads, and only there"
HELD_OUT = "evaluation must be held-out text: another file than calibration"
LEARNED = (
    "exitHeads.training must be another file than calibration and evaluation: heads are too sure of text that they"
    " have learned"
)
ONE_NAME = "each slice needs a name of its own"
SLICE_TASK = "slices of a generating trunk generate, and slices of a classifier classify"
EXITS_TASK = "exitHeads are for task: Classification; remove them"
NO_PRECISION = "precision is for Generation and Classification; remove it"
QUANTISE_FIRST = (
    "exitHeads and slices belong to the weights that answer: quantise in one ModelVariant, and take it as"
    " source.variantRef of another"
)
ONE_ORIGIN = "a slice comes from checkpoint or from training, not both"
ADAPTER_TRAINED = "adapter is for slices that are trained: add training or remove it"
DEPTHS = "each of depths may stand there once"
TASKS = "each task may stand there once"
FIXED = "threshold is needed for rule: Fixed, and only there"
BACKWARDS = "keep has a range that runs backwards, such as z-a"
CALIBRATED = "maxDisagreement is for rule: Calibrated; remove it"
TEMPLATE = "promptTemplate must contain {text}, where the text goes"
BACKWARDS = "keep has a range that runs backwards, such as z-a"
STORE = "redis is needed for store: Redis, and only there"
TTL = "ttl must be between 1s and 720h"
WAITS = "shortWait and longWait may be at most maxWait, and maxWait at most 1s"
MAX_PRIORITY = "maxPriority may not be lower than priority"
NO_KEYS = "tenants are entries of the Secret with the API keys: add apiKeysSecretRef or remove them"
TIMEOUT = "requestTimeout must be between 1s and 24h"
REQUEST_SIZE = "maxRequestSize must be between 1Ki and 1Gi"
INTERVAL = "interval must be between 1s and 1h"
ANALYSIS_TIMES = "initialDelay and cooldown may be at most 24h, recoverAfter 168h, rejectWindow 720h"
ALERT_MODE = "mode is needed for action: Suspend, and only there"
STEPS = "steps must go up"
STEP_DURATION = "stepDuration must be between 1s and 24h"
TICKET_NAME = "metadata.name must have at most 53 characters: lower-case letters, digits and dashes, a letter first"
TICKET_FIXED = "a ticket is what was found when it was opened: only decision may change"
PATH_AND_VALUE = "path and value belong together"
ESCALATES = "classification.escalate hands texts to generation: add spec.generation or remove it"
BUDGET = "accuracyBudgetPoints is for a quantised classifier, perplexityBudgetPercent for a quantised generator"
GENERATES = "lora and draftFor are for task: Generation; remove them"
BITS = "bits must be 2, 3, 4 or 8"
GROUP_SIZE = "groupSize must be 32, 64, 128, 256, 512, 1024, or -1 for the whole row"
GPTQ_ONLY = "bits, groupSize, descAct, sym, dampPercent and modules are for scheme: GPTQ; remove them"
MODULE = "say either full: true, or bits or groupSize"
TEXT_URI = "uri must be pvc://claim/path of a JSONL file"
ADAPTER_URI = "uri must be pvc://claim/path of the adapter's folder"


def policy(**blocks: Any) -> dict[str, Any]:
    return {"generation": GENERATION, **blocks}


def tolerating(toleration: dict[str, Any]) -> dict[str, Any]:
    return policy(engine={"pod": {"tolerations": [toleration]}})


def scaling(**fields: Any) -> dict[str, Any]:
    return policy(engine={"autoscaling": {"maxReplicas": 3, **fields}})


def from_hub(**fields: Any) -> dict[str, Any]:
    source = {"uri": f"hf://acme/chat@{COMMIT}"}
    return {"source": source, "task": "Generation", "artifact": {"claimName": "models"}, **fields}


def from_claim(uri: str = "pvc://models/chat", **fields: Any) -> dict[str, Any]:
    return {"source": {"uri": uri}, "task": "Generation", **fields}


TEXT = {"uri": "pvc://models/heldout.jsonl"}
CALIBRATING = {"uri": "pvc://models/calibration.jsonl"}
TRAINING = {"uri": "pvc://models/training.jsonl"}
LORA = {"uri": "pvc://models/adapters/tone"}


def generating(**blocks: Any) -> dict[str, Any]:
    return {"generation": GENERATION | blocks}


def speculative(**fields: Any) -> dict[str, Any]:
    return generating(speculative={"draftVariantRef": {"name": "tiny"}, **fields})


def gptq(precision: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A variant that quantises another one; a field of None is left out."""
    spec = {
        "source": {"variantRef": {"name": "chat"}},
        "task": "Generation",
        "precision": {"scheme": "GPTQ", **(precision or {})},
        "calibration": CALIBRATING,
        "evaluation": TEXT,
        "artifact": {"claimName": "models"},
        **fields,
    }
    return {name: value for name, value in spec.items() if value is not None}


def int8(task: str = "Classification", **fields: Any) -> dict[str, Any]:
    return gptq(precision={"scheme": "INT8"}, task=task, calibration=None, **fields)


def exiting(heads: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A classifier with exit heads; a field of None is left out."""
    spec = {
        "source": {"uri": "pvc://models/intent"},
        "task": "Classification",
        "exitHeads": {"training": TRAINING, **(heads or {})},
        "calibration": CALIBRATING,
        "evaluation": TEXT,
        "artifact": {"claimName": "models"},
        **fields,
    }
    return {name: value for name, value in spec.items() if value is not None}


def sliced(*slices: dict[str, Any], task: str = "Classification", **fields: Any) -> dict[str, Any]:
    return {"source": {"uri": "pvc://models/intent"}, "task": task, "slices": list(slices), **fields}


def classifying(**blocks: Any) -> dict[str, Any]:
    return {"classification": CLASSIFICATION | blocks}


def keeping(**fields: Any) -> dict[str, Any]:
    return generating(kvCacheReuse=fields)


def gateway(**fields: Any) -> dict[str, Any]:
    return policy(gateway=fields)


def alerts(**fields: Any) -> dict[str, Any]:
    return policy(analysis={"alerts": [{"alertName": "High5xx", **fields}]})


def recommending(**fields: Any) -> dict[str, Any]:
    return TICKET_SPEC | {"recommendation": {"summary": "Draft fewer tokens.", **fields}}


def tenants(*entries: dict[str, Any]) -> dict[str, Any]:
    return gateway(apiKeysSecretRef={"name": "keys"}, tenants=list(entries))


REDIS = {"urlSecretRef": {"name": "redis", "key": "url"}}
CUT = {"name": "ner", "checkpoint": "pvc://models/ner"}
TRAINED = {"name": "topic", "training": TRAINING}
WRITES = {"artifact": {"claimName": "models"}}
ESCALATION = {"belowConfidence": "0.6", "promptTemplate": "One of {labels}? {text}"}

TICKET_SPEC = {
    "policyRef": {"name": "assistant"},
    "fingerprint": "0123456789",
    "cause": "RejectedDraft",
    "evidence": {"signal": "WastedFlops", "query": "up", "value": "0.7", "threshold": "0.65", "window": "10m"},
    "recommendation": {"summary": "Draft fewer tokens.", "patch": {"spec": {"batching": {"shortWait": "1ms"}}}},
}

CASES: list[tuple[Kind, dict[str, Any], str | None]] = [
    (POLICY, {"generation": GENERATION}, None),
    (POLICY, {"classification": CLASSIFICATION}, None),
    (POLICY, {"generation": GENERATION, "classification": CLASSIFICATION}, None),
    (POLICY, {}, NEITHER),
    (POLICY, {"rollbackLevel": 0, "streaming": {}}, NEITHER),
    (POLICY, policy(classification=CLASSIFICATION | {"engine": {"replicas": 2}}), None),
    (POLICY, {"classification": CLASSIFICATION | {"engine": {"replicas": 2}}}, OWN_ENGINE),
    (POLICY, policy(engine={"accelerator": {"type": "CPU"}}), None),
    (POLICY, policy(engine={"accelerator": {"type": "GPU", "count": 2, "resourceName": "amd.com/gpu"}}), None),
    (POLICY, policy(engine={"accelerator": {"type": "CPU", "count": 2}}), GPU_ONLY),
    (POLICY, policy(engine={"accelerator": {"type": "CPU", "resourceName": "amd.com/gpu"}}), GPU_ONLY),
    (POLICY, policy(classification=CLASSIFICATION | {"engine": {"accelerator": {"type": "CPU", "count": 1}}}),
     GPU_ONLY),
    (POLICY, scaling(cpuPercent=80), None),
    (POLICY, scaling(queuedRequests=4, minReplicas=3, maxReplicas=3), None),
    (POLICY, scaling(cpuPercent=80, minReplicas=4), MIN_OVER_MAX),
    (POLICY, scaling(), SCALED_BY_NOTHING),
    (POLICY, scaling(cpuPercent=80, minReplicas=0, idleAfter="168h"), None),
    (POLICY, scaling(cpuPercent=80, idleAfter="5m"), NEVER_IDLE),
    (POLICY, scaling(cpuPercent=80, minReplicas=0, idleAfter="0s"), IDLE_BOUNDS),
    (POLICY, policy(engine={"autoscaling": {"maxReplicas": 2, "cpuPercent": 80}, "replicas": 1}), SCALED_TWICE),
    *((POLICY, policy(engine={"startupDeadline": limit}), None) for limit in ("10s", "24h")),
    *((POLICY, policy(engine={"startupDeadline": limit}), STARTUP) for limit in ("9999ms", "24h1ms")),
    *((POLICY, policy(drainDeadline=limit), None) for limit in ("1s", "24h")),
    *((POLICY, policy(drainDeadline=limit), DRAIN) for limit in ("999ms", "24h1ms")),
    *((POLICY, gateway(allowFrom=[peer]), None) for peer in
      ({"cidr": "10.0.0.0/8"}, {"podLabels": {"a": "b"}}, {"namespaceLabels": {"a": "b"}, "podLabels": {"a": "b"}})),
    *((POLICY, gateway(allowFrom=[peer]), PEER) for peer in ({}, {"cidr": "10.0.0.0/8", "podLabels": {"a": "b"}})),
    (POLICY, policy(gateway={"autoscaling": {"maxReplicas": 2, "cpuPercent": 80}}), None),
    (POLICY, policy(gateway={"autoscaling": {"maxReplicas": 2, "cpuPercent": 80}, "replicas": 2}), SCALED_TWICE),
    (POLICY, policy(gateway={"autoscaling": {"maxReplicas": 2, "minReplicas": 3}}), MIN_OVER_MAX),
    (POLICY, tolerating({"operator": "Exists"}), None),
    (POLICY, tolerating({"key": "gpu", "operator": "Equal", "value": "yes"}), None),
    (POLICY, tolerating({"key": "gpu", "value": "yes", "effect": "NoSchedule"}), None),
    (POLICY, tolerating({"effect": "NoSchedule"}), KEYLESS),
    (POLICY, tolerating({"operator": "Equal", "value": "yes"}), KEYLESS),
    (POLICY, tolerating({"key": "gpu", "operator": "Exists", "value": "yes"}), EXISTS_VALUE),
    (POLICY, tolerating({"key": "gpu", "effect": "NoExecute", "tolerationSeconds": 0}), None),
    (POLICY, tolerating({"key": "gpu", "effect": "NoSchedule", "tolerationSeconds": 5}), NO_EXECUTE),
    (POLICY, tolerating({"key": "gpu", "tolerationSeconds": 5}), NO_EXECUTE),
    (POLICY, policy(gateway={"pod": {"tolerations": [{}]}}), KEYLESS),
    (VARIANT, from_hub(), None),
    (VARIANT, from_hub(credentialsSecretRef={"name": "hub"}), None),
    (VARIANT, from_claim(), None),
    (VARIANT, from_claim("pvc://models.team-a/a/b_c/v1.2"), None),
    (VARIANT, {"source": {"uri": f"hf://acme/chat@{COMMIT}"}, "task": "Generation"}, NEEDS_CLAIM),
    (VARIANT, from_claim(artifact={"claimName": "models"}), IN_PLACE),
    (VARIANT, from_claim(credentialsSecretRef={"name": "hub"}), CREDENTIALS),
    *((VARIANT, from_claim(uri), URI) for uri in (
        "", "s3://bucket/chat", "pvc://models", "pvc://models/", "pvc://models/../etc", "pvc://models/.hidden",
        "pvc:///chat", "pvc://Models/chat", "pvc://models//chat", "pvc://models/chat ", "pvc://models/chat\n",
    )),
    *((VARIANT, from_hub(source={"uri": uri}), URI) for uri in (
        "hf://acme/chat", "hf://acme/chat@main", f"hf://acme/chat@{COMMIT[:-1]}", f"hf://acme/chat@{COMMIT}0",
        f"hf://chat@{COMMIT}", f"hf://acme/chat/extra@{COMMIT}", f"hf://acme/chat@{COMMIT.replace('0', 'A')}",
        f"HF://acme/chat@{COMMIT}",
    )),
    *((VARIANT, from_claim(preparation={"deadline": deadline}), None) for deadline in (
        "1s", "1000ms", "90m", "1h30m", "720h", "719h59m60s",
    )),
    *((VARIANT, from_claim(preparation={"deadline": deadline}), DEADLINE) for deadline in (
        "0s", "999ms", "721h", "720h1ms", "999999h999999h", "0h0m0s",
    )),
    (VARIANT, from_claim(preparation={"pod": {"tolerations": [{"effect": "NoExecute"}]}}), KEYLESS),
    (POLICY, generating(quantized={"variantRef": {"name": "chat-int4"}}), None),
    (POLICY, generating(quantized={"variantRef": {"name": "chat"}}), SELF_QUANTIZED),
    (POLICY, generating(quantized={"variantRef": {"name": "chat-int4"}}) | {"engine": {"fullWeights": "Swap"}}, None),
    (POLICY, policy(engine={"fullWeights": "Auto"}), FULL_WEIGHTS),
    (POLICY, {"classification": CLASSIFICATION, "engine": {"fullWeights": "Auto"}}, FULL_WEIGHTS),
    (POLICY, policy(classification=CLASSIFICATION | {"engine": {"fullWeights": "Auto"}}), CLASSIFIER_WEIGHTS),
    (POLICY, speculative(), None),
    (POLICY, speculative(draftVariantRef={"name": "chat"}), SELF_DRAFT),
    (POLICY, speculative(acceptance="Threshold"), None),
    (POLICY, speculative(acceptance="Threshold", threshold={"minProbability": "0.3"}), None),
    (POLICY, speculative(acceptance="Threshold", threshold={"minCosine": "0.5"}), None),
    (POLICY, speculative(acceptance="Threshold", threshold={"guard": "SingleToken"}), None),
    (POLICY, speculative(acceptance="Threshold", threshold={"guard": "SingleToken", "minCosine": "0.5"}), COSINE),
    (POLICY, speculative(threshold={}), THRESHOLD),
    (POLICY, speculative(acceptance="Lossless", threshold={}), THRESHOLD),
    (POLICY, generating(samplerPipeline={}), None),
    (VARIANT, gptq(), None),
    (VARIANT, gptq(source={"uri": f"hf://acme/chat@{COMMIT}"}, credentialsSecretRef={"name": "hub"}), None),
    (VARIANT, gptq(perplexityBudgetPercent="0.5", lora=LORA, draftFor={"name": "large"}), None),
    (VARIANT, int8(), None),
    (VARIANT, int8(accuracyBudgetPoints="0.25"), None),
    (VARIANT, int8("Generation", perplexityBudgetPercent="2"), None),
    (VARIANT, from_claim(draftFor={"name": "chat"}, evaluation=TEXT), None),
    (VARIANT, from_claim(lora=LORA, artifact={"claimName": "models"}), None),
    (VARIANT, {"source": {"variantRef": {"name": "chat"}}, "task": "Generation"}, None),
    (VARIANT, {"source": {}, "task": "Generation"}, SOURCE),
    (VARIANT, gptq(source={"uri": "pvc://models/chat", "variantRef": {"name": "chat"}}), SOURCE),
    (VARIANT, gptq(artifact=None), NEW_WEIGHTS),
    (VARIANT, from_claim(lora=LORA), NEW_WEIGHTS),
    (VARIANT, {"source": {"variantRef": {"name": "a"}}, "task": "Generation", "artifact": {"claimName": "m"}},
     IN_PLACE),
    (VARIANT, from_claim(precision={"scheme": "None"}, artifact={"claimName": "models"}), IN_PLACE),
    (VARIANT, gptq(credentialsSecretRef={"name": "hub"}), CREDENTIALS),
    (VARIANT, gptq(calibration=None), CALIBRATION),
    (VARIANT, gptq(precision={"scheme": "INT8"}), CALIBRATION),
    (VARIANT, from_claim(calibration=TEXT), CALIBRATION),
    (VARIANT, gptq(evaluation=None), EVALUATION),
    (VARIANT, from_claim(evaluation=TEXT), EVALUATION),
    (VARIANT, from_claim(draftFor={"name": "chat"}), EVALUATION),
    (VARIANT, gptq(accuracyBudgetPoints="0.5"), BUDGET),
    (VARIANT, int8(perplexityBudgetPercent="1"), BUDGET),
    (VARIANT, from_claim(perplexityBudgetPercent="1"), BUDGET),
    (VARIANT, int8(lora=LORA), GENERATES),
    (VARIANT, int8(draftFor={"name": "chat"}), GENERATES),
    *((VARIANT, gptq({"bits": bits}), None) for bits in (2, 3, 4, 8)),
    *((VARIANT, gptq({"bits": bits}), BITS) for bits in (5, 6, 7)),
    *((VARIANT, gptq({"groupSize": size}), None) for size in (-1, 32, 1024)),
    *((VARIANT, gptq({"groupSize": size}), GROUP_SIZE) for size in (0, 16, 100)),
    (VARIANT, gptq({"modules": [{"match": "o_proj", "bits": 8}, {"match": "layers.*", "groupSize": 32}]}), None),
    (VARIANT, gptq({"modules": [{"match": "o_proj", "full": True}]}), None),
    (VARIANT, gptq({"modules": [{"match": "o_proj"}]}), MODULE),
    (VARIANT, gptq({"modules": [{"match": "o_proj", "full": False}]}), MODULE),
    (VARIANT, gptq({"modules": [{"match": "o_proj", "full": True, "bits": 8}]}), MODULE),
    (VARIANT, gptq({"modules": [{"match": "o_proj", "bits": 5}]}), BITS),
    (VARIANT, gptq({"modules": [{"match": "o_proj", "groupSize": 7}]}), GROUP_SIZE),
    *((VARIANT, int8() | {"precision": {"scheme": "INT8", **more}}, GPTQ_ONLY) for more in (
        {"bits": 8}, {"groupSize": 32}, {"descAct": True}, {"sym": False}, {"dampPercent": "0.1"},
        {"modules": [{"match": "o_proj", "full": True}]},
    )),
    (VARIANT, from_claim(precision={"bits": 4}), GPTQ_ONLY),
    (VARIANT, int8() | {"precision": {"scheme": "INT8", "modules": []}}, None),
    *((VARIANT, gptq(evaluation={"uri": uri}), TEXT_URI) for uri in ("pvc://models", "pvc://models/../x", "a.jsonl")),
    (VARIANT, gptq(calibration={"uri": f"hf://acme/text@{COMMIT}"}), TEXT_URI),
    (VARIANT, gptq(lora={"uri": "adapters/tone"}), ADAPTER_URI),
    (VARIANT, gptq(calibration=TEXT), HELD_OUT),
    (VARIANT, exiting(), None),
    (VARIANT, exiting({"depths": [2, 1], "train": "Trunk", "distillation": "0.5"}), None),
    (VARIANT, exiting({"depths": []}), None),
    (VARIANT, exiting({"depths": [1, 2, 1]}), DEPTHS),
    (VARIANT, exiting({"training": TEXT}), LEARNED),
    (VARIANT, exiting({"training": CALIBRATING}), LEARNED),
    (VARIANT, exiting({"training": {"uri": "training.jsonl"}}), TEXT_URI),
    (VARIANT, exiting(calibration=TEXT), HELD_OUT),
    (VARIANT, exiting(calibration=None), CALIBRATION),
    (VARIANT, exiting(evaluation=None), EVALUATION),
    (VARIANT, exiting(artifact=None), NEW_WEIGHTS),
    (VARIANT, exiting(task="Generation"), EXITS_TASK),
    (VARIANT, exiting(task="TokenClassification"), EXITS_TASK),
    (VARIANT, exiting(precision={"scheme": "INT8"}), QUANTISE_FIRST),
    (VARIANT, exiting(precision={"scheme": "None"}), None),
    (VARIANT, exiting(precision={}), None),
    (VARIANT, exiting(slices=[CUT, TRAINED]), None),
    (VARIANT, sliced(), None),
    (VARIANT, sliced({"name": "ner"}, {"name": "topic"}), None),
    (VARIANT, sliced({"name": "ner", "task": "TokenClassification"}), None),
    (VARIANT, sliced({"name": "ner", "task": "Classification"}, task="TokenClassification"), None),
    (VARIANT, sliced({"name": "ner", "task": "Generation"}), SLICE_TASK),
    (VARIANT, sliced({"name": "sql"}, {"name": "ner", "task": "Classification"}, task="Generation"), SLICE_TASK),
    (VARIANT, sliced({"name": "sql", "task": "Generation"}, task="Generation"), None),
    (VARIANT, sliced({"name": "ner"}, {"name": "ner"}), ONE_NAME),
    (VARIANT, sliced({"name": "ner"}, **WRITES), IN_PLACE),
    (VARIANT, sliced(CUT), NEW_WEIGHTS),
    (VARIANT, sliced(TRAINED, {"name": "ner"}), NEW_WEIGHTS),
    (VARIANT, sliced(CUT, TRAINED, **WRITES), None),
    (VARIANT, sliced(CUT | TRAINED, **WRITES), ONE_ORIGIN),
    (VARIANT, sliced(TRAINED | {"adapter": {}}, **WRITES), None),
    (VARIANT, sliced(TRAINED | {"adapter": {"width": 16, "layers": 2}}, **WRITES), None),
    (VARIANT, sliced(CUT | {"adapter": {"width": 16}}, **WRITES), ADAPTER_TRAINED),
    (VARIANT, sliced({"name": "ner", "adapter": {}}), ADAPTER_TRAINED),
    (VARIANT, sliced(CUT, **WRITES, evaluation=TEXT), EVALUATION),
    (VARIANT, sliced(*({"name": f"task-{n}", "checkpoint": "pvc://models/" + "x" * 499} for n in range(32)), **WRITES),
     None),
    (VARIANT, int8(slices=[{"name": "ner"}]), QUANTISE_FIRST),
    (VARIANT, int8(slices=[CUT]), QUANTISE_FIRST),
    (VARIANT, int8(slices=[]), None),
    (VARIANT, int8("TokenClassification"), NO_PRECISION),
    (VARIANT, from_claim(task="TokenClassification"), None),
    (VARIANT, from_claim(task="TokenClassification", lora=LORA, artifact={"claimName": "models"}), GENERATES),
    (VARIANT, int8("TokenClassification", accuracyBudgetPoints="0.5"), BUDGET),
    (POLICY, classifying(earlyExit={}), None),
    (POLICY, classifying(earlyExit={"rule": "Calibrated", "maxDisagreement": "0.01"}), None),
    (POLICY, classifying(earlyExit={"maxDisagreement": "0.01", "lengthRelaxation": "0"}), None),
    (POLICY, classifying(earlyExit={"rule": "Quantile"}), None),
    (POLICY, classifying(earlyExit={"rule": "Fixed", "threshold": "0.95"}), None),
    (POLICY, classifying(earlyExit={"rule": "Fixed"}), FIXED),
    (POLICY, classifying(earlyExit={"threshold": "0.95"}), FIXED),
    (POLICY, classifying(earlyExit={"rule": "Quantile", "threshold": "0.95"}), FIXED),
    (POLICY, classifying(earlyExit={"rule": "Quantile", "maxDisagreement": "0.01"}), CALIBRATED),
    (POLICY, classifying(earlyExit={"rule": "Fixed", "threshold": "0.9", "maxDisagreement": "0.01"}), CALIBRATED),
    (POLICY, classifying(earlyExit={"sanitize": {}}), None),
    (POLICY, classifying(earlyExit={"sanitize": {"keep": "a-z .\\s\\-\\u00e4", "otherScripts": "Remove"}}), None),
    (POLICY, classifying(earlyExit={"sanitize": {"keep": "a-zz-a"}}), BACKWARDS),
    (POLICY, classifying(earlyExit={"sanitize": {"keep": "\\u9fff-\\u4e00"}}), BACKWARDS),
    (POLICY, classifying(earlyExit={"sanitize": {"keep": "\\u4e00-\\u9FFF\\]\\-é-я\\s&&"}}), None),
    (POLICY, classifying(earlyExit={"sanitize": {"keep": "a-z0-9é-zя"}}), BACKWARDS),
    (POLICY, classifying(earlyExit={"sanitize": {"keep": "a\\u9fff-\\u4E00"}}), BACKWARDS),
    (POLICY, classifying(subgraphs={"tasks": [{"name": "ner", "pinned": True}, {"name": "topic"}]}), None),
    (POLICY, classifying(subgraphs={"tasks": [{"name": "ner"}, {"name": "ner", "pinned": True}]}), TASKS),
    (POLICY, generating(subgraphs={"tasks": [{"name": "sql"}], "cacheSize": "1Gi"}), None),
    (POLICY, generating(subgraphs={"tasks": [{"name": "sql"}, {"name": "sql"}]}), TASKS),
    (POLICY, policy(classification=CLASSIFICATION | {"escalate": ESCALATION}), None),
    (POLICY, classifying(escalate=ESCALATION), ESCALATES),
    (POLICY, policy(classification=CLASSIFICATION | {"escalate": ESCALATION | {"promptTemplate": "{labels}?"}}),
     TEMPLATE),
    (POLICY, keeping(), None),
    (POLICY, keeping(store="Memory"), None),
    (POLICY, keeping(store="Redis", redis=REDIS), None),
    (POLICY, keeping(store="Redis", redis=REDIS | {"caSecretRef": {"name": "redis", "key": "ca.crt"}}), None),
    (POLICY, keeping(store="Redis"), STORE),
    (POLICY, keeping(redis=REDIS), STORE),
    (POLICY, keeping(store="Memory", redis=REDIS), STORE),
    *((POLICY, keeping(ttl=ttl), None) for ttl in ("1s", "1000ms", "720h")),
    *((POLICY, keeping(ttl=ttl), TTL) for ttl in ("0s", "999ms", "720h1ms", "999999h999999h")),
    (POLICY, policy(batching={}), None),
    (POLICY, {"classification": CLASSIFICATION, "batching": {}}, None),
    (POLICY, policy(batching={"shortWait": "15ms", "longWait": "15ms"}), None),
    (POLICY, policy(batching={"shortWait": "0ms", "longWait": "0s", "maxWait": "0m"}), None),
    (POLICY, policy(batching={"shortWait": "1s", "longWait": "1s", "maxWait": "1s"}), None),
    (POLICY, policy(batching={"shortWait": "16ms"}), WAITS),
    (POLICY, policy(batching={"longWait": "16ms"}), WAITS),
    (POLICY, policy(batching={"maxWait": "9ms"}), WAITS),
    (POLICY, policy(batching={"maxWait": "1001ms"}), WAITS),
    (POLICY, policy(batching={"maxWait": "1s1ms"}), WAITS),
    *((POLICY, tenants({"name": "a", **fields}), message) for message, each in {
        None: [
            {}, {"priority": "High"}, {"maxPriority": "High"}, {"maxPriority": "Normal"},
            {"priority": "High", "maxPriority": "High"},
            *({"priority": "Low", "maxPriority": highest} for highest in ("Low", "Normal", "High")),
            *({"priority": "Normal", "maxPriority": highest} for highest in ("Normal", "High")),
        ],
        MAX_PRIORITY: [
            {"maxPriority": "Low"}, {"priority": "Normal", "maxPriority": "Low"},
            *({"priority": "High", "maxPriority": highest} for highest in ("Low", "Normal")),
        ],
    }.items() for fields in each),
    (POLICY, tenants({"name": "a"}, {"name": "b", "priority": "Low"}), None),
    (POLICY, tenants(*({"name": f"{'x' * 250}{number}"} for number in range(256))), None),
    (POLICY, gateway(tenants=[]), None),
    (POLICY, gateway(tenants=[{"name": "a"}]), NO_KEYS),
    *((POLICY, gateway(requestTimeout=limit), None) for limit in ("1s", "1000ms", "24h", "23h60m")),
    *((POLICY, gateway(requestTimeout=limit), TIMEOUT) for limit in ("0s", "999ms", "24h1ms", "1441m")),
    *((POLICY, gateway(maxRequestSize=size), None) for size in
      ("1Ki", "1024", 1024, "1Gi", 2**30, "1.5Mi", "1e6", "1024000m")),
    *((POLICY, gateway(maxRequestSize=size), REQUEST_SIZE) for size in
      ("1023", 1023, 0, "0", "1k", "1025Mi", 2**30 + 1, "2G", "1024m", "1E")),
    (POLICY, policy(analysis={}, canary={}, shadow={}, tickets={}), None),
    *((POLICY, policy(analysis={"interval": interval}), None) for interval in ("1s", "1h", "1000ms")),
    *((POLICY, policy(analysis={"interval": interval}), INTERVAL) for interval in ("0s", "999ms", "1h1ms")),
    (POLICY, policy(analysis={"initialDelay": "24h", "cooldown": "0s", "recoverAfter": "168h"}), None),
    *((POLICY, policy(analysis=times), ANALYSIS_TIMES) for times in (
        {"initialDelay": "25h"}, {"cooldown": "25h"}, {"recoverAfter": "169h"}, {"rejectWindow": "721h"},
    )),
    *((POLICY, alerts(action=action), None) for action in ("StepDown", "Level0")),
    (POLICY, alerts(action="Suspend", mode="Speculative"), None),
    (POLICY, alerts(action="Suspend"), ALERT_MODE),
    (POLICY, alerts(action="Level0", mode="Speculative"), ALERT_MODE),
    (POLICY, policy(canary={"steps": [1, 99]}), None),
    (POLICY, policy(canary={"steps": [25, 5]}), STEPS),
    (POLICY, policy(canary={"stepDuration": "1s"}), None),
    *((POLICY, policy(canary={"stepDuration": length}), STEP_DURATION) for length in ("999ms", "25h")),
    (TICKET, TICKET_SPEC, None),
    (TICKET, recommending(), None),
    (TICKET, recommending(path="/generation/speculative/numTokens", value="3"), None),
    (TICKET, recommending(path="/generation/speculative/numTokens"), PATH_AND_VALUE),
    (TICKET, recommending(value="3"), PATH_AND_VALUE),
]  # fmt: skip


@pytest.mark.parametrize(
    "kind, spec, message", CASES, ids=[f"{index}-{case[2] or 'accepted'}" for index, case in enumerate(CASES)]
)
def test_rules(api, kind: Kind, spec: dict[str, Any], message: str | None) -> None:
    answer = api.create(kind, spec)
    if message is None:
        assert answer.accepted, answer.causes
        kind.spec.model_validate(answer.spec)
        kind.spec.model_validate(spec)
    else:
        assert any(cause.endswith(f": {message}") for cause in answer.causes), answer.causes
        with pytest.raises(ValidationError, match="Value error") as caught:
            kind.spec.model_validate(spec)
        assert message in str(caught.value)


def test_each_tenant_stands_there_once(api) -> None:
    """Said by the list's key, not by a rule."""
    twice = tenants({"name": "a"}, {"name": "a", "priority": "Low"})
    assert "Duplicate value" in " ".join(api.create(POLICY, twice).causes)
    with pytest.raises(ValidationError, match="each tenant may stand there once"):
        POLICY.spec.model_validate(twice)


@pytest.mark.parametrize(
    "name, valid",
    [
        ("a", True),
        ("support-bot-2", True),
        ("a" * 40, True),
        ("a" * 41, False),
        ("2fast", False),
        ("with.dot", False),
    ],
)
def test_names(api, name: str, valid: bool) -> None:
    for kind, spec in ((POLICY, policy()), (VARIANT, from_claim())):
        answer = api.create(kind, spec, name)
        assert answer.accepted is valid, answer.causes
        assert valid or any(cause.endswith(f": {NAME}") for cause in answer.causes)


def test_names_of_tickets(api) -> None:
    for name, valid in (("a" * 53, True), ("a" * 54, False)):
        answer = api.create(TICKET, TICKET_SPEC, name)
        assert answer.accepted is valid, answer.causes
        assert valid or any(cause.endswith(f": {TICKET_NAME}") for cause in answer.causes)


@pytest.mark.parametrize(
    "change, valid",
    [
        ({"decision": "Approved"}, True),
        ({"decision": "Dismissed"}, True),
        ({"cause": "Padding"}, False),
        ({"fingerprint": "abcdef0123"}, False),
        ({"policyRef": {"name": "other"}}, False),
        ({"evidence": {"value": "0.9"}}, False),
        ({"recommendation": {"patch": {"spec": {"batching": {"shortWait": "9ms"}}}}}, False),
    ],
)
def test_a_ticket_is_what_was_found(api, change: dict[str, Any], valid: bool) -> None:
    assert api.create(TICKET, TICKET_SPEC, "fixed", dry_run=False).accepted
    try:
        answer = api.patch(TICKET, "fixed", {"spec": change})
        assert answer.accepted is valid, answer.causes
        assert valid or any(cause.endswith(f": {TICKET_FIXED}") for cause in answer.causes), answer.causes
    finally:
        api.delete(TICKET, "fixed")


def test_the_same_step_twice_is_no_step_up(api) -> None:
    """Said by the list's type in a cluster."""
    twice = policy(canary={"steps": [5, 5]})
    assert "Duplicate value" in " ".join(api.create(POLICY, twice).causes)
    with pytest.raises(ValidationError, match=STEPS):
        POLICY.spec.model_validate(twice)


CHANGES = [
    ({"precision": {"scheme": "None"}}, IMMUTABLE),
    ({"perplexityBudgetPercent": "2", "precision": {"scheme": "INT8"}, "evaluation": TEXT}, IMMUTABLE),
    ({"exitHeads": {"training": TRAINING}, "task": "Classification", "calibration": CALIBRATING}, IMMUTABLE),
    ({"slices": [{"name": "sql"}]}, IMMUTABLE),
    ({"lora": LORA}, IMMUTABLE),
    ({"draftFor": {"name": "chat"}, "evaluation": TEXT}, IMMUTABLE),
    ({"source": {"uri": f"hf://acme/chat@{COMMIT[::-1]}"}}, IMMUTABLE),
    ({"task": "Classification"}, IMMUTABLE),
    ({"artifact": {"claimName": "elsewhere"}}, IMMUTABLE),
    ({"source": {"uri": "pvc://models/chat"}, "artifact": None}, IMMUTABLE),
    ({"preparation": {"deadline": "2h"}}, None),
    ({"credentialsSecretRef": {"name": "another"}}, None),
    ({"credentialsSecretRef": None}, None),
]


@pytest.mark.parametrize("change, message", CHANGES)
def test_what_shapes_the_artifact_is_immutable(api, change: dict[str, Any], message: str | None) -> None:
    assert api.create(VARIANT, from_hub(), "immutable", dry_run=False).accepted
    try:
        answer = api.patch(VARIANT, "immutable", {"spec": change})
        assert answer.accepted is (message is None), answer.causes
        assert message is None or any(cause.endswith(f": {message}") for cause in answer.causes)
    finally:
        api.delete(VARIANT, "immutable")


def test_every_rule_has_its_case() -> None:
    tested = {NAME, IMMUTABLE, TICKET_NAME, TICKET_FIXED} | {case[2] for case in CASES}
    for kind in KINDS:
        for message in _messages(crd(kind)):
            if not message.startswith("each key must"):  # test_bounds.py has these
                assert message in tested


def _messages(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        yield from (rule["message"] for rule in node.get("x-kubernetes-validations", ()))
        for value in node.values():
            yield from _messages(value)
    elif isinstance(node, list):
        for item in node:
            yield from _messages(item)
