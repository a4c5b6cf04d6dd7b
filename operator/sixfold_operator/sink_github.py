"""Tickets as issues of a GitHub repository: one a fingerprint, found again by a marker that people don't see."""

from __future__ import annotations

import itertools
from datetime import datetime
from typing import Any

import aiohttp

from sixfold_api.ticket import Phase
from sixfold_operator.sink_http import call
from sixfold_operator.sinks import GITHUB_API, Message, SinkConfig

PAGE_ITEMS, MAX_PAGES = 100, 10
_GONE = (404, 410)


async def tell(session: aiohttp.ClientSession, sink: SinkConfig, message: Message, now: datetime) -> str:
    """Bring the issue to the ticket's phase; doing it again changes nothing. Returns its address. Raises SinkError."""
    return await _Issues(session, sink).tell(message)


class _Issues:
    def __init__(self, session: aiohttp.ClientSession, sink: SinkConfig) -> None:
        self._session, self._labels = session, sink.labels
        self._url = f"{(sink.url or GITHUB_API).rstrip('/')}/repos/{sink.repository}/issues"
        self._headers = {"Authorization": f"Bearer {sink.secret()}", "Accept": "application/vnd.github+json"}

    async def tell(self, message: Message) -> str:
        cluster = f"{message.cluster}/" if message.cluster else ""
        marker = f"<!-- sixfold:{cluster}{message.namespace}/{message.ticket} -->"
        issue = await self._known(message.reference) or await self._found(self._url, marker)
        if issue is None and message.status.phase in (Phase.RESOLVED, Phase.DISMISSED):
            return ""  # It was over before anybody was told.
        if issue is None:
            body = f"{message.text}\n\n{marker}\n{_mark(message)}"
            new = {"title": message.title, "body": body, "labels": self._labels}
            issue = await self._call("POST", self._url, new)
        address = f"{self._url}/{issue['number']}"
        await self._comment(address, issue, message)
        await self._set_state(address, issue, message.status.phase)
        return str(issue["html_url"])

    async def _comment(self, address: str, issue: dict[str, Any], message: Message) -> None:
        """Once, also when the operator ended before it could write down that it has."""
        mark = _mark(message)
        if mark not in (issue.get("body") or "") and await self._found(f"{address}/comments", mark) is None:
            await self._call("POST", f"{address}/comments", {"body": f"{message.news}\n\n{mark}"})

    async def _set_state(self, address: str, issue: dict[str, Any], phase: Phase) -> None:
        state = "closed" if phase in (Phase.RESOLVED, Phase.DISMISSED) else "open"
        if issue["state"] != state:
            reason = {Phase.RESOLVED: "completed", Phase.DISMISSED: "not_planned"}.get(phase, "reopened")
            await self._call("PATCH", address, {"state": state, "state_reason": reason})

    async def _known(self, reference: str) -> dict[str, Any] | None:
        number = reference.rsplit("/", 1)[-1]
        return await self._call("GET", f"{self._url}/{number}", missing=_GONE) if number.isdecimal() else None

    async def _found(self, url: str, mark: str) -> dict[str, Any] | None:
        """The issue or comment with a mark, among the newest thousand. The search API would lag behind."""
        for page in itertools.islice(itertools.count(1), MAX_PAGES):
            query = {"state": "all", "sort": "created", "direction": "desc"} if url == self._url else {}
            entries = await self._call("GET", url, query={**query, "per_page": str(PAGE_ITEMS), "page": str(page)})
            found = next((entry for entry in entries if mark in (entry.get("body") or "")), None)
            if found is not None or len(entries) < PAGE_ITEMS:
                return found
        return None

    async def _call(self, method: str, url: str, body: Any = None, **options: Any) -> Any:
        return await call(self._session, method, url, self._headers, body, **options)


def _mark(message: Message) -> str:
    return f"<!-- sixfold-event:{message.id} -->"
