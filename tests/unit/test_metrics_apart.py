"""Metrics of parts that share a process: each has a registry of its own, so that none hides or doubles another's."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry

from sixfold_runtime.config import ConfigStore, default_config
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.gateway.metrics import GatewayMetrics
from sixfold_runtime.gateway.pool import Pool
from sixfold_runtime.settings import RuntimeSettings

SETTINGS = RuntimeSettings(namespace="ml", policy="bot")


def own_series(registry: CollectorRegistry) -> set[str]:
    return {family.name for family in registry.collect() if family.name.startswith("sixfold_")}


def test_parts_of_one_process_keep_their_own_count() -> None:
    shared = own_series(REGISTRY)
    first, second = EngineMetrics(SETTINGS), EngineMetrics(SETTINGS)
    gateway = GatewayMetrics(SETTINGS, ConfigStore(default_config(3)), Pool([], SETTINGS.policy), lambda: 0)
    first.of("chat").speculated(2, 4, 3)
    second.of("chat").speculated(2, 1, 0)
    where = {"namespace": "ml", "policy": "bot", "variant": "chat", "level": "2"}
    drafted = [each.registry.get_sample_value("sixfold_draft_tokens_total", where) for each in (first, second)]
    assert drafted == [4, 1]
    assert own_series(gateway.registry), "the gateway has its own"
    assert own_series(REGISTRY) == shared, "nothing is in the registry that a whole process shares"
