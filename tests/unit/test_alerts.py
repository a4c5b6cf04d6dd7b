"""The receiver of alerts: who may send, what is taken, and what an alert comes to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from sixfold_api.analysis import AlertRule
from sixfold_api.control_status import SignalStatus, Verdict
from sixfold_operator.alerts import FORGOTTEN_AFTER_SECONDS, MAX_BODY_BYTES, Alerts, Heard, Listed, observed_alerts
from sixfold_operator.control.model import Action

NOW = datetime(2026, 1, 1, tzinfo=UTC)
TOKEN = "let-me-in"
HIGH = AlertRule(alert_name="High5xx", action="StepDown")


class Post:
    """A receiver that is listening, and a client of it."""

    def __init__(self, tmp_path: Path, session: aiohttp.ClientSession) -> None:
        self.token_file = tmp_path / "token"
        self.token_file.write_text(f"{TOKEN}\n")
        self.woken: list[tuple[str, str]] = []
        self.now = NOW
        self.leads = True
        self.alerts = Alerts(
            self.token_file, self._listed, lambda *place: self.woken.append(place), lambda: self.now, lambda: self.leads
        )
        self._session = session

    @staticmethod
    def _listed(namespace: str, policy: str) -> Listed:
        return Listed(True, ("High5xx",)) if (namespace, policy) == ("shop", "bot") else Listed(False)

    async def send(self, body: Any, token: str = TOKEN) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with self._session.post(f"http://127.0.0.1:{self.port}/alerts", data=data, headers=headers) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if text.startswith("{") else text


@pytest.fixture
async def post(tmp_path: Path) -> AsyncIterator[Post]:
    async with aiohttp.ClientSession() as session:
        post = Post(tmp_path, session)
        post.port = await post.alerts.start(0, "127.0.0.1")
        yield post
        await post.alerts.stop()


def alert(status: str = "firing", **labels: str) -> dict[str, Any]:
    named = {"alertname": "High5xx", "namespace": "shop", "policy": "bot", **labels}
    return {"status": status, "labels": named, "startsAt": "2026-01-01T00:00:00Z", "endsAt": "0001-01-01T00:00:00Z"}


def body(*alerts: dict[str, Any]) -> dict[str, Any]:
    return {"version": "4", "groupKey": "{}", "status": "firing", "receiver": "sixfold", "alerts": list(alerts)}


def counted(result: str) -> float:
    return REGISTRY.get_sample_value("sixfold_operator_alerts_total", {"result": result}) or 0.0


async def test_a_standby_has_alertmanager_try_again_elsewhere(post: Post) -> None:
    """The connection must not stay: a Service gives each one to a pod, and the next to another perhaps."""
    post.leads = False
    assert await post.send(body(alert()), token="wrong") == (401, {"error": "missing or wrong bearer token"})
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with post._session.post(
        f"http://127.0.0.1:{post.port}/alerts", json=body(alert()), headers=headers
    ) as answer:
        assert (answer.status, answer.headers["Connection"]) == (503, "close")
        assert "stands by" in (await answer.json())["error"]
    assert post.alerts.firing("shop", "bot") == {}
    post.leads = True
    assert await post.send(body(alert())) == (200, {"taken": 1})


async def test_an_alert_fires_is_repeated_and_ends(post: Post) -> None:
    assert await post.send(body(alert())) == (200, {"taken": 1})
    assert post.alerts.firing("shop", "bot")["High5xx"].is_firing
    assert await post.send(body(alert())) == (200, {"repeated": 1})
    assert await post.send(body(alert("resolved"))) == (200, {"taken": 1})
    assert not post.alerts.firing("shop", "bot")["High5xx"].is_firing
    assert post.woken == [("shop", "bot")] * 2


async def test_one_pod_that_recovers_leaves_the_others_alert_in_place(post: Post) -> None:
    assert await post.send(body(alert(pod="a"), alert(pod="b"))) == (200, {"taken": 2})
    assert await post.send(body(alert(pod="a"), alert("resolved", pod="b"))) == (200, {"repeated": 1, "taken": 1})
    assert post.alerts.firing("shop", "bot")["High5xx"].is_firing
    await post.send(body(alert("resolved", pod="a"), alert("resolved", pod="b")))
    assert not post.alerts.firing("shop", "bot")["High5xx"].is_firing


async def test_what_nobody_asked_for_is_answered_and_counted(post: Post) -> None:
    before = {result: counted(result) for result in ("unlisted", "unknown_policy")}
    sent = body(alert(alertname="Other"), alert(policy="nobody"), alert(namespace="elsewhere"))
    assert await post.send(sent) == (200, {"unknown_policy": 2, "unlisted": 1})
    assert counted("unlisted") == before["unlisted"] + 1
    assert counted("unknown_policy") == before["unknown_policy"] + 2
    assert post.woken == []


@pytest.mark.parametrize("token", ["", "wrong", "let-me-in-too", "é"])
async def test_only_who_has_the_token_is_heard(post: Post, token: str) -> None:
    before = counted("unauthorized")
    status, answer = await post.send(body(alert()), token)
    assert (status, post.alerts.firing("shop", "bot")) == (401, {})
    assert "token" in answer["error"]
    assert counted("unauthorized") == before + 1


async def test_a_token_that_is_no_text_is_refused(post: Post) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", post.port)
    writer.write(b"POST /alerts HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nAuthorization: Bearer \xff\xfe\r\n\r\n")
    assert b" 401 " in await reader.readline()
    writer.close()


async def test_a_new_token_counts_at_once_and_none_lets_nobody_in(post: Post) -> None:
    post.token_file.write_text("another")
    assert (await post.send(body(alert())))[0] == 401
    assert (await post.send(body(alert()), "another"))[0] == 200
    post.token_file.write_text("")
    assert (await post.send(body(alert()), ""))[0] == 401
    post.token_file.unlink()
    assert (await post.send(body(alert()), "another"))[0] == 401


@pytest.mark.parametrize(
    "sent", [b"", b"{", b"[]", b'{"alerts": [{"status": "on fire"}]}', b'{"version": "5", "alerts": []}']
)
async def test_a_malformed_body_is_told_what_is_wrong(post: Post, sent: bytes) -> None:
    before = counted("malformed")
    status, answer = await post.send(sent)
    assert status == 400
    assert "webhook of Alertmanager" in answer["error"]
    assert counted("malformed") == before + 1
    assert (await post.send(body(alert())))[0] == 200


async def test_too_large_a_body_is_refused(post: Post) -> None:
    before = counted("malformed")
    assert (await post.send(b" " * (MAX_BODY_BYTES + 1)))[0] == 413
    assert counted("malformed") == before + 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["alerts", "labels", "status"]), inner),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sent=st.binary(max_size=64) | JSON.map(lambda value: json.dumps(value).encode()))
async def test_no_body_ends_the_receiver(post: Post, sent: bytes) -> None:
    assert (await post.send(sent))[0] in (200, 400)


async def test_an_alert_that_is_over_or_was_not_repeated_for_long_has_ended(post: Post) -> None:
    await post.send(body(alert() | {"endsAt": "2025-12-31T23:59:00Z"}))
    assert not post.alerts.firing("shop", "bot")["High5xx"].is_firing
    await post.send(body(alert()))
    post.now += timedelta(seconds=FORGOTTEN_AFTER_SECONDS + 1)
    assert not post.alerts.firing("shop", "bot")["High5xx"].is_firing
    post.alerts.forget("shop", "bot")
    assert post.alerts.firing("shop", "other") == {}


async def test_an_alert_of_a_former_process_that_nobody_repeats_has_ended(post: Post) -> None:
    """Alertmanager repeats what fires; what it resolved while no operator listened is told by its silence."""
    before = [SignalStatus(name="Alert/High5xx", verdict=Verdict.BREACH, failures=3)]
    assert observed_alerts([HIGH], post.alerts.firing("shop", "bot"), before) == ()
    post.now += timedelta(seconds=FORGOTTEN_AFTER_SECONDS + 1)
    (ended,) = observed_alerts([HIGH], post.alerts.firing("shop", "bot"), before)
    assert ended.verdict is Verdict.OK
    assert await post.send(body(alert())) == (200, {"taken": 1})
    (again,) = observed_alerts([HIGH], post.alerts.firing("shop", "bot"), before)
    assert again.verdict is Verdict.BREACH


def test_what_an_alert_comes_to() -> None:
    suspend = AlertRule(alert_name="Draft", action="Suspend", mode="Speculative")
    firing = {"High5xx": Heard(True, NOW), "Draft": Heard(False, NOW)}
    high, draft = observed_alerts([HIGH, suspend], firing, ())
    assert (high.name, high.verdict, high.action) == ("Alert/High5xx", Verdict.BREACH, Action.STEP_DOWN)
    assert (draft.verdict, draft.action, draft.blames) == (Verdict.OK, Action.SUSPEND, "Speculative")


def test_after_a_restart_an_alert_holds_until_it_is_heard_of() -> None:
    before = [SignalStatus(name="Alert/High5xx", verdict=Verdict.BREACH, failures=3)]
    assert observed_alerts([HIGH], {}, before) == ()
    (resolved,) = observed_alerts([HIGH], {"High5xx": Heard(False, NOW)}, before)
    assert resolved.verdict is Verdict.OK
    (never,) = observed_alerts([HIGH], {}, ())
    assert never.verdict is Verdict.OK


def test_an_alert_that_is_no_longer_listed_has_ended() -> None:
    before = [SignalStatus(name="Alert/High5xx", verdict=Verdict.BREACH, failures=3)]
    (ended,) = observed_alerts([], {}, before)
    assert (ended.name, ended.verdict) == ("Alert/High5xx", Verdict.OK)
