"""Nothing of the release stands between a client and the API server: rules are CEL in the CRDs, checked there."""

from __future__ import annotations

import pytest

EVERYTHING = [
    "--set=redis.enabled=true,prometheus.enabled=true,alerts.enabled=true,rules.enabled=true",
    "--set=podMonitor.enabled=true,dashboards.enabled=true,metrics.serviceMonitor.enabled=true",
]


@pytest.mark.parametrize("values", [[], EVERYTHING], ids=["defaults", "everything"])
def test_a_pod_that_is_down_blocks_no_write(render, values: list[str]) -> None:
    manifests = render(*values)
    groups = {manifest["apiVersion"].split("/")[0] for manifest in manifests}
    assert not groups & {"admissionregistration.k8s.io", "apiregistration.k8s.io"}
    for manifest in manifests:
        assert "finalizers" not in manifest["metadata"], manifest["kind"]
        if manifest["kind"] == "CustomResourceDefinition":
            assert manifest["spec"].get("conversion", {}).get("strategy", "None") == "None", "no webhook converts"
