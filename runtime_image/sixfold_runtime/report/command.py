"""`sixfold report`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from sixfold_api.scalars import Duration, duration_seconds
from sixfold_runtime.manifests import Policy
from sixfold_runtime.report import log_source
from sixfold_runtime.report.accelerators import accelerators
from sixfold_runtime.report.analysis import figures
from sixfold_runtime.report.model import Counted, Figures, ReportError
from sixfold_runtime.report.page import page
from sixfold_runtime.report.prometheus_source import PrometheusSource
from sixfold_runtime.report.recommend import Proposal, proposals
from sixfold_runtime.report.recommended import new_policy, patch_of
from sixfold_runtime.report.served import others, requests_of, served_by, served_of
from sixfold_runtime.report.words import milliseconds, money, percent


@dataclasses.dataclass(frozen=True)
class Question:
    """What is asked, and of whom."""

    prometheus: str | None
    logs: Sequence[Path]
    namespace: str | None
    policy: str | None
    since: str | None
    cost_per_hour: float | None


def answer(question: Question, now: datetime | None = None) -> Figures:
    """Raises ReportError."""
    return figures(read(question, now))


def read(question: Question, now: datetime | None = None) -> Counted:
    """What was counted. Raises ReportError."""
    now = now or datetime.now(UTC)
    since = _since(question.since)
    if bool(question.prometheus) == bool(question.logs):
        raise ReportError("say where to read from: either --prometheus URL or --log FILE")
    if question.logs and (question.namespace or question.policy):
        raise ReportError("a request log doesn't name the policy: leave out --namespace and --policy, and give its log")
    if question.prometheus:
        source = PrometheusSource(question.prometheus, question.namespace, question.policy)
        counted = source.read(since or timedelta(hours=1), now)
    else:
        counted = log_source.read(question.logs, since, now)
    counted.price_elsewhere = question.cost_per_hour
    return counted


def write(found: Figures, question: Question, html: Path | None, json_file: Path | None) -> None:
    """The page and the figures. Raises ReportError."""
    title = " / ".join(name for name in (question.namespace, question.policy) if name) or "all policies"
    try:
        if html is not None:
            html.write_text(page(found, title), encoding="utf-8")
        if json_file is not None:
            json_file.write_text(json.dumps(dataclasses.asdict(found), indent=2) + "\n")
    except OSError as error:
        raise ReportError(f"{error.filename} can't be written: {error.strerror}") from error


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What is to be recommended.

    Attributes:
        name: of a new policy.
        draft, classifier: ModelVariants that there are for it.
        existing: to be changed; None: a new one.
        devices: CSV file of what was measured on accelerators.
    """

    name: str = "recommended"
    draft: str | None = None
    classifier: str | None = None
    existing: Policy | None = None
    devices: Path | None = None


def recommend(question: Question, wanted: Wanted, console: Console) -> str:
    """Policies, or a merge patch of an existing one, as YAML; a summary goes to the console. Raises ReportError."""
    counted, existing = read(question), wanted.existing
    figures(counted)  # or there is nothing to go by
    if existing is not None:
        served = served_of(existing.spec, wanted.draft, wanted.classifier)
        if not requests_of(counted, served):
            seen = ", ".join(others(counted, ())) or "none"
            raise ReportError(f"no request went to variants of policy {existing.name}; those with requests: {seen}")
        found = proposals(counted, served, existing.spec)
        _tell(found, console)
        result = patch_of(existing.name, existing.namespace, existing.spec, found)
    else:
        documents = []
        policies = served_by(counted, wanted.draft, wanted.classifier)
        for number, served in enumerate(policies, 1):
            found = proposals(counted, served)
            _tell(found, console)
            documents.append(new_policy(wanted.name if number == 1 else f"{wanted.name}-{number}", served, found))
        result = "---\n".join(documents)
        if rest := others(counted, policies):
            console.print(f"-> too few requests for a policy of their own: {', '.join(rest)}", highlight=False)
    if wanted.devices is not None:
        _rank(wanted.devices, console)
    return result


def _tell(found: Sequence[Proposal], console: Console) -> None:
    for proposal in found:
        words = "; ".join(part for part in (proposal.why, proposal.needs) if part)
        console.print(f"-> {proposal.what}: {words}", highlight=False, soft_wrap=True)
    if not found:
        console.print("-> nothing that this traffic would gain by", highlight=False)


def _rank(devices: Path, console: Console) -> None:
    try:
        ranking = accelerators(devices.read_text().splitlines())
    except OSError as error:
        raise ReportError(f"{devices} can't be read: {error.strerror}") from error
    for device in ranking:
        console.print(f"   {device.name}: {money(device.cost_per_million)} a million requests", highlight=False)


def show(found: Figures, console: Console) -> None:
    """The summary for a terminal."""
    lines = [f"from {found.start} to {found.end}:", *found.summary]
    for level in found.levels:
        saved = level.saved_share
        against = "" if saved is None else f", {percent(abs(saved))} {'less' if saved >= 0 else 'more'} than at level 0"
        lines.append(f"{level.variant} at level {level.level}: {milliseconds(level.engine_ms)} a request{against}")
    for line in [*lines, *(f"-> {text}" for text in found.advice)]:
        console.print(f"  {line}", highlight=False, soft_wrap=True)


def _since(text: str | None) -> timedelta | None:
    if text is None:
        return None
    try:
        seconds = duration_seconds(TypeAdapter(Duration).validate_python(text))
    except ValidationError as error:
        raise ReportError(f"--since {text}: that is no time; write it such as 90m, 24h or 1h30m") from error
    if not 60 <= seconds <= 366 * 86400:
        raise ReportError(f"--since {text}: give a time between 1m and 8784h, such as 24h")
    return timedelta(seconds=seconds)
