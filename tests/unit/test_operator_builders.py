"""Manifests from specs: what pods get, what never changes, what rolls them and what doesn't."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sixfold_api.effective import effective
from sixfold_api.generation import DraftDevice
from sixfold_api.kv_reuse import RedisSpec
from sixfold_api.pods import KeyRef
from sixfold_api.policy import EngineSpec, InferencePolicySpec
from sixfold_api.precision import Precision, TextSource
from sixfold_api.runtime_config import Draft, ServedModel, WeightSet
from sixfold_api.scalars import FullWeights, Task
from sixfold_api.variant import ModelVariantSpec
from sixfold_operator.builders.config_map import config_map, current_sequence, next_config
from sixfold_operator.builders.job import Inputs, artifact_place, claims, job_name, preparation_job
from sixfold_operator.builders.workload import components, engine_deployment, gateway_deployment, service
from sixfold_operator.settings import OperatorSettings

SETTINGS = OperatorSettings(runtime_image="registry.example/runtime:1")
POLICY = {
    "apiVersion": "sixfold.dev/v1alpha1",
    "kind": "InferencePolicy",
    "metadata": {"name": "bot", "namespace": "ns", "uid": "u1"},
}
VARIANT = {**POLICY, "kind": "ModelVariant", "metadata": {"name": "chat", "namespace": "ns", "uid": "v1"}}
MODEL = ServedModel(name="chat", task=Task.GENERATION, path="/claims/models/chat", digest="sha256:aa")
PLACEMENT = {
    "nodeSelector": {"pool": "gpu"},
    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "imagePullSecrets": [{"name": "pull"}],
    "runtimeClassName": "nvidia",
    "priorityClassName": "high",
    "resources": {"requests": {"cpu": "2", "memory": "8Gi"}, "limits": {"memory": "16Gi"}},
}


def spec(**fields: Any) -> InferencePolicySpec:
    return InferencePolicySpec.model_validate({"generation": {"variantRef": {"name": "chat"}}, **fields})


def engine(
    fields: dict[str, Any], models: list[ServedModel] | None = None, redis: RedisSpec | None = None
) -> dict[str, Any]:
    parsed = EngineSpec.model_validate(fields)
    return engine_deployment(POLICY, "engine", parsed, models or [MODEL], ["models"], SETTINGS, redis)


def pod_of(manifest: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = manifest["spec"]["template"]["spec"]
    return pod


def environment(manifest: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry.get("value") for entry in pod_of(manifest)["containers"][0]["env"]}


DICTIONARY = {"name": "texts", "key": "words"}
REDIS = RedisSpec(url_secret_ref=KeyRef(name="redis", key="url"))
ALL_PODS = [
    gateway_deployment(POLICY, spec(streaming={"dictionaryConfigMapRef": DICTIONARY}), SETTINGS),
    engine({"accelerator": {"type": "GPU"}}, redis=REDIS),
    preparation_job(
        VARIANT,
        ModelVariantSpec.model_validate({"task": "Generation", "source": {"uri": "pvc://m/c"}}),
        Inputs("pvc://m/c"),
        SETTINGS,
    ),
]


@pytest.mark.parametrize("manifest", ALL_PODS, ids=lambda manifest: manifest["metadata"]["name"])
def test_every_pod_is_restricted(manifest: dict[str, Any]) -> None:
    """What Pod Security `restricted` asks for, and no API token."""
    pod = pod_of(manifest)
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 65532
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    for mount in pod["containers"][0]["volumeMounts"]:
        assert mount.get("readOnly") or mount["mountPath"] == "/tmp"
        assert "subPath" not in mount


def test_placement_reaches_engines_gateways_and_jobs() -> None:
    variant = {"task": "Generation", "source": {"uri": "pvc://m/c"}, "preparation": {"pod": PLACEMENT}}
    manifests = [
        engine({"accelerator": {"type": "CPU"}, "pod": PLACEMENT}),
        gateway_deployment(POLICY, spec(gateway={"pod": PLACEMENT}), SETTINGS),
        preparation_job(VARIANT, ModelVariantSpec.model_validate(variant), Inputs("pvc://m/c"), SETTINGS),
    ]
    for manifest in manifests:
        pod = pod_of(manifest)
        for field in ("nodeSelector", "tolerations", "imagePullSecrets", "runtimeClassName", "priorityClassName"):
            assert pod[field] == PLACEMENT[field], (manifest["kind"], field)
        assert pod["containers"][0]["resources"] == PLACEMENT["resources"]


@pytest.mark.parametrize(
    ("accelerator", "limits"),
    [
        ({"type": "GPU"}, {"nvidia.com/gpu": "1"}),
        ({"type": "GPU", "count": 4}, {"nvidia.com/gpu": "4"}),
        ({"type": "GPU", "resourceName": "nvidia.com/mig-1g.10gb"}, {"nvidia.com/mig-1g.10gb": "1"}),
        ({"type": "CPU"}, None),
    ],
)
def test_accelerators_become_limits(accelerator: dict[str, Any], limits: dict[str, str] | None) -> None:
    container = pod_of(engine({"accelerator": accelerator}))["containers"][0]
    assert container.get("resources", {}).get("limits") == limits


def test_gpu_limits_join_the_users() -> None:
    container = pod_of(engine({"accelerator": {"type": "GPU"}, "pod": PLACEMENT}))["containers"][0]
    assert container["resources"]["limits"] == {"memory": "16Gi", "nvidia.com/gpu": "1"}


@pytest.mark.parametrize(
    ("fields", "surge"),
    [
        ({"accelerator": {"type": "CPU"}, "replicas": 4}, 1),
        ({"accelerator": {"type": "GPU"}}, 1),
        ({"accelerator": {"type": "GPU"}, "replicas": 2}, 0),
        ({"accelerator": {"type": "GPU"}, "replicas": 2, "strategy": "Surge"}, 1),
        ({"accelerator": {"type": "CPU"}, "strategy": "Replace"}, 0),
    ],
)
def test_strategies(fields: dict[str, Any], surge: int) -> None:
    rolling = engine(fields)["spec"]["strategy"]["rollingUpdate"]
    assert rolling == {"maxSurge": surge, "maxUnavailable": 1 - surge}


def test_replicas_absent_is_one_and_zero_is_zero() -> None:
    assert engine({})["spec"]["replicas"] == 1
    assert engine({"replicas": 0})["spec"]["replicas"] == 0


def test_levels_and_modes_roll_nothing_but_changed_weights_do() -> None:
    plain = gateway_deployment(POLICY, spec(), SETTINGS)
    fields: dict[str, Any] = {
        "rollbackLevel": 0,
        "streaming": {"compression": "Off"},
        "batching": {},
        "gateway": {"rateLimit": {"requestsPerSecond": 5}, "requestTimeout": "1m", "demoPage": True},
    }
    assert gateway_deployment(POLICY, spec(**fields), SETTINGS) == plain
    changed = MODEL.model_copy(update={"digest": "sha256:bb"})
    templates = [engine({}, [model])["spec"]["template"] for model in (MODEL, changed)]
    assert templates[0]["metadata"]["annotations"] != templates[1]["metadata"]["annotations"]


def test_quantised_weights_and_drafts_reach_the_pod_and_roll_it() -> None:
    quantized = WeightSet(name="chat-int4", path="/claims/models/chat-int4", digest="sha256:q")
    draft = Draft(name="tiny", path="/claims/models/tiny", digest="sha256:d", device=DraftDevice.CPU)
    both = MODEL.model_copy(update={"quantized": quantized, "draft": draft, "full_weights": FullWeights.SWAP})
    manifest = engine({}, [both])
    assert ServedModel.model_validate(json.loads(environment(manifest)["SIXFOLD_MODELS"])[0]) == both
    other = both.model_copy(update={"draft": draft.model_copy(update={"digest": "sha256:e"})})
    annotations = [engine({}, [model])["spec"]["template"]["metadata"]["annotations"] for model in (MODEL, both, other)]
    assert len({str(annotation) for annotation in annotations}) == 3


def test_selectors_carry_no_version() -> None:
    for manifest in (plain := engine({})), gateway_deployment(POLICY, spec(), SETTINGS):
        labels = manifest["spec"]["selector"]["matchLabels"]
        assert set(labels) == {"sixfold.dev/policy", "sixfold.dev/component"}
        assert labels.items() <= manifest["spec"]["template"]["metadata"]["labels"].items()
    assert service(POLICY, "engine")["spec"]["selector"] == plain["spec"]["selector"]["matchLabels"]


def test_gateways_know_their_engines_and_keys() -> None:
    classification = {"variantRef": {"name": "mood"}, "engine": {"accelerator": {"type": "CPU"}}}
    gateway = {"apiKeysSecretRef": {"name": "keys"}}
    asked = spec(classification=classification, gateway=gateway)
    assert components(asked) == ("gateway", "engine", "classifier")
    manifest = gateway_deployment(POLICY, asked, SETTINGS)
    env = environment(manifest)
    assert json.loads(env["SIXFOLD_ENGINES"]) == ["bot-engine:8001", "bot-classifier:8001"]
    assert env["SIXFOLD_API_KEYS_DIRECTORY"] == "/etc/sixfold/api-keys"
    volumes = {volume["name"]: volume for volume in pod_of(manifest)["volumes"]}
    assert volumes["api-keys"]["secret"] == {"secretName": "keys", "optional": True}
    assert "SIXFOLD_API_KEYS_DIRECTORY" not in environment(gateway_deployment(POLICY, spec(), SETTINGS))


def test_engines_know_redis_and_gateways_the_dictionary() -> None:
    """As files in whole directories: what is rotated arrives without a restart, what is missing stops no pod."""
    both = RedisSpec(url_secret_ref=KeyRef(name="redis", key="address"), ca_secret_ref=KeyRef(name="ca", key="tls.crt"))
    manifest = engine({}, redis=both)
    assert environment(manifest)["SIXFOLD_REDIS_DIRECTORY"] == "/etc/sixfold/redis"
    volumes = {volume["name"]: volume for volume in pod_of(manifest)["volumes"]}
    assert volumes["redis"]["projected"]["sources"] == [
        {"secret": {"name": "redis", "items": [{"key": "address", "path": "url"}], "optional": True}},
        {"secret": {"name": "ca", "items": [{"key": "tls.crt", "path": "ca.crt"}], "optional": True}},
    ]
    mounts = {mount["mountPath"]: mount for mount in pod_of(manifest)["containers"][0]["volumeMounts"]}
    assert mounts["/etc/sixfold/redis"] == {"name": "redis", "mountPath": "/etc/sixfold/redis", "readOnly": True}
    assert "SIXFOLD_REDIS_DIRECTORY" not in environment(engine({}))
    gateway = gateway_deployment(POLICY, spec(streaming={"dictionaryConfigMapRef": DICTIONARY}), SETTINGS)
    assert environment(gateway)["SIXFOLD_STREAM_DICTIONARY_DIRECTORY"] == "/etc/sixfold/stream-dictionary"
    volumes = {volume["name"]: volume for volume in pod_of(gateway)["volumes"]}
    items = [{"key": "words", "path": "dictionary"}]
    assert volumes["stream-dictionary"]["configMap"] == {"name": "texts", "items": items, "optional": True}
    mounts = {mount["name"]: mount for mount in pod_of(gateway)["containers"][0]["volumeMounts"]}
    assert mounts["stream-dictionary"]["mountPath"] == "/etc/sixfold/stream-dictionary"


def test_engines_know_their_models_and_claims() -> None:
    manifest = engine({})
    (served,) = json.loads(environment(manifest)["SIXFOLD_MODELS"])
    assert ServedModel.model_validate(served) == MODEL
    mounts = {mount["mountPath"]: mount for mount in pod_of(manifest)["containers"][0]["volumeMounts"]}
    assert mounts["/claims/models"]["readOnly"] is True
    assert mounts["/etc/sixfold/config"]["readOnly"] is True


def test_jobs_of_hub_sources_write_their_claim_and_get_the_token() -> None:
    parsed = ModelVariantSpec.model_validate(
        {
            "task": "Generation",
            "source": {"uri": f"hf://org/name@{'0' * 40}"},
            "artifact": {"claimName": "cache"},
            "credentialsSecretRef": {"name": "hub"},
            "preparation": {"deadline": "1h30m"},
        }
    )
    inputs = Inputs(str(parsed.source.uri))
    job = preparation_job(VARIANT, parsed, inputs, SETTINGS)
    args = pod_of(job)["containers"][0]["args"]
    assert args[:3] == ["prepare", "--source", f"hf://org/name@{'0' * 40}"]
    assert args[-4:] == ["--artifact-claim", "cache", "--artifact-path", "chat"]
    mounts = {mount["mountPath"]: mount for mount in pod_of(job)["containers"][0]["volumeMounts"]}
    assert "readOnly" not in mounts["/claims/cache"]
    assert mounts["/etc/sixfold/credentials"]["readOnly"] is True
    assert pod_of(job)["securityContext"]["fsGroup"] == 65532
    assert job["spec"]["activeDeadlineSeconds"] == 5400
    assert artifact_place("chat", parsed, inputs.source) == ("cache", "chat")
    main = pod_of(job)["containers"][0]
    assert "HF_ENDPOINT" not in environment(job)
    mirrored = SETTINGS.model_copy(update={"hub_endpoint": "https://hub.example.com"})
    assert environment(preparation_job(VARIANT, parsed, inputs, mirrored))["HF_ENDPOINT"] == "https://hub.example.com"
    (rule,) = job["spec"]["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["containerName"]) == ("FailJob", main["name"])


TEXT = {"uri": "pvc://texts/calibration.jsonl", "samples": 64}
HELD_OUT = {"uri": "pvc://texts/heldout.jsonl"}


def job_args(spec: dict[str, Any], inputs: Inputs) -> dict[str, str]:
    """Options of `sixfold prepare` in the Job of a variant."""
    job = preparation_job(VARIANT, ModelVariantSpec.model_validate(spec), inputs, SETTINGS)
    verb, *args = pod_of(job)["containers"][0]["args"]
    assert verb == "prepare"
    return dict(zip(args[::2], args[1::2], strict=True))


def test_a_job_that_quantises_gets_precision_texts_and_budget() -> None:
    spec = {
        "task": "Generation",
        "source": {"variantRef": {"name": "full"}},
        "precision": {"scheme": "GPTQ", "bits": 4, "groupSize": 32, "modules": [{"match": "o_proj", "bits": 8}]},
        "calibration": TEXT,
        "evaluation": HELD_OUT,
        "lora": {"uri": "pvc://adapters/tone"},
        "artifact": {"claimName": "models"},
    }
    inputs = Inputs("pvc://source/full")
    args = job_args(spec, inputs)
    assert args["--source"] == "pvc://source/full"
    assert (args["--artifact-claim"], args["--artifact-path"]) == ("models", "chat")
    assert Precision.model_validate_json(args["--precision"]).modules[0].bits == 8
    assert TextSource.model_validate_json(args["--calibration"]).samples == 64
    assert json.loads(args["--evaluation"]) == HELD_OUT
    assert (args["--budget"], args["--lora"]) == ("1", "pvc://adapters/tone")
    assert "--draft-for" not in args
    parsed = ModelVariantSpec.model_validate(spec)
    assert claims(parsed, inputs) == {"source", "texts", "adapters", "models"}
    job = preparation_job(VARIANT, parsed, inputs, SETTINGS)
    mounts = {mount["mountPath"]: mount.get("readOnly") for mount in pod_of(job)["containers"][0]["volumeMounts"]}
    assert mounts == {
        "/tmp": None,
        "/claims/models": None,
        "/claims/source": True,
        "/claims/texts": True,
        "/claims/adapters": True,
    }
    assert pod_of(job)["securityContext"]["fsGroup"] == 65532
    assert "resources" not in pod_of(job)["containers"][0], "quantising asks for no GPU by itself"
    tighter = job_args({**spec, "perplexityBudgetPercent": "0.25"}, inputs)
    assert tighter["--budget"] == "0.25"


def test_a_claim_that_is_read_and_written_is_mounted_once() -> None:
    spec = {
        "task": "Classification",
        "source": {"uri": "pvc://models/mood"},
        "precision": {"scheme": "INT8"},
        "evaluation": HELD_OUT | {"uri": "pvc://models/heldout.jsonl"},
        "artifact": {"claimName": "models"},
    }
    inputs = Inputs("pvc://models/mood")
    assert job_args(spec, inputs)["--budget"] == "0.5"
    job = preparation_job(VARIANT, ModelVariantSpec.model_validate(spec), inputs, SETTINGS)
    mounts = [mount["mountPath"] for mount in pod_of(job)["containers"][0]["volumeMounts"]]
    assert sorted(mounts) == ["/claims/models", "/tmp"]


def test_a_job_that_compares_a_draft_reads_its_target() -> None:
    spec = {
        "task": "Generation",
        "source": {"uri": "pvc://small/draft"},
        "draftFor": {"name": "full"},
        "evaluation": HELD_OUT,
    }
    inputs = Inputs("pvc://small/draft", "pvc://models/full")
    args = job_args(spec, inputs)
    assert (args["--draft-for"], args["--target-name"]) == ("pvc://models/full", "full")
    assert not {"--artifact-claim", "--precision", "--budget"} & set(args)
    job = preparation_job(VARIANT, ModelVariantSpec.model_validate(spec), inputs, SETTINGS)
    mounts = {mount["mountPath"]: mount.get("readOnly") for mount in pod_of(job)["containers"][0]["volumeMounts"]}
    assert mounts == {"/tmp": None, "/claims/small": True, "/claims/models": True, "/claims/texts": True}
    assert "fsGroup" not in pod_of(job)["securityContext"]


def test_job_names_change_with_the_spec_and_the_variant() -> None:
    long = {**VARIANT, "metadata": {**VARIANT["metadata"], "name": "a" * 40}}
    one = ModelVariantSpec.model_validate({"task": "Generation", "source": {"uri": "pvc://m/c"}})
    two = ModelVariantSpec.model_validate(
        {"task": "Generation", "source": {"uri": "pvc://m/c"}, "preparation": {"deadline": "2h"}}
    )
    again = {**VARIANT, "metadata": {**VARIANT["metadata"], "uid": "v2"}}
    names = {job_name(VARIANT, one), job_name(VARIANT, two), job_name(again, one)}
    assert len(names) == 3
    assert job_name(VARIANT, one) == job_name(VARIANT, one)
    assert len(job_name(long, one)) <= 63


def test_a_sequence_grows_with_each_change_and_only_then() -> None:
    first = next_config(effective(spec()), None, 0, 1000)
    assert first.sequence == 1000
    live = config_map(POLICY, first)
    assert current_sequence(live) == 1000
    assert next_config(effective(spec()), live, 1000, 5000) == first
    assert next_config(effective(spec(rollbackLevel=1)), live, 1000, 5000).sequence == 5000
    # The clock went back, or a ConfigMap was deleted or edited by hand.
    assert next_config(effective(spec(rollbackLevel=1)), live, 1000, 7).sequence == 1001
    assert next_config(effective(spec()), None, 1000, 7).sequence == 1001
    assert next_config(effective(spec()), {"data": {"config.json": "{nonsense"}}, 1000, 7).sequence == 1001
    assert next_config(effective(spec()), live, 2000, 7).sequence == 2001


def test_encryption_reaches_gateway_and_engines_and_leaves_the_observers_their_port() -> None:
    asked = spec(tls={"secretRef": {"name": "bot-tls"}})
    gateway = gateway_deployment(POLICY, asked, SETTINGS)
    served = engine_deployment(POLICY, "engine", asked.engine, [MODEL], ["models"], SETTINGS, tls=asked.tls)
    for manifest in (gateway, served):
        pod = manifest["spec"]["template"]["spec"]
        (volume,) = (volume for volume in pod["volumes"] if volume["name"] == "tls")
        assert volume["secret"]["secretName"] == "bot-tls"
        assert [item["path"] for item in volume["secret"]["items"]] == ["ca.crt", "tls.crt", "tls.key"]
        assert volume["secret"]["optional"] is True, "the gateway says what is missing"
        main = pod["containers"][0]
        assert {"name": "tls", "mountPath": "/etc/sixfold/tls", "readOnly": True} in main["volumeMounts"]
        assert environment(manifest)["SIXFOLD_TLS_DIRECTORY"] == "/etc/sixfold/tls"
    (container,) = served["spec"]["template"]["spec"]["containers"]
    assert [(port["name"], port["containerPort"]) for port in container["ports"]] == [("http", 8001), ("wire", 8443)]
    assert container["readinessProbe"]["httpGet"]["port"] == 8001
    assert json.loads(environment(gateway)["SIXFOLD_ENGINES"]) == ["bot-engine:8443"]
    plain = engine_deployment(POLICY, "engine", asked.engine, [MODEL], ["models"], SETTINGS)
    assert "SIXFOLD_TLS_DIRECTORY" not in json.dumps(plain)


def test_traces_go_where_the_chart_says() -> None:
    traced = SETTINGS.model_copy(update={"otlp_endpoint": "http://collector:4318"})
    served = engine_deployment(POLICY, "engine", spec().engine, [MODEL], ["models"], traced)
    for manifest in (gateway_deployment(POLICY, spec(), traced), served):
        assert environment(manifest)["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://collector:4318"
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" not in environment(gateway_deployment(POLICY, spec(), SETTINGS))
