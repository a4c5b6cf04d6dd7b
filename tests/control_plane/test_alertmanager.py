"""A real Alertmanager, told of alerts by a real Prometheus, in front of the receiver."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge, start_http_server

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "e2e"))

from prometheus_server import Alertmanager, Job, PrometheusServer

from sixfold_api.analysis import AlertRule
from sixfold_api.control_status import Verdict
from sixfold_operator import metrics
from sixfold_operator.alerts import Alerts, Listed, observed_alerts

NAMESPACE, POLICY = "shop", "support-bot"
RULE = AlertRule(alert_name="High5xx", action="StepDown")
LABELS = {"alertname": RULE.alert_name, "namespace": NAMESPACE, "policy": POLICY}


class Receiver:
    """The operator's receiver, for one policy that lists one alert."""

    def __init__(self, folder: Path) -> None:
        self.token_file = folder / "token"
        self.token_file.write_text("let-me-in")
        self.woken = 0
        self.alerts = Alerts(self.token_file, self._listed, self._wake)

    @staticmethod
    def _listed(namespace: str, policy: str) -> Listed:
        return Listed((namespace, policy) == (NAMESPACE, POLICY), (RULE.alert_name,))

    def _wake(self, namespace: str, policy: str) -> None:
        assert (namespace, policy) == (NAMESPACE, POLICY)
        self.woken += 1

    def verdict(self) -> Verdict:
        return observed_alerts([RULE], self.alerts.firing(NAMESPACE, POLICY), ())[0].verdict


async def _until(what: str, holds: Callable[[], bool]) -> None:
    for _ in range(600):
        if holds():
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{what}: not after a minute")


def _counted(result: str) -> float:
    return metrics.ALERTS.labels(result)._value.get()


@pytest.fixture
async def receiver(tmp_path: Path) -> AsyncIterator[Receiver]:
    made = Receiver(tmp_path)
    made.port = await made.alerts.start(0, "127.0.0.1")
    yield made
    await made.alerts.stop()


def _alertmanager(folder: Path, receiver: Receiver, token_file: Path) -> Alertmanager:
    return Alertmanager(folder / "alertmanager", f"http://127.0.0.1:{receiver.port}/alerts", token_file, "1s")


async def test_an_alert_fires_is_repeated_and_is_resolved(receiver: Receiver, tmp_path: Path) -> None:
    with _alertmanager(tmp_path, receiver, receiver.token_file) as alertmanager:
        before = _counted("repeated")
        await asyncio.to_thread(alertmanager.post, LABELS)
        await _until("it fires", lambda: receiver.verdict() is Verdict.BREACH)
        await _until("it is repeated", lambda: _counted("repeated") > before)
        assert receiver.woken == 1, "what is known wakes nobody"
        await asyncio.to_thread(alertmanager.post, LABELS, datetime.now(UTC) - timedelta(seconds=1))
        await _until("it is resolved", lambda: receiver.verdict() is Verdict.OK)
        assert receiver.woken == 2


async def test_others_alerts_are_counted_and_change_nothing(receiver: Receiver, tmp_path: Path) -> None:
    before = {result: _counted(result) for result in ("unlisted", "unknown_policy", "unauthorized")}
    senders = tmp_path / "senders"
    senders.write_text("let-me-in")
    with _alertmanager(tmp_path, receiver, senders) as alertmanager:
        await asyncio.to_thread(alertmanager.post, {**LABELS, "alertname": "Watchdog"})
        await asyncio.to_thread(alertmanager.post, {**LABELS, "policy": "nobody's"})
        await _until("one is unlisted", lambda: _counted("unlisted") > before["unlisted"])
        await _until("one has no policy", lambda: _counted("unknown_policy") > before["unknown_policy"])
        receiver.token_file.write_text("changed")
        await asyncio.to_thread(alertmanager.post, LABELS)
        await _until("the token is refused", lambda: _counted("unauthorized") > before["unauthorized"])
    assert receiver.woken == 0
    assert receiver.verdict() is Verdict.OK


async def test_from_a_rule_of_prometheus_to_a_verdict(receiver: Receiver, tmp_path: Path) -> None:
    registry = CollectorRegistry()
    broken = Gauge("broken", "", ["namespace", "policy"], registry=registry).labels(NAMESPACE, POLICY)
    broken.set(1)
    exporter, _ = start_http_server(0, "127.0.0.1", registry)
    rules = tmp_path / "rules.yml"
    rules.write_text("groups: [{name: g, rules: [{alert: High5xx, expr: broken > 0}]}]")
    with _alertmanager(tmp_path, receiver, receiver.token_file) as alertmanager:
        jobs = [Job([f"127.0.0.1:{exporter.server_port}"])]
        with PrometheusServer(tmp_path / "prometheus", jobs, rule_files=[rules], alertmanager=alertmanager):
            await _until("the rule fires", lambda: receiver.verdict() is Verdict.BREACH)
            broken.set(0)
            await _until("the rule is resolved", lambda: receiver.verdict() is Verdict.OK)
    exporter.shutdown()
    exporter.server_close()
