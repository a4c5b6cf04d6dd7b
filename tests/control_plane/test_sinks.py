"""Tickets told to real HTTP servers that behave like a webhook's, GitHub and Jira: errors, limits, restarts."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from sixfold_api.ticket import OptimizationTicketSpec, OptimizationTicketStatus, Phase, SinkState
from sixfold_operator.control.tickets import Ticket
from sixfold_operator.keyed_queue import Backoff
from sixfold_operator.outbox import Outbox
from sixfold_operator.sinks import SinksFile, parse_sinks

SPEC = OptimizationTicketSpec.model_validate(
    {
        "policyRef": {"name": "bot"},
        "fingerprint": "0123456789",
        "cause": "RecomputedPrefix",
        "evidence": {"signal": "WastedFlops", "query": "up", "value": "0.8", "threshold": "0.65", "window": "600s"},
        "recommendation": {"summary": "Keep keys and values."},
    }
)


def ticket(phase: Phase = Phase.OPEN, occurrences: int = 1, **status: Any) -> Ticket:
    known = {"phase": phase, "occurrences": occurrences, "last_seen": "2030-01-01T00:00:00Z", **status}
    return Ticket("bot-0123456789", SPEC, OptimizationTicketStatus(**known))


class Server:
    """Answers as `app` says, after the statuses in `first` are used up; remembers what it was asked."""

    def __init__(self) -> None:
        self.app = web.Application(middlewares=[self._first])
        self.first: list[web.Response] = []
        self.asked: list[tuple[str, str]] = []
        self.url = ""

    @web.middleware
    async def _first(self, request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        self.asked.append((request.method, request.path))
        return self.first.pop(0) if self.first else await handler(request)

    async def start(self) -> None:
        self._runner = web.AppRunner(self.app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self._runner.cleanup()


class Hook(Server):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[dict[str, str], bytes]] = []
        self.app.router.add_post("/hook", self._take)

    async def _take(self, request: web.Request) -> web.Response:
        self.events.append((dict(request.headers), await request.read()))
        return web.Response(status=204)


class GitHub(Server):
    """Issues and comments of one repository."""

    def __init__(self) -> None:
        super().__init__()
        self.issues: list[dict[str, Any]] = []
        self.comments: dict[int, list[dict[str, Any]]] = {}
        base = "/repos/team/models/issues"
        self.app.router.add_get(base, self._list)
        self.app.router.add_post(base, self._create)
        self.app.router.add_get(base + "/{number}", self._get)
        self.app.router.add_patch(base + "/{number}", self._change)
        self.app.router.add_get(base + "/{number}/comments", self._listed)
        self.app.router.add_post(base + "/{number}/comments", self._comment)

    async def _list(self, request: web.Request) -> web.Response:
        size, page = int(request.query["per_page"]), int(request.query["page"])
        newest = list(reversed(self.issues))
        return web.json_response(newest[size * (page - 1) : size * page])

    async def _create(self, request: web.Request) -> web.Response:
        number = len(self.issues) + 1
        address = f"https://github.example/team/models/issues/{number}"
        self.issues.append({**await request.json(), "number": number, "state": "open", "html_url": address})
        return web.json_response(self.issues[-1], status=201)

    def _one(self, request: web.Request) -> dict[str, Any]:
        number = int(request.match_info["number"])
        if number > len(self.issues):
            raise web.HTTPNotFound
        return self.issues[number - 1]

    async def _get(self, request: web.Request) -> web.Response:
        return web.json_response(self._one(request))

    async def _change(self, request: web.Request) -> web.Response:
        self._one(request).update(await request.json())
        return web.json_response(self._one(request))

    async def _listed(self, request: web.Request) -> web.Response:
        return web.json_response(self.comments.get(self._one(request)["number"], []))

    async def _comment(self, request: web.Request) -> web.Response:
        self.comments.setdefault(self._one(request)["number"], []).append(await request.json())
        return web.json_response({}, status=201)


class Jira(Server):
    """A project with the statuses to do and done. `cloud` has the new search only."""

    def __init__(self, cloud: bool) -> None:
        super().__init__()
        self.issues: dict[str, dict[str, Any]] = {}
        self.app.router.add_get("/rest/api/2/search/jql" if cloud else "/rest/api/2/search", self._search)
        self.app.router.add_post("/rest/api/2/issue", self._create)
        self.app.router.add_get("/rest/api/2/issue/{key}", self._get)
        self.app.router.add_post("/rest/api/2/issue/{key}/comment", self._comment)
        self.app.router.add_get("/rest/api/2/issue/{key}/transitions", self._offered)
        self.app.router.add_post("/rest/api/2/issue/{key}/transitions", self._move)

    async def _search(self, request: web.Request) -> web.Response:
        found = [
            i for i in self.issues.values() if any(f'"{x}"' in request.query["jql"] for x in i["fields"]["labels"])
        ]
        return web.json_response({"issues": found})

    async def _create(self, request: web.Request) -> web.Response:
        key = f"ML-{len(self.issues) + 1}"
        status = {"statusCategory": {"key": "new"}}
        fields = {**(await request.json())["fields"], "status": status, "comment": {"comments": []}}
        self.issues[key] = {"key": key, "fields": fields}
        return web.json_response({"key": key}, status=201)

    async def _get(self, request: web.Request) -> web.Response:
        issue = self.issues.get(request.match_info["key"])
        return web.json_response(issue) if issue else web.Response(status=404)

    async def _comment(self, request: web.Request) -> web.Response:
        comments = self.issues[request.match_info["key"]]["fields"]["comment"]["comments"]
        comments.append(await request.json())
        return web.json_response({}, status=201)

    async def _offered(self, request: web.Request) -> web.Response:
        ways = [{"id": key, "to": {"statusCategory": {"key": key}}} for key in ("new", "done")]
        return web.json_response({"transitions": ways})

    async def _move(self, request: web.Request) -> web.Response:
        key = (await request.json())["transition"]["id"]
        self.issues[request.match_info["key"]]["fields"]["status"]["statusCategory"]["key"] = key
        return web.Response(status=204)

    def category(self, key: str) -> str:
        return str(self.issues[key]["fields"]["status"]["statusCategory"]["key"])


class Told:
    """An operator's part: it writes the status that the outbox gives until the sink knows the phase."""

    def __init__(self, folder: Path, entry: dict[str, Any], secret: str = "hush", cluster: str = "") -> None:
        self.cluster = cluster
        (folder / "secret").write_text(secret)
        entry = {"name": "ops", "secretFile": str(folder / "secret"), **entry}
        self.file = folder / "sinks.json"
        self.file.write_text(json.dumps([entry]))
        self.restart()

    def restart(self) -> None:
        self.woken = asyncio.Event()
        backoff = Backoff(first_seconds=0.01, longest_seconds=0.05)
        file = SinksFile(self.file)
        self.outbox = Outbox(
            file, lambda *_: self.woken.set(), backoff=backoff, jitter=lambda: 0.0, cluster=self.cluster
        )

    async def until(self, entry: Ticket, state: SinkState = SinkState.DELIVERED) -> Ticket:
        async with asyncio.timeout(20):
            while True:
                self.woken.clear()
                status = self.outbox.told("shop", entry, ["ops"])
                entry = Ticket(entry.name, entry.spec, status)
                sink = status.sinks[0]
                if sink.state is state and (state is SinkState.FAILED or sink.phase is status.phase):
                    return entry
                await self.woken.wait()


