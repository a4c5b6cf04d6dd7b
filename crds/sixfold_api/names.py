"""Names that operator and runtime share: group, labels, child names, ports, paths, environment variables."""

from __future__ import annotations

GROUP = "sixfold.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
POLICY_KIND, POLICY_PLURAL = "InferencePolicy", "inferencepolicies"
VARIANT_KIND, VARIANT_PLURAL = "ModelVariant", "modelvariants"
TICKET_KIND, TICKET_PLURAL = "OptimizationTicket", "optimizationtickets"

POLICY_LABEL = f"{GROUP}/policy"
VARIANT_LABEL = f"{GROUP}/variant"
COMPONENT_LABEL = f"{GROUP}/component"
SEQUENCE_ANNOTATION = f"{GROUP}/config-sequence"
"""Patched on pods after a ConfigMap write: it makes the kubelet refresh the mounted volume at once."""

GATEWAY, ENGINE, CLASSIFIER, PREPARE = "gateway", "engine", "classifier", "prepare"

GATEWAY_PORT = 8000
ENGINE_PORT = 8001
ENGINE_TLS_PORT = 8443
"""Where an engine speaks to gateways if that is encrypted; its other port then only says how it is."""
DRAIN_SECONDS = 120
"""How long running requests may finish after SIGTERM, unless the policy says otherwise; the pods' grace period is
longer than that."""
CONFIG_DIRECTORY = "/etc/sixfold/config"
CONFIG_KEY = "config.json"
API_KEYS_DIRECTORY = "/etc/sixfold/api-keys"
REDIS_DIRECTORY = "/etc/sixfold/redis"
REDIS_URL_FILE, REDIS_CA_FILE = "url", "ca.crt"
STREAM_DICTIONARY_DIRECTORY = "/etc/sixfold/stream-dictionary"
STREAM_DICTIONARY_FILE = "dictionary"
TLS_DIRECTORY = "/etc/sixfold/tls"
TLS_CA_FILE, TLS_CERTIFICATE_FILE, TLS_KEY_FILE = "ca.crt", "tls.crt", "tls.key"
"""As cert-manager writes them."""
CREDENTIALS_DIRECTORY = "/etc/sixfold/credentials"
CLAIMS_DIRECTORY = "/claims"
"""Each claim is mounted at /claims/<claim>."""

ENV_OTLP_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
"""OpenTelemetry's own name; read by its SDK."""
# Read by the runtime as settings with the prefix SIXFOLD_.
ENV_POLICY = "SIXFOLD_POLICY"
ENV_NAMESPACE = "SIXFOLD_NAMESPACE"
ENV_POD = "SIXFOLD_POD"
ENV_MODELS = "SIXFOLD_MODELS"
"""JSON list of ServedModel."""
ENV_ENGINES = "SIXFOLD_ENGINES"
"""JSON list of host:port; a host may resolve to several pods."""
ENV_DEVICE = "SIXFOLD_DEVICE"
"""cpu or cuda, as the accelerator of the policy says."""
ENV_CONFIG_DIRECTORY = "SIXFOLD_CONFIG_DIRECTORY"
ENV_API_KEYS_DIRECTORY = "SIXFOLD_API_KEYS_DIRECTORY"
ENV_DRAIN_SECONDS = "SIXFOLD_DRAIN_SECONDS"
ENV_REDIS_DIRECTORY = "SIXFOLD_REDIS_DIRECTORY"
ENV_TLS_DIRECTORY = "SIXFOLD_TLS_DIRECTORY"
ENV_STREAM_DICTIONARY_DIRECTORY = "SIXFOLD_STREAM_DICTIONARY_DIRECTORY"


def config_map_name(policy: str) -> str:
    return f"{policy}-runtime"


def component_name(policy: str, component: str) -> str:
    """Name of the Deployment and of the Service of a component."""
    return f"{policy}-{component}"


def ticket_name(policy: str, fingerprint: str) -> str:
    """Name of an OptimizationTicket: one a fingerprint."""
    return f"{policy}-{fingerprint}"


def claim_path(claim: str, path: str = "") -> str:
    """Where a folder of a claim lies inside a pod."""
    return f"{CLAIMS_DIRECTORY}/{claim}/{path}".rstrip("/")
