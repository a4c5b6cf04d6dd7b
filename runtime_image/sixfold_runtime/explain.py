"""`sixfold explain`: which value holds, which layer set it, and why; and what each mode does."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sixfold_api.control_status import Verdict
from sixfold_api.effective import Effective, effective
from sixfold_api.modes import ModeState
from sixfold_api.names import GROUP, POLICY_KIND, POLICY_PLURAL, VERSION
from sixfold_api.policy import InferencePolicySpec, InferencePolicyStatus, ModeStatus
from sixfold_api.runtime_config import SetBy
from sixfold_runtime import manifests
from sixfold_runtime.config import describe

_STYLES = {
    ModeState.ACTIVE: "green",
    ModeState.CANARY: "cyan",
    ModeState.SUSPENDED: "red",
    ModeState.BELOW_LEVEL: "yellow",
    ModeState.UNSUPPORTED: "red",
    ModeState.OFF: "dim",
    SetBy.SPEC: "bold",
    SetBy.TUNED: "cyan",
    SetBy.SUSPENDED: "red",
    SetBy.LEVEL: "yellow",
    SetBy.DEFAULT: "dim",
}


class ExplainError(Exception):
    """Why nothing can be explained, for the person who asked."""


@dataclass(frozen=True)
class Explanation:
    """A policy as it was written, what it comes to, and what a cluster reports of it."""

    name: str
    namespace: str
    spec: InferencePolicySpec
    result: Effective
    status: InferencePolicyStatus | None = None

    def modes(self) -> tuple[ModeStatus, ...]:
        """As the operator reports them, since it knows the pods; else as the spec alone gives them."""
        return tuple(self.status.modes) if self.status and self.status.modes else self.result.modes

    def levels(self) -> list[tuple[str, str, str]]:
        """Ceiling, target and effective level, each with what it means."""
        rows = [
            ("ceiling", str(self.spec.rollback_level), "spec.rollbackLevel, the user's"),
            ("target", str(self.result.config.level), "what pods are told to run"),
        ]
        if self.status is None:
            return rows
        if self.status.level is not None:
            rows[1] = (
                "target",
                str(self.status.level.target),
                f"{self.status.level.reason}, {self.status.level.since}",
            )
        running = self.status.effective_level
        config = self.status.config
        applied = f"; {config.applied} of {config.pods} pods have configuration {config.sequence}" if config else ""
        rows.append(("effective", "-" if running is None else str(running), "what all ready pods run" + applied))
        return rows

    def held(self) -> list[tuple[str, str, str]]:
        """What the operator holds against the spec, or tries: (what, value, why)."""
        if self.status is None:
            return []
        rows = [(f"{entry.mode} off", entry.reason, f"since {entry.since}") for entry in self.status.suspended]
        for entry in self.status.tuned:
            by = f"ticket {entry.ticket}" if entry.ticket else "AutoApply"
            rows.append((entry.path, f"{entry.base} -> {entry.value}", f"{by}, since {entry.since}"))
        if (canary := self.status.canary) is not None:
            what = canary.tuned.path if canary.tuned else str(canary.mode)
            rows.append((f"canary: {what}", f"{canary.percent} %", f"this step since {canary.since}"))
        for rejection in self.status.level.rejected if self.status.level else []:
            what = rejection.path or str(rejection.mode or f"level {rejection.level}")
            value = f"rejected {rejection.value or ''}".strip()
            rows.append((what, value, f"{rejection.reason}: until the spec or retryToken changes"))
        return rows

    def signals(self) -> list[tuple[str, str, str]]:
        """Signals that aren't Ok, worst first; a count of the others."""
        found = [] if self.status is None else self.status.signals
        order = {Verdict.BREACH: 0, Verdict.UNKNOWN: 1, Verdict.OK: 2}
        told = sorted(found, key=lambda entry: (order[entry.verdict], entry.name))
        return [
            (entry.name, entry.verdict.value, f"{entry.failures} in a row" * bool(entry.failures)) for entry in told
        ]

    def history(self) -> list[tuple[str, str, str]]:
        """The last decisions, newest first."""
        found = [] if self.status is None else self.status.history
        return [(entry.at, f"{entry.decision} ({entry.reason})", entry.message) for entry in found]

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "namespace": self.namespace,
            "levels": {name: level if level == "-" else int(level) for name, level, _ in self.levels()},
            "config": self.result.config.to_dict(),
            "modes": [mode.to_dict() for mode in self.modes()],
            "provenance": [row.to_dict() for row in self.result.provenance],
            "held": [dict(zip(("what", "value", "why"), row, strict=True)) for row in self.held()],
            "signals": [] if self.status is None else [entry.to_dict() for entry in self.status.signals],
            "history": [] if self.status is None else [entry.to_dict() for entry in self.status.history],
        }


