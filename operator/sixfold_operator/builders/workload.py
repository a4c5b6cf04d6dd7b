"""InferencePolicy -> Deployments and Services of gateway, engine and classifier. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from sixfold_api.kv_reuse import RedisSpec
from sixfold_api.names import (
    API_KEYS_DIRECTORY,
    CLASSIFIER,
    CONFIG_DIRECTORY,
    DRAIN_SECONDS,
    ENGINE,
    ENGINE_PORT,
    ENGINE_TLS_PORT,
    ENV_API_KEYS_DIRECTORY,
    ENV_CONFIG_DIRECTORY,
    ENV_DEVICE,
    ENV_DRAIN_SECONDS,
    ENV_ENGINES,
    ENV_MODELS,
    ENV_NAMESPACE,
    ENV_OTLP_ENDPOINT,
    ENV_POD,
    ENV_POLICY,
    ENV_REDIS_DIRECTORY,
    ENV_STREAM_DICTIONARY_DIRECTORY,
    ENV_TLS_DIRECTORY,
    GATEWAY,
    GATEWAY_PORT,
    GROUP,
    REDIS_CA_FILE,
    REDIS_DIRECTORY,
    REDIS_URL_FILE,
    STREAM_DICTIONARY_DIRECTORY,
    STREAM_DICTIONARY_FILE,
    TLS_CA_FILE,
    TLS_CERTIFICATE_FILE,
    TLS_DIRECTORY,
    TLS_KEY_FILE,
    component_name,
    config_map_name,
)
from sixfold_api.pods import KeyRef, TLSSpec
from sixfold_api.policy import EngineSpec, InferencePolicySpec
from sixfold_api.runtime_config import ServedModel
from sixfold_api.scalars import AcceleratorType, RolloutStrategy, duration_seconds
from sixfold_operator.builders.availability import spread
from sixfold_operator.builders.common import (
    MANAGED_BY,
    MANAGED_BY_LABEL,
    Manifest,
    Mount,
    child,
    claim_mounts,
    container,
    digest,
    field_env,
    http_probe,
    pod_spec,
    selector,
)
from sixfold_operator.settings import OperatorSettings

ARTIFACTS_ANNOTATION = f"{GROUP}/artifacts"
"""Hash of the digests of what a pod serves: changed weights roll the pods."""
SCALED_BY_ANNOTATION = f"{GROUP}/scaled-by"
"""On a Deployment whose `replicas` this operator leaves alone."""
DEFAULT_GPU_RESOURCE = "nvidia.com/gpu"
PRE_STOP_SECONDS = 3
"""A pod that ends keeps answering while endpoints and DNS forget it."""
GATEWAY_STARTUP_SECONDS = 600
"""How long a gateway may take until it answers /healthz: it is unready until an engine is there, and waits for that."""
SLACK_SECONDS = 600
"""For pulling an image, and placing a pod, before it starts."""

_PORTS = {GATEWAY: GATEWAY_PORT, ENGINE: ENGINE_PORT, CLASSIFIER: ENGINE_PORT}


def components(spec: InferencePolicySpec) -> tuple[str, ...]:
    """The components that a policy asks for."""
    own_classifier = spec.classification is not None and spec.classification.engine is not None
    return (GATEWAY, ENGINE, CLASSIFIER) if own_classifier else (GATEWAY, ENGINE)


def service(policy: Manifest, component: str) -> Manifest:
    """The gateway's Service, or the headless one under which gateways find each engine pod."""
    name = policy["metadata"]["name"]
    port = _PORTS[component]
    labels = selector(name, component)
    manifest = child(policy, "v1", "Service", component_name(name, component), labels)
    manifest["spec"] = {
        "selector": labels,
        "ports": [{"name": "http", "port": port, "targetPort": port, "protocol": "TCP"}],
        # Gateways judge by what an engine says: they connect before it is ready and lose no request when it goes.
        **({} if component == GATEWAY else {"clusterIP": "None", "publishNotReadyAddresses": True}),
    }
    return manifest


