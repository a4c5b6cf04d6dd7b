"""Who asked kube-apiserver for what: its audit log of a few users, for measurements and for the proof of least rights.

As one of `extra_flags` of a control plane, `flags(folder, user)`; later, `requests(log_file(folder))`.
"""

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

WRITES = frozenset({"create", "update", "patch", "delete", "deletecollection"})


class Request(NamedTuple):
    """One request, as the authorizer saw it.

    Attributes:
        moment: when it came, Unix seconds.
        resource: the plural, with `/` and the subresource where there is one; empty where the path names none.
        namespace: empty for requests over all namespaces.
        code: status of the answer; for a watch, of its beginning.
    """

    moment: float
    user: str
    verb: str
    group: str
    resource: str
    namespace: str
    name: str
    code: int
    path: str

    @property
    def writes(self) -> bool:
        return self.verb in WRITES


def flags(folder: Path, *users: str) -> tuple[str, ...]:
    """kube-apiserver's flags for a log of what these users ask for; writes the policy into `folder`."""
    rules = [{"level": "Metadata", "users": list(users)}, {"level": "None"}]
    policy = {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"], "rules": rules}
    policy_file = folder / "audit-policy.json"
    policy_file.write_text(json.dumps(policy))
    return f"--audit-policy-file={policy_file}", f"--audit-log-path={log_file(folder)}"


def log_file(folder: Path) -> Path:
    """Where that log is."""
    return folder / "audit.log"


def requests(log: Path, since: float = 0.0, until: float = float("inf")) -> Iterator[Request]:
    """Each request that came within those Unix seconds, once: a watch is told when it begins and when it ends."""
    seen: set[str] = set()
    with log.open() as lines:
        for line in lines:
            entry = json.loads(line)
            if entry["auditID"] in seen:
                continue
            seen.add(entry["auditID"])
            request = _request(entry)
            if since <= request.moment < until:
                yield request


def _request(entry: dict[str, Any]) -> Request:
    about = entry.get("objectRef", {})
    parts = (about.get("resource", ""), about.get("subresource", ""))
    return Request(
        moment=datetime.fromisoformat(entry["requestReceivedTimestamp"].replace("Z", "+00:00")).timestamp(),
        user=entry["user"]["username"],
        verb=entry["verb"],
        group=about.get("apiGroup", ""),
        resource="/".join(part for part in parts if part),
        namespace=about.get("namespace", ""),
        name=about.get("name", ""),
        code=entry.get("responseStatus", {}).get("code", 0),
        path=entry["requestURI"],
    )
