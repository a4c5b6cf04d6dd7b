"""Places outside of the cluster that are told about tickets: which there are, and what they are told."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, StringConstraints, TypeAdapter, ValidationError

from sixfold_api.base import ApiModel, Rule
from sixfold_api.ticket import OptimizationTicketSpec, OptimizationTicketStatus

log = logging.getLogger(__name__)

GITHUB_API = "https://api.github.com"
JIRA_CLOUD = re.compile(r"https?://[^/]+\.atlassian\.net(/|$)")
_OF_GITHUB, _OF_JIRA = {"repository"}, {"project", "issue_type", "user"}
_Url = Annotated[str, StringConstraints(pattern=r"^https?://[^\s/]+(/\S*)?$", max_length=1024)]
_Text = Annotated[str, StringConstraints(min_length=1, max_length=128)]


class SinkType(StrEnum):
    WEBHOOK = "Webhook"
    GITHUB = "GitHub"
    JIRA = "Jira"


class SinkConfig(ApiModel):
    """One entry of the chart's value `sinks`. The secret stays in its file and is read when it is needed."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$")]
    type: SinkType
    secret_file: Path
    """A webhook's signing key, or the token for GitHub or Jira."""
    url: _Url | None = None
    """GitHub: of its API, absent means github.com's."""
    repository: Annotated[str, StringConstraints(pattern=r"^[-A-Za-z0-9_.]+/[-A-Za-z0-9_.]+$")] | None = None
    """GitHub: owner/name."""
    labels: Annotated[list[_Text], Field(max_length=16)] = []
    """GitHub and Jira: put on new issues."""
    project: Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z0-9_]+$")] | None = None
    """Jira: key of the project."""
    issue_type: _Text = "Task"
    """Jira."""
    user: _Text | None = None
    """Jira: whose token it is, as Jira Cloud needs; absent sends it as a bearer token, as Data Center has them."""

    rules = (
        Rule("", "a GitHub sink needs repository", lambda s: s.type is not SinkType.GITHUB or s.repository is not None),
        Rule("", "this type of sink needs url", lambda s: s.type is SinkType.GITHUB or s.url is not None),
        Rule("", "a Jira sink needs project", lambda s: s.type is not SinkType.JIRA or s.project is not None),
        Rule("", "Jira Cloud needs user, whose API token the secret is", lambda s: not s.lacks_user),
        Rule("", "repository is for GitHub; project, issueType and user are for Jira", lambda s: not s.strangers),
    )

    @property
    def lacks_user(self) -> bool:
        """Jira Cloud takes tokens with their user only."""
        is_cloud = self.type is SinkType.JIRA and JIRA_CLOUD.match(self.url or "") is not None
        return is_cloud and self.user is None

    @property
    def strangers(self) -> set[str]:
        """Fields of another type, which nothing would read."""
        own = {SinkType.GITHUB: _OF_GITHUB, SinkType.JIRA: _OF_JIRA}.get(self.type, set())
        return self.model_fields_set & (_OF_GITHUB | _OF_JIRA) - own

    def secret(self) -> str:
        """Raises SinkError."""
        try:
            text = self.secret_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SinkError(f"the secret of sink {self.name} can't be read: {type(error).__name__}") from error
        if not text:
            raise SinkError(f"the secret of sink {self.name} is empty")
        return text


class SinkError(Exception):
    """A sink wasn't told: why, in a sentence without secrets, and how long it asks to be left alone."""

    def __init__(self, message: str, retry_after_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


@dataclass(frozen=True)
class Message:
    """A ticket as it is to be told.

    Attributes:
        reference: the sink's own name of it, from last time.
        cluster: the operator's setting cluster_name: sinks that several clusters share tell equal names apart by it.
    """

    namespace: str
    ticket: str
    spec: OptimizationTicketSpec
    status: OptimizationTicketStatus
    reference: str = ""
    cluster: str = ""

    @property
    def id(self) -> str:
        """The same for every repeat of the same news."""
        return f"{self.identity}-{self.status.phase.lower()}-{self.status.occurrences}"

    @property
    def identity(self) -> str:
        """Of the ticket, in all clusters."""
        return f"{self.cluster}-{self.spec.fingerprint}" if self.cluster else self.spec.fingerprint

    @property
    def title(self) -> str:
        about = f" of {self.spec.variant}" if self.spec.variant else ""
        where = f" in {self.cluster}" if self.cluster else ""
        return f"{self.spec.cause}{about}: {self.namespace}/{self.spec.policy_ref.name}{where} wastes capacity"

    @property
    def text(self) -> str:
        """For people; plain enough for Markdown and for Jira."""
        spec, evidence = self.spec, self.spec.evidence
        saving = f"Estimated saving a month: {spec.saving_per_month}\n\n" if spec.saving_per_month else ""
        place = f"Cluster {self.cluster}, namespace {self.namespace}.\n\n" if self.cluster else ""
        return (
            f"{spec.recommendation.summary}\n\n"
            f"Signal {evidence.signal}: {evidence.value}, threshold {evidence.threshold}, over {evidence.window}.\n\n"
            f"{saving}{place}Decide with: kubectl -n {self.namespace} patch oticket {self.ticket} --type=merge"
            ' -p \'{"spec":{"decision":"Approved"}}\' (or Dismissed)'
        )

    @property
    def news(self) -> str:
        """What happened to it since."""
        status = self.status
        seen = f"seen {status.occurrences} times, last at {status.last_seen}"
        return {
            "Open": f"The waste is there again: {seen}.",
            "Applied": "What was recommended has been applied.",
            "Resolved": f"The signal has been healthy since {status.healthy_since}: resolved.",
            "Dismissed": "It was dismissed.",
        }[status.phase.value]


_LIST: TypeAdapter[list[SinkConfig]] = TypeAdapter(list[SinkConfig])


def parse_sinks(text: str) -> dict[str, SinkConfig]:
    """Sinks by name, of JSON or YAML. Raises ValueError: which entry, and what is wrong with it."""
    try:
        entries = _LIST.validate_python(yaml.safe_load(text) or [])
    except yaml.YAMLError as error:
        raise ValueError(f"it is no YAML: {error}") from error
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"sink {where}: {first['msg']}") from error
    by_name = {entry.name: entry for entry in entries}
    if len(by_name) != len(entries):
        raise ValueError("two sinks have the same name")
    return by_name


class SinksFile:
    """The sinks of a file, read again when it changes. While it can't be read the last good ones stay."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._seen: Any = None
        self._sinks: dict[str, SinkConfig] = {}
        self.problem = ""

    def current(self) -> dict[str, SinkConfig]:
        """By name."""
        if self._path is None:
            return {}
        try:
            state = self._path.stat()
            seen = (state.st_mtime_ns, state.st_ino, state.st_size)
            if seen != self._seen:
                self._seen = seen
                self._sinks, self.problem = parse_sinks(self._path.read_text()), ""
        except (OSError, ValueError) as error:
            problem = f"{self._path.name} can't be used: {error}"
            if problem != self.problem:
                log.error("the sinks stay as they were: %s", problem)
            self.problem = problem
        return self._sinks
