"""What the policy names and a gateway doesn't find stands in its state, for the operator to tell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

TENANTS = [{"name": name, "priority": "High", "maxPriority": "High"} for name in ("alice", "alcie")]


def test_misspelt_tenants_and_a_missing_dictionary(new_gateway: Any, until: Callable[..., Any], tmp_path: Path) -> None:
    keys, mounted = tmp_path / "keys", tmp_path / "mounted"
    keys.mkdir()
    mounted.mkdir()
    (keys / "alice").write_text("alice-key")
    gateway = new_gateway("127.0.0.1:1", keys=keys, dictionary=mounted, ready=False)
    gateway.apply(tenants=TENANTS)

    def told() -> list[str]:
        return list(gateway.client.get("/state").json()["notFound"])

    assert told() == [
        "spec.gateway.tenants names alcie, which isn't the name of an API key",
        f"there is no stream dictionary: {mounted / 'dictionary'} is missing",
    ]
    (keys / "alcie").write_text("alcie-key")
    (mounted / "dictionary").write_bytes(b"what the king said to the queen " * 20)
    until(lambda: told() == [], "both to be found")
