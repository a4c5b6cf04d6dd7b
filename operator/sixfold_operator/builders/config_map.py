"""RuntimeConfig -> the ConfigMap <policy>-runtime, and back. Pure."""

from __future__ import annotations

import json
from typing import Any

from sixfold_api.effective import Effective
from sixfold_api.names import CONFIG_KEY, POLICY_LABEL, config_map_name
from sixfold_api.runtime_config import CanaryConfig, RuntimeConfig
from sixfold_operator.builders.common import Manifest, child


def current_config(config_map: Manifest | None) -> dict[str, Any]:
    """The config.json in a ConfigMap as it lies there; empty if it is absent or was mangled by hand."""
    try:
        content = json.loads((config_map or {}).get("data", {}).get(CONFIG_KEY, ""))
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def current_sequence(config_map: Manifest | None) -> int:
    """Sequence in a ConfigMap; 0 if there is none."""
    sequence = current_config(config_map).get("sequence")
    return sequence if isinstance(sequence, int) and not isinstance(sequence, bool) and sequence > 0 else 0


def next_config(
    effective: Effective,
    config_map: Manifest | None,
    last_sequence: int,
    unix_ms: int,
    canary: CanaryConfig | None = None,
) -> RuntimeConfig:
    """What the ConfigMap has to hold. The sequence stays while the content does, else it is
    max(last + 1, unix milliseconds), where last is also what the status remembers: a ConfigMap that was deleted
    must not take pods back."""
    sequence = current_sequence(config_map)
    kept = RuntimeConfig(sequence=sequence, stable=effective.config, canary=canary, provenance=effective.provenance)
    if sequence >= max(1, last_sequence) and kept.to_dict() == current_config(config_map):
        return kept
    return kept.model_copy(update={"sequence": max(sequence + 1, last_sequence + 1, unix_ms)})


def config_map(policy: Manifest, config: RuntimeConfig) -> Manifest:
    """The ConfigMap, with the configuration indented for people who read it."""
    name = policy["metadata"]["name"]
    manifest = child(policy, "v1", "ConfigMap", config_map_name(name), {POLICY_LABEL: name})
    manifest["data"] = {CONFIG_KEY: json.dumps(config.to_dict(), indent=2)}
    return manifest
