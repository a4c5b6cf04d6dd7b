"""Tickets as issues of a Jira project (REST v2): one a fingerprint, found again by its label."""

from __future__ import annotations

import base64
from datetime import datetime
from typing import Any

import aiohttp

from sixfold_api.ticket import Phase
from sixfold_operator.sink_http import call
from sixfold_operator.sinks import Message, SinkConfig, SinkError

_GONE = (404, 410)
SUMMARY_CHARACTERS = 255


async def tell(session: aiohttp.ClientSession, sink: SinkConfig, message: Message, now: datetime) -> str:
    """Bring the issue to the ticket's phase; doing it again changes nothing. Returns its address. Raises SinkError."""
    return await _Issues(session, sink).tell(message)


class _Issues:
    def __init__(self, session: aiohttp.ClientSession, sink: SinkConfig) -> None:
        self._session, self._sink = session, sink
        self._site = (sink.url or "").rstrip("/")
        self._api = f"{self._site}/rest/api/2"
        secret = sink.secret()
        basic = base64.b64encode(f"{sink.user}:{secret}".encode()).decode()
        self._headers = {"Authorization": f"Basic {basic}" if sink.user else f"Bearer {secret}"}

    async def tell(self, message: Message) -> str:
        key = await self._known(message.reference) or await self._found(message)
        if key is None and message.status.phase in (Phase.RESOLVED, Phase.DISMISSED):
            return ""  # It was over before anybody was told.
        is_new = key is None
        key = key or await self._create(message)
        if not is_new:
            await self._comment(key, message)
        await self._move(key, message.status.phase)
        return f"{self._site}/browse/{key}"

    async def _known(self, reference: str) -> str | None:
        key = reference.rsplit("/", 1)[-1]
        if not key:
            return None
        issue = await self._call("GET", f"/issue/{key}", missing=_GONE, query={"fields": "status"})
        return str(issue["key"]) if issue else None

    async def _found(self, message: Message) -> str | None:
        """Jira Cloud took the old search away; Data Center doesn't have the new one."""
        query = {"jql": f'project = "{self._sink.project}" AND labels = "{_label(message)}"', "fields": "labels"}
        answer = await self._call("GET", "/search/jql", missing=_GONE, query=query)
        if answer is None:
            answer = await self._call("GET", "/search", query=query)
        issues = (answer or {}).get("issues", [])
        return str(issues[0]["key"]) if issues else None

    async def _create(self, message: Message) -> str:
        fields = {
            "project": {"key": self._sink.project},
            "issuetype": {"name": self._sink.issue_type},
            "summary": message.title[:SUMMARY_CHARACTERS],
            "description": f"{message.text}\n\n{message.id}",
            "labels": [*self._sink.labels, _label(message)],
        }
        made = await self._call("POST", "/issue", {"fields": fields})
        if not isinstance(made, dict) or "key" not in made:
            raise SinkError("it made an issue and didn't tell its key")
        return str(made["key"])

    async def _comment(self, key: str, message: Message) -> None:
        """Once, also when the operator ended before it could write down that it has."""
        issue = await self._call("GET", f"/issue/{key}", query={"fields": "description,comment"})
        fields = issue["fields"]
        texts = [fields.get("description") or "", *(entry["body"] for entry in fields["comment"]["comments"])]
        if not any(message.id in text for text in texts):
            await self._call("POST", f"/issue/{key}/comment", {"body": f"{message.news}\n\n{message.id}"})

    async def _move(self, key: str, phase: Phase) -> None:
        """To done when it is over and back when it isn't, by whatever transition the workflow has for it."""
        is_over = phase in (Phase.RESOLVED, Phase.DISMISSED)
        issue = await self._call("GET", f"/issue/{key}", query={"fields": "status"})
        if (issue["fields"]["status"]["statusCategory"]["key"] == "done") == is_over:
            return
        offered = (await self._call("GET", f"/issue/{key}/transitions"))["transitions"]
        fitting = [entry for entry in offered if (entry["to"]["statusCategory"]["key"] == "done") == is_over]
        if fitting:
            await self._call("POST", f"/issue/{key}/transitions", {"transition": {"id": fitting[0]["id"]}})

    async def _call(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        return await call(self._session, method, self._api + path, self._headers, body, **options)


def _label(message: Message) -> str:
    return f"sixfold-{message.identity}"