def moved(entry: Ticket, phase: Phase, occurrences: int = 1) -> Ticket:
    return ticket(phase, occurrences, sinks=entry.status.sinks)


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[Server], Any]]:
    started: list[Server] = []

    async def start(server: Server) -> Server:
        await server.start()
        started.append(server)
        return server

    yield start
    for server in started:
        await server.stop()


async def test_a_webhook_gets_signed_cloudevents_and_repeats_keep_their_id(
    serve: Callable[[Server], Any], tmp_path: Path
) -> None:
    hook = await serve(Hook())
    key = base64.b64encode(b"a signing key").decode()
    told = Told(tmp_path, {"type": "Webhook", "url": f"{hook.url}/hook"}, f"whsec_{key}")
    hook.first = [web.Response(status=500), web.Response(status=302, headers={"Location": "/hook"})]
    opened = await told.until(ticket())
    await told.outbox.stop()
    told.restart()
    resolved = await told.until(moved(opened, Phase.RESOLVED))
    await told.until(resolved)
    await told.outbox.stop()
    events = [json.loads(body) for _, body in hook.events]
    assert [event["id"] for event in events] == ["0123456789-open-1", "0123456789-resolved-1"]
    assert [event["type"] for event in events] == ["dev.sixfold.ticket.opened", "dev.sixfold.ticket.resolved"]
    assert events[0]["specversion"] == "1.0" and events[0]["data"]["spec"]["cause"] == "RecomputedPrefix"
    headers, body = hook.events[0]
    assert headers["Content-Type"] == "application/cloudevents+json"
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = base64.b64encode(hmac.new(b"a signing key", signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{expected}"
    assert len(hook.asked) == 4, "two failures, one open, one resolved: what is known is told once"


async def test_a_failing_sink_says_why_and_is_tried_again(serve: Callable[[Server], Any], tmp_path: Path) -> None:
    hook = await serve(Hook())
    hook.first = [web.Response(status=503) for _ in range(3)]
    told = Told(tmp_path, {"type": "Webhook", "url": f"{hook.url}/hook"}, "very secret")
    failed = await told.until(ticket(), SinkState.FAILED)
    assert failed.status.sinks[0].message == "it answered 503"
    assert "very secret" not in failed.status.model_dump_json()
    delivered = await told.until(failed)
    assert delivered.status.sinks[0].message == ""
    await told.outbox.stop()


async def test_retry_after_leaves_the_sink_alone(serve: Callable[[Server], Any], tmp_path: Path) -> None:
    hook = await serve(Hook())
    hook.first = [web.Response(status=429, headers={"Retry-After": "3600"})]
    told = Told(tmp_path, {"type": "Webhook", "url": f"{hook.url}/hook"})
    await told.until(ticket(), SinkState.FAILED)
    workers, _ = told.outbox._lanes["ops"]
    for _ in range(10):  # The try ends right after it has told how it went.
        await asyncio.sleep(0)
    due = workers.queue.next_due()
    assert due is not None and due - asyncio.get_running_loop().time() > 3000
    assert len(hook.asked) == 1
    await told.outbox.stop()


async def test_a_sink_that_is_gone_or_has_no_secret_says_so(tmp_path: Path) -> None:
    told = Told(tmp_path, {"type": "Webhook", "url": "http://127.0.0.1:1/hook"})
    (tmp_path / "secret").write_text("\n")
    failed = await told.until(ticket(), SinkState.FAILED)
    assert failed.status.sinks[0].message == "the secret of sink ops is empty"
    told.file.write_text("[]")
    status = told.outbox.told("shop", ticket(), ["ops"])
    assert status.sinks[0].state is SinkState.FAILED
    assert status.sinks[0].message == "the chart's values have no sink ops"
    await told.outbox.stop()


async def test_one_github_issue_through_all_phases_and_a_crash(serve: Callable[[Server], Any], tmp_path: Path) -> None:
    github = await serve(GitHub())
    github.issues = [
        {"number": n, "state": "open", "body": "another", "html_url": f"https://x/{n}"} for n in range(1, 131)
    ]
    entry = {"type": "GitHub", "url": github.url, "repository": "team/models", "labels": ["waste"]}
    told = Told(tmp_path, entry)
    github.first = [web.Response(status=500), web.Response(status=403, headers={"X-RateLimit-Remaining": "0"})]
    await told.until(ticket())
    await told.outbox.stop()
    told.restart()  # It ended before the status was written: the ticket knows nothing of the issue.
    opened = await told.until(ticket())
    assert len(github.issues) == 131 and github.issues[-1]["labels"] == ["waste"]
    assert opened.status.sinks[0].reference.endswith("/issues/131")
    assert github.comments == {}
    resolved = await told.until(moved(opened, Phase.RESOLVED))
    await told.outbox.stop()
    told.restart()
    await told.until(moved(opened, Phase.RESOLVED))  # Told, and the status not written: said once all the same.
    assert github.issues[-1]["state"] == "closed" and len(github.comments[131]) == 1
    await told.until(moved(resolved, Phase.OPEN, 2))
    assert github.issues[-1]["state"] == "open" and "seen 2 times" in github.comments[131][-1]["body"]
    await told.outbox.stop()


@pytest.mark.parametrize("cloud", [True, False])
async def test_one_jira_issue_through_all_phases_and_a_crash(
    serve: Callable[[Server], Any], tmp_path: Path, cloud: bool
) -> None:
    jira = await serve(Jira(cloud))
    told = Told(tmp_path, {"type": "Jira", "url": jira.url, "project": "ML", "user": "bot@example.com"})
    await told.until(ticket())
    await told.outbox.stop()
    told.restart()
    opened = await told.until(ticket())
    assert list(jira.issues) == ["ML-1"] and opened.status.sinks[0].reference.endswith("/browse/ML-1")
    comments = jira.issues["ML-1"]["fields"]["comment"]["comments"]
    assert not comments
    resolved = await told.until(moved(opened, Phase.RESOLVED))
    assert jira.category("ML-1") == "done" and len(comments) == 1
    again = await told.until(moved(resolved, Phase.OPEN, 2))
    assert jira.category("ML-1") == "new" and len(comments) == 2
    jira.issues.clear()  # Somebody deleted it.
    dismissed = await told.until(moved(again, Phase.DISMISSED, 2))
    assert not jira.issues and dismissed.status.sinks[0].reference == ""
    await told.outbox.stop()


@pytest.mark.parametrize("type_", ["GitHub", "Jira"])
async def test_two_clusters_with_equal_names_have_an_issue_each(
    serve: Callable[[Server], Any], tmp_path: Path, type_: str
) -> None:
    server = await serve(GitHub() if type_ == "GitHub" else Jira(cloud=True))
    own = {"repository": "team/models"} if type_ == "GitHub" else {"project": "ML", "user": "bot@example.com"}
    references = []
    for cluster in ("east", "west", "east", ""):  # the third is the first one again, which has forgotten everything
        told = Told(tmp_path, {"type": type_, "url": server.url, **own}, cluster=cluster)
        references.append((await told.until(ticket())).status.sinks[0].reference)
        await told.outbox.stop()
    assert references[0] == references[2]
    assert len(set(references)) == 3
    issues = json.dumps(server.issues)
    assert "bot in east wastes capacity" in issues and "Cluster west, namespace shop." in issues


async def test_events_say_which_cluster(serve: Callable[[Server], Any], tmp_path: Path) -> None:
    hook = await serve(Hook())
    told = Told(tmp_path, {"type": "Webhook", "url": f"{hook.url}/hook"}, cluster="east")
    await told.until(ticket())
    await told.outbox.stop()
    event = json.loads(hook.events[0][1])
    assert (event["id"], event["data"]["cluster"]) == ("east-0123456789-open-1", "east")
    assert event["source"] == "/clusters/east/namespaces/shop/inferencepolicies/bot"


@pytest.mark.parametrize(
    ("entry", "what"),
    [
        ({"type": "GitHub"}, "a GitHub sink needs repository"),
        ({"type": "Webhook"}, "this type of sink needs url"),
        ({"type": "Jira", "url": "https://x"}, "a Jira sink needs project"),
        ({"type": "Jira", "url": "https://team.atlassian.net", "project": "ML"}, "Jira Cloud needs user"),
        ({"type": "Webhook", "url": "https://x", "user": "bot"}, "issueType and user are for Jira"),
        ({"type": "GitHub", "repository": "a/b", "project": "ML"}, "issueType and user are for Jira"),
        ({"type": "Webhook", "url": "file:///etc/passwd"}, "should match pattern"),
        ({"type": "Pager"}, "should be 'Webhook', 'GitHub' or 'Jira'"),
    ],
)
def test_a_wrong_entry_is_named(entry: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match="sink 0") as caught:
        parse_sinks(json.dumps([{"name": "ops", "secretFile": "/s", **entry}]))
    assert what in str(caught.value)


def test_jira_data_center_takes_a_token_without_user() -> None:
    entry = {"name": "ops", "secretFile": "/s", "type": "Jira", "project": "ML"}
    for url in ("https://jira.example.com", "https://example.com/atlassian.net"):
        assert parse_sinks(json.dumps([{**entry, "url": url}]))["ops"].user is None


def test_a_broken_file_leaves_the_last_good_sinks(tmp_path: Path) -> None:
    path = tmp_path / "sinks.yaml"
    path.write_text("- {name: ops, type: Webhook, url: 'https://x', secretFile: /s}")
    sinks = SinksFile(path)
    assert set(sinks.current()) == {"ops"}
    path.write_text("- {name: broken")
    assert set(sinks.current()) == {"ops"} and "sinks.yaml can't be used" in sinks.problem
    path.write_text("[]")
    assert sinks.current() == {} and sinks.problem == ""
