"""Settings of the operator's process, from environment variables with the prefix SIXFOLD_."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class OperatorSettings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="SIXFOLD_", frozen=True, use_attribute_docstrings=True)

    runtime_image: Annotated[str, Field(min_length=1)]
    """Image of gateways, engines and preparation Jobs."""
    runtime_image_pull_policy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    """imagePullPolicy of those pods."""
    hub_endpoint: Annotated[str, Field(pattern=r"^(https?://[^\s/]+(/\S*)?)?$")] = ""
    """Address of the hub that hf:// sources are fetched from; empty takes the public one."""
    otlp_endpoint: Annotated[str, Field(pattern=r"^(https?://[^\s/]+(/\S*)?)?$")] = ""
    """Collector that gateways and engines send traces to, as OTLP over HTTP; empty: none are made."""
    network_policies: bool = False
    """Whether pods admit only those who need them."""
    network_policy_observers: list[dict[str, Any]] = []
    """NetworkPolicyPeers that may read /state and /metrics of all pods, as a JSON list: the operator and Prometheus."""
    ingress_annotations: dict[str, str] = {}
    """Further annotations of each gateway's Ingress, as a JSON object."""
    cluster_name: Annotated[str, Field(pattern=r"^([a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?)?$")] = ""
    """Tells this cluster's tickets apart in sinks that several clusters share; empty where there is one."""
    watch_namespaces: list[str] = []
    """Namespaces to serve, as a JSON list; empty serves all."""
    resync_seconds: Annotated[float, Field(gt=0)] = 300.0
    """How often everything is listed and looked at again, in case that a watch lost something."""
    workers: Annotated[int, Field(ge=1, le=64)] = 8
    """Objects that are reconciled at the same time."""
    lease: Annotated[str, Field(pattern=r"^([a-z0-9][-a-z0-9]*/[a-z0-9][-.a-z0-9]*)?$")] = ""
    """namespace/name of the Lease whose holder acts, while others stand by. Empty: this one acts without asking, which
    is right only where no other operator serves the same namespaces."""
    lease_duration_seconds: Annotated[int, Field(ge=3, le=300)] = 10
    """After how long a Lease that isn't renewed is free. Its holder renews it every 0.3 of that, and ends after 0.7."""
    identity: Annotated[str, Field(max_length=253)] = ""
    """Of the Lease's holder: the pod's name. Empty takes the host's name and a random number."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 9400
    """Port of /metrics, /healthz and /readyz; 0 takes a free one."""
    prometheus_url: Annotated[str, Field(pattern=r"^(https?://[^\s]+)?$")] = ""
    """Prometheus that signals are read from; empty: nothing is watched, levels move only by hand."""
    prometheus_timeout_seconds: Annotated[float, Field(gt=0, le=60)] = 5.0
    """How long a query may take."""
    prometheus_bearer_token_file: Path | None = None
    """Token for it; read each round."""
    prometheus_ca_file: Path | None = None
    """Certificate authorities that vouch for it; absent means the system's."""
    signals_file: Path | None = None
    """Further signals and other thresholds of the built-in ones, a YAML or JSON list; read again when it changes."""
    sinks_file: Path | None = None
    """Where tickets go beside the cluster, a YAML or JSON list; read again when it changes."""
    alerts_port: Annotated[int, Field(ge=0, le=65535)] = 9401
    """Port of the receiver of Alertmanager's webhooks; 0 takes a free one."""
    alerts_token_file: Path | None = None
    """Bearer token that senders of alerts must give; absent means no receiver."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Lowest level that is logged."""