def from_files(files: list[Path], name: str | None, level: int | None) -> Explanation:
    """Explain a policy in YAML files. Raises ManifestError."""
    policy = manifests.read(files).policy(name)
    return Explanation(policy.name, policy.namespace, policy.spec, _supposed(policy.spec, level))


def _supposed(spec: InferencePolicySpec, level: int | None) -> Effective:
    """As it would be at a level that someone asks about, rather than one that the operator holds."""
    result = effective(spec, level)
    rows = (
        row.model_copy(update={"why": "as asked with --level"}) if row.path == "/rollbackLevel" and row.why else row
        for row in result.provenance
    )
    return dataclasses.replace(result, provenance=tuple(rows))


def from_cluster(name: str, namespace: str | None, context: str | None, level: int | None) -> Explanation:
    """Explain a policy in the cluster of the kubeconfig. Raises ExplainError."""
    namespace, found = _fetch(name, namespace, context)
    try:
        spec = InferencePolicySpec.model_validate(found["spec"])
        status = InferencePolicyStatus.model_validate(found.get("status") or {})
    except ValidationError as error:
        raise ExplainError(
            f"{POLICY_KIND} {namespace}/{name} is not what this version knows; is the cluster's Sixfold newer?"
            f" {describe(error)}"
        ) from error
    if level is not None:
        return Explanation(name, namespace, spec, _supposed(spec, level))
    target = status.level.target if status.level is not None else None
    unsupported = {mode.name: mode.reason for mode in status.modes if mode.state is ModeState.UNSUPPORTED}
    suspended = {entry.mode: f"{entry.reason}, since {entry.since}" for entry in status.suspended}
    result = effective(spec, target, unsupported, tuned=status.tuned, suspended=suspended)
    return Explanation(name, namespace, spec, result, status)


def _fetch(name: str, namespace: str | None, context: str | None) -> tuple[str, dict[str, Any]]:
    """The namespace that was meant, and the object."""
    import kubernetes
    from kubernetes.config.config_exception import ConfigException
    from urllib3.exceptions import HTTPError

    client, config = cast(Any, kubernetes.client), cast(Any, kubernetes.config)
    kubeconfig = os.environ.get("KUBECONFIG") or None  # the package itself reads it once, when imported
    try:
        if namespace is None:
            contexts, active = config.list_kube_config_contexts(kubeconfig)
            chosen = next((entry for entry in contexts if entry["name"] == context), active)
            namespace = str(chosen["context"].get("namespace", "default"))
        config.load_kube_config(kubeconfig, context=context)
        api = client.CustomObjectsApi()
        found = api.get_namespaced_custom_object(GROUP, VERSION, namespace, POLICY_PLURAL, name, _request_timeout=10)
        return namespace, cast(dict[str, Any], found)
    except ConfigException as error:
        raise ExplainError(f"no cluster to ask: {error}; set KUBECONFIG, or explain a file with -f") from error
    except kubernetes.client.ApiException as error:
        raise ExplainError(_refusal(error.status, error.reason, name, str(namespace))) from error
    except HTTPError as error:
        raise ExplainError(f"the cluster doesn't answer: {error}") from error


def _refusal(status: int | None, reason: str | None, name: str, namespace: str) -> str:
    if status == 404:
        return f"no {POLICY_KIND} {name} in the namespace {namespace} (or Sixfold's CRDs are not installed)"
    if status in (401, 403):
        return f"the cluster doesn't let you read {POLICY_PLURAL}.{GROUP} in the namespace {namespace} ({reason})"
    return f"the cluster answered {status} {reason}"


def show(explanation: Explanation, console: Console) -> None:
    """Print the tables."""
    console.print(f"[bold]{POLICY_KIND} {explanation.namespace}/{explanation.name}[/]")
    console.print(_table("Levels", ("level", "value", "meaning"), explanation.levels()))
    rows = [
        (row.path.strip("/").replace("/", "."), escape(row.value), _styled(row.set_by), escape(row.why))
        for row in explanation.result.provenance
    ]
    console.print(_table("Values", ("spec.", "value", "set by", "why"), rows))
    modes = [(mode.name, _styled(mode.state), escape(mode.reason)) for mode in explanation.modes()]
    console.print(_table("Modes", ("mode", "state", "reason"), modes))
    for title, columns, found in (
        ("Held by the operator", ("what", "value", "why"), explanation.held()),
        ("Signals", ("signal", "verdict", "breaches"), explanation.signals()),
        ("Last decisions", ("when", "decision", "why"), explanation.history()),
    ):
        if found:
            console.print(_table(title, columns, [tuple(map(escape, row)) for row in found]))


def _styled(word: str) -> str:
    style = _STYLES.get(word)  # type: ignore[call-overload]
    return f"[{style}]{word}[/]" if style else escape(word)


def _table(title: str, columns: tuple[str, ...], rows: list[Any]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_edge=False, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=number == 0)  # a path in pieces can't be copied
    for row in rows:
        table.add_row(*row)
    return table