def gateway_deployment(policy: Manifest, spec: InferencePolicySpec, settings: OperatorSettings) -> Manifest:
    """The gateway: CPU only, API keys and dictionary mounted as files. Whichever is missing doesn't keep it from
    starting."""
    name = policy["metadata"]["name"]
    gateway = spec.gateway
    mounts = [_config_mount(name)]
    port = ENGINE_TLS_PORT if spec.tls else ENGINE_PORT
    engines = [f"{component_name(name, part)}:{port}" for part in components(spec) if part != GATEWAY]
    env = [{"name": ENV_ENGINES, "value": json.dumps(engines)}]
    _add_tls(spec.tls, mounts, env)
    if gateway.api_keys_secret_ref is not None:
        secret = {"secret": {"secretName": gateway.api_keys_secret_ref.name, "optional": True}}
        mounts.append(Mount("api-keys", secret, API_KEYS_DIRECTORY))
        env.append({"name": ENV_API_KEYS_DIRECTORY, "value": API_KEYS_DIRECTORY})
    dictionary = spec.streaming.dictionary_config_map_ref
    if dictionary is not None:
        source = {"configMap": _entry(dictionary, STREAM_DICTIONARY_FILE)}
        mounts.append(Mount("stream-dictionary", source, STREAM_DICTIONARY_DIRECTORY))
        env.append({"name": ENV_STREAM_DICTIONARY_DIRECTORY, "value": STREAM_DICTIONARY_DIRECTORY})
    main = container(settings, GATEWAY, gateway.pod, mounts)
    _serve(main, policy, GATEWAY, "gateway", [*env, *_tracing(settings)])
    main["startupProbe"] = http_probe("/healthz", GATEWAY_PORT, 2, GATEWAY_STARTUP_SECONDS // 2)
    template = _template(name, GATEWAY, pod_spec(main, gateway.pod, mounts))
    _drain(template["spec"], spec.drain_seconds)
    manifest = _deployment(
        policy, GATEWAY, None if gateway.autoscaling else gateway.replicas or 1, template, surge=True
    )
    manifest["spec"]["progressDeadlineSeconds"] = GATEWAY_STARTUP_SECONDS + SLACK_SECONDS
    return manifest


def engine_deployment(
    policy: Manifest,
    component: str,
    engine: EngineSpec,
    models: Sequence[ServedModel],
    claims: Sequence[str],
    settings: OperatorSettings,
    redis: RedisSpec | None = None,
    drain_seconds: float = DRAIN_SECONDS,
    tls: TLSSpec | None = None,
) -> Manifest:
    """Engine pods of `component` (engine or classifier) that load `models` from `claims`, and may share keys and
    values in `redis`, whose address is mounted as a file. They start without it too. Without the certificate that
    `tls` asks for they serve nobody."""
    name = policy["metadata"]["name"]
    mounts = [_config_mount(name), *claim_mounts(claims), *([_redis_mount(redis)] if redis else [])]
    env: list[dict[str, Any]] = []
    _add_tls(tls, mounts, env)
    main = container(settings, ENGINE, engine.pod, mounts)
    _add_accelerator(main, engine)
    # Named, not left to chance: a GPU that the container can't see is an error, not a slow CPU.
    device = "cuda" if engine.accelerator.type is AcceleratorType.GPU else "cpu"
    env += [{"name": ENV_MODELS, "value": _models_json(models)}, {"name": ENV_DEVICE, "value": device}]
    if redis is not None:
        env.append({"name": ENV_REDIS_DIRECTORY, "value": REDIS_DIRECTORY})
    _serve(main, policy, component, "engine", [*env, *_tracing(settings)])
    if tls is not None:
        main["ports"].append({"name": "wire", "containerPort": ENGINE_TLS_PORT, "protocol": "TCP"})
    # Started means loaded: until then only this deadline ends the pod.
    startup_seconds = math.ceil(duration_seconds(engine.startup_deadline))
    main["startupProbe"] = http_probe("/readyz", ENGINE_PORT, 2, math.ceil(startup_seconds / 2))
    template = _template(name, component, pod_spec(main, engine.pod, mounts))
    _drain(template["spec"], drain_seconds)
    template["metadata"]["annotations"] = {ARTIFACTS_ANNOTATION: digest(list(_digests(models)))}
    manifest = _deployment(policy, component, _replicas(engine), template, surge=surges(engine))
    manifest["spec"]["progressDeadlineSeconds"] = startup_seconds + SLACK_SECONDS
    return manifest


def _replicas(engine: EngineSpec) -> int | None:
    """None where something else counts."""
    if engine.autoscaling is not None:
        return None
    return 1 if engine.replicas is None else engine.replicas


def surges(engine: EngineSpec) -> bool:
    """Whether a rollout starts a new pod before an old one stops."""
    if engine.strategy is RolloutStrategy.AUTO:
        fewest = engine.autoscaling.min_replicas if engine.autoscaling else _replicas(engine) or 0
        return engine.accelerator.type is AcceleratorType.CPU or fewest <= 1
    return engine.strategy is RolloutStrategy.SURGE


def _digests(models: Sequence[ServedModel]) -> Iterator[str]:
    for model in models:
        yield from (weights.digest for weights in (model, model.quantized, model.draft) if weights is not None)


def _models_json(models: Sequence[ServedModel]) -> str:
    return json.dumps([model.to_dict() for model in models], sort_keys=True)


def _config_mount(policy: str) -> Mount:
    """The whole directory, never a subPath: the kubelet refreshes only whole volumes."""
    return Mount("config", {"configMap": {"name": config_map_name(policy)}}, CONFIG_DIRECTORY)


def _redis_mount(redis: RedisSpec) -> Mount:
    """Two entries, maybe of two Secrets, in one directory; a rotated password arrives without a restart."""
    entries = [_entry(redis.url_secret_ref, REDIS_URL_FILE)]
    if redis.ca_secret_ref is not None:
        entries.append(_entry(redis.ca_secret_ref, REDIS_CA_FILE))
    return Mount("redis", {"projected": {"sources": [{"secret": entry} for entry in entries]}}, REDIS_DIRECTORY)


def _tracing(settings: OperatorSettings) -> list[dict[str, Any]]:
    return [{"name": ENV_OTLP_ENDPOINT, "value": settings.otlp_endpoint}] if settings.otlp_endpoint else []


def _add_tls(tls: TLSSpec | None, mounts: list[Mount], env: list[dict[str, Any]]) -> None:
    if tls is not None:
        files = [{"key": file, "path": file} for file in (TLS_CA_FILE, TLS_CERTIFICATE_FILE, TLS_KEY_FILE)]
        # Without it pods start, speak to nobody, and say why: the kubelet's own words stay in an Event.
        secret = {"secretName": tls.secret_ref.name, "items": files, "optional": True}
        mounts.append(Mount("tls", {"secret": secret}, TLS_DIRECTORY))
        env.append({"name": ENV_TLS_DIRECTORY, "value": TLS_DIRECTORY})


def _entry(ref: KeyRef, file: str) -> Manifest:
    """An entry of a Secret or a ConfigMap as a file; the object or the entry may be missing."""
    return {"name": ref.name, "items": [{"key": ref.key, "path": file}], "optional": True}


def _serve(main: Manifest, policy: Manifest, component: str, role: str, env: list[dict[str, Any]]) -> None:
    """Command, environment, port, probes and shutdown of a serving container."""
    port = _PORTS[component]
    main["command"] = ["sixfold"]
    main["args"] = ["serve", "--role", role]
    main["env"] = [
        {"name": ENV_POLICY, "value": policy["metadata"]["name"]},
        field_env(ENV_NAMESPACE, "metadata.namespace"),
        field_env(ENV_POD, "metadata.name"),
        {"name": ENV_CONFIG_DIRECTORY, "value": CONFIG_DIRECTORY},
        {"name": "HOME", "value": "/tmp"},
        *env,
    ]
    main["ports"] = [{"name": "http", "containerPort": port, "protocol": "TCP"}]
    main["readinessProbe"] = http_probe("/readyz", port, 2, 2)
    main["livenessProbe"] = http_probe("/healthz", port, 10, 6)
    main["lifecycle"] = {"preStop": {"sleep": {"seconds": PRE_STOP_SECONDS}}}


def _add_accelerator(main: Manifest, engine: EngineSpec) -> None:
    if engine.accelerator.type is not AcceleratorType.GPU:
        return
    resource = engine.accelerator.resource_name or DEFAULT_GPU_RESOURCE
    limits = main.setdefault("resources", {}).setdefault("limits", {})
    limits[resource] = str(engine.accelerator.count or 1)


def _template(policy: str, component: str, spec: Manifest) -> Manifest:
    spec["topologySpreadConstraints"] = spread(policy, component)
    labels = {MANAGED_BY_LABEL: MANAGED_BY, **selector(policy, component)}
    return {"metadata": {"labels": labels}, "spec": spec}


def _drain(spec: Manifest, drain_seconds: float) -> None:
    """Let running requests finish, and the pod live for longer than they may take."""
    spec["containers"][0]["env"].append({"name": ENV_DRAIN_SECONDS, "value": f"{drain_seconds:g}"})
    spec["terminationGracePeriodSeconds"] = PRE_STOP_SECONDS + math.ceil(drain_seconds) + 7


def _deployment(policy: Manifest, component: str, replicas: int | None, template: Manifest, *, surge: bool) -> Manifest:
    name = policy["metadata"]["name"]
    labels = selector(name, component)
    manifest = child(policy, "apps/v1", "Deployment", component_name(name, component), labels)
    if replicas is None:
        manifest["metadata"]["annotations"] = {SCALED_BY_ANNOTATION: "autoscaler"}
    manifest["spec"] = {
        **({} if replicas is None else {"replicas": replicas}),
        "selector": {"matchLabels": labels},
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": 1 if surge else 0, "maxUnavailable": 0 if surge else 1},
        },
        "revisionHistoryLimit": 2,
        "template": template,
    }
    return manifest
