"""Settings of a runtime process, from environment variables with the prefix SIXFOLD_ (the pod template sets them)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from sixfold_api.names import DRAIN_SECONDS, ENGINE_PORT, ENGINE_TLS_PORT, GATEWAY_PORT
from sixfold_api.runtime_config import ServedModel

Port = Annotated[int, Field(ge=0, le=65535)]
"""0 takes a free one."""


class RuntimeSettings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="SIXFOLD_", frozen=True, use_attribute_docstrings=True)

    namespace: str = "default"
    """Namespace of the policy; a label of the metrics."""
    policy: str = "local"
    """Name of the policy; a label of the metrics and the public alias in /v1/models."""
    pod: str = "local"
    """Name of the pod."""
    host: str = "0.0.0.0"
    """Address to listen on."""
    gateway_port: Port = GATEWAY_PORT
    engine_port: Port = ENGINE_PORT
    engine_tls_port: Port = ENGINE_TLS_PORT
    """Where gateways are served if tls_directory is given; engine_port is for observers only then."""
    models: list[ServedModel] = []
    """Models that an engine loads."""
    engines: list[str] = []
    """host:port of each engine Service that a gateway connects to; a host may resolve to several pods."""
    config_directory: Path | None = None
    """Where config.json is mounted; without it the embedded defaults hold."""
    api_keys_directory: Path | None = None
    """Where the Secret with the API keys is mounted; without it the gateway is open."""
    redis_directory: Path | None = None
    """Where the address of Redis is mounted: the file `url`, and `ca.crt` where its authority isn't a known one."""
    stream_dictionary_directory: Path | None = None
    """Where the zstd dictionary of streams is mounted: the file `dictionary` in it, or the file itself."""
    tls_directory: Path | None = None
    """Where the certificates of gateway and engines are mounted (ca.crt, tls.crt, tls.key); without them they speak in
    the clear."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$")] = "auto"
    """auto takes CUDA where a device is there, else the CPU."""
    drain_seconds: float = DRAIN_SECONDS
    """How long running requests may finish after SIGTERM."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Lowest level that is logged."""
