"""Where an engine keeps the keys and values of one policy, for all of its models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from sixfold_api.runtime_config import KVReuseConfig
from sixfold_runtime.engine.kv_metrics import KVMetrics
from sixfold_runtime.engine.kv_store import KVStore
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.modes.kv_reuse import tenant_salt


@dataclass
class Shelf:
    """Where the blocks of one policy are, for all models of an engine."""

    store: KVStore
    metrics: KVMetrics
    namespace: str
    policy: str
    _followed: KVReuseConfig | None = None

    @classmethod
    def open(cls, metrics: EngineMetrics, redis_directory: Path | None, device: str) -> Shelf:
        """
        Args:
            redis_directory: of the Redis that all engines of the policy share, where the configuration wants one.
            device: auto, cpu or cuda, as in the settings.
        """
        namespace, policy = metrics.labels["namespace"], metrics.labels["policy"]
        pin_memory = device != "cpu" and torch.cuda.is_available()
        store = KVStore(f"{namespace}/{policy}", redis_directory, metrics.kv, pin_memory=pin_memory)
        return cls(store, metrics.kv, namespace, policy)

    def follow(self, config: KVReuseConfig | None) -> None:
        """Obey a configuration; None: nothing is kept. Asked in every step, so the same object costs nothing."""
        if config is not self._followed:
            self._followed = config
            self.store.follow(config)

    def salt(self, tenant: str) -> str:
        """Tells a tenant's blocks from those of others."""
        return tenant_salt(self.namespace, self.policy, tenant)
