"""What Alertmanager says: a receiver of its webhooks, and which alerts of a policy fire now."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from aiohttp import web
from pydantic import BaseModel, Field, ValidationError

from sixfold_api.analysis import AlertAction, AlertRule
from sixfold_api.control_status import SignalStatus, Verdict
from sixfold_operator import metrics
from sixfold_operator.control.memory import ALERT_PREFIX
from sixfold_operator.control.model import Action, Observed

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 2 * 2**20
FORGOTTEN_AFTER_SECONDS = 5 * 3600.0
"""A firing alert that is not repeated for so long has ended: Alertmanager repeats every 4 hours by default."""
MAX_LABEL_SETS = 1000
"""Of one alert and policy that are remembered."""

Place = tuple[str, str]
Text = Annotated[str, Field(max_length=1024)]


class _Alert(BaseModel):
    status: Literal["firing", "resolved"]
    labels: Annotated[dict[Text, Text], Field(max_length=128)]
    ends_at: Annotated[datetime | None, Field(alias="endsAt")] = None


class _Notification(BaseModel):
    """Version 4 of the webhook's body, as far as it is read."""

    version: Literal["4"] = "4"
    alerts: Annotated[list[_Alert], Field(max_length=10_000)]


@dataclass(frozen=True)
class Heard:
    """What was said last about one alert of one policy."""

    is_firing: bool
    at: datetime


Firing = Mapping[str, Heard]
"""Alert name -> what was heard since the process started."""


@dataclass(frozen=True)
class Listed:
    """Whether there is such a policy, and the alerts that it lists."""

    exists: bool
    names: Collection[str] = ()


@dataclass
class _Series:
    """One alert of one policy: it may fire for several label sets at once, of pods for example.

    Attributes:
        firing: label sets that fire -> when each was heard of last.
        at: when anything was heard last.
    """

    firing: dict[frozenset[tuple[str, str]], datetime]
    at: datetime

    def forget_old(self, now: datetime) -> None:
        self.firing = {labels: at for labels, at in self.firing.items() if not _is_old(at, now)}


class Alerts:
    """Remembers alerts; the HTTP server in front of it ends with `stop`.

    Args:
        token_file: holds the bearer token that senders must give; read at each request, since Secrets change.
        listed: what a policy lists, by namespace and name.
        wake: called when what a policy's alerts say has changed.
        leads: whether this operator acts; one that stands by has senders try again.
    """

    def __init__(
        self,
        token_file: Path,
        listed: Callable[[str, str], Listed],
        wake: Callable[[str, str], None],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        leads: Callable[[], bool] = lambda: True,
    ) -> None:
        self._token_file = token_file
        self._leads = leads
        self._listed = listed
        self._wake = wake
        self._now = now
        self._began: datetime | None = None
        self._heard: dict[Place, dict[str, _Series]] = {}
        self._runner: web.AppRunner | None = None

    async def start(self, port: int, host: str | None = None) -> int:
        """Listen, on all addresses without a host; returns the port."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.add_routes([web.post("/alerts", self._receive)])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        bound: int = self._runner.addresses[0][1]
        return bound

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def firing(self, namespace: str, policy: str) -> Firing:
        """What was heard about a policy's alerts; one that was not repeated for long counts as ended, also where it
        fired before this process began."""
        heard, now = self._heard.get((namespace, policy), {}), self._now()
        began = self._began = self._began or now  # when somebody first acted on what is heard
        silent = self._listed(namespace, policy).names if _is_old(began, now) else ()
        said = {
            name: Heard(any(not _is_old(at, now) for at in series.firing.values()), series.at)
            for name, series in heard.items()
        }
        return {**{name: Heard(False, began) for name in silent}, **said}

    def forget(self, namespace: str, policy: str) -> None:
        """The policy is gone."""
        self._heard.pop((namespace, policy), None)

    async def _receive(self, request: web.Request) -> web.Response:
        if not self._is_authorized(request.headers.get("Authorization", "")):
            metrics.ALERTS.labels("unauthorized").inc()
            return web.json_response({"error": "missing or wrong bearer token"}, status=401)
        if not self._leads():
            metrics.ALERTS.labels("standby").inc()
            refusal = web.json_response({"error": "this operator stands by, try again: another one leads"}, status=503)
            refusal.force_close()  # the next try opens a connection, which the Service may give to the other operator
            return refusal
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            metrics.ALERTS.labels("malformed").inc()
            raise
        try:
            notification = _Notification.model_validate_json(body)
        except ValidationError as error:
            metrics.ALERTS.labels("malformed").inc()
            problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(map(str, problem["loc"]))
            return web.json_response({"error": f"no webhook of Alertmanager: {where}: {problem['msg']}"}, status=400)
        results = [self._take(alert) for alert in notification.alerts]
        return web.json_response({result: results.count(result) for result in sorted(set(results))})

    def _is_authorized(self, header: str) -> bool:
        try:
            token = self._token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            log.error("the token of the alerts' receiver can't be read: %s", error)
            return False
        return bool(token) and hmac.compare_digest(header.encode(errors="surrogateescape"), f"Bearer {token}".encode())

    def _take(self, alert: _Alert) -> str:
        """Remember one alert; returns what became of it, as it is counted."""
        result = self._result(alert)
        metrics.ALERTS.labels(result).inc()
        return result

    def _result(self, alert: _Alert) -> str:
        name = alert.labels.get("alertname", "")
        namespace, policy = alert.labels.get("namespace", ""), alert.labels.get("policy", "")
        listed = self._listed(namespace, policy)
        if not listed.exists:
            return "unknown_policy"
        if name not in listed.names:
            return "unlisted"
        now = self._now()
        is_over = alert.ends_at is not None and _EPOCH < _aware(alert.ends_at) <= now
        fires = alert.status == "firing" and not is_over
        heard = self._heard.setdefault((namespace, policy), {})
        is_new = name not in heard
        series = heard.setdefault(name, _Series({}, now))
        series.forget_old(now)
        labels = frozenset(alert.labels.items())
        is_known = not is_new and (labels in series.firing) is fires
        series.at = now
        if fires and (labels in series.firing or len(series.firing) < MAX_LABEL_SETS):
            series.firing[labels] = now
        elif not fires:
            series.firing.pop(labels, None)
        if is_known:
            return "repeated"
        self._wake(namespace, policy)
        return "taken"


def observed_alerts(
    rules: Sequence[AlertRule], firing: Firing, remembered: Sequence[SignalStatus], *, are_all: bool = False
) -> tuple[Observed, ...]:
    """The alerts that a policy lists, as the reducer sees them. Pure.

    One that fired when the operator stopped, and of which nothing was heard since, is left out: it counts as firing, so
    that nothing recovers, and doesn't act again. One that fired and is no longer listed has ended.

    Args:
        are_all: whether nothing else tells of health: then it is conclusive while none of them fires.
    """
    held = {entry.name for entry in remembered if entry.verdict is Verdict.BREACH}
    return tuple(_observed(rules, firing, held, are_all))


def _observed(rules: Sequence[AlertRule], firing: Firing, held: set[str], are_all: bool) -> Iterator[Observed]:
    for rule in rules:
        name, heard = f"{ALERT_PREFIX}{rule.alert_name}", firing.get(rule.alert_name)
        if heard is None and name in held:
            continue
        fires = heard is not None and heard.is_firing
        yield Observed(
            name=name,
            verdict=Verdict.BREACH if fires else Verdict.OK,
            action=_ACTIONS[rule.action],
            blames=rule.mode,
            is_primary=are_all,
            why=f"Alertmanager says that {rule.alert_name} fires" if fires else "",
        )
    for name in sorted(held - {f"{ALERT_PREFIX}{rule.alert_name}" for rule in rules}):
        if name.startswith(ALERT_PREFIX):
            yield Observed(name=name, verdict=Verdict.OK)


_ACTIONS = {
    AlertAction.STEP_DOWN: Action.STEP_DOWN,
    AlertAction.LEVEL_0: Action.LEVEL_0,
    AlertAction.SUSPEND: Action.SUSPEND,
}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
"""Alertmanager sends the year 1 for an alert that has no end yet."""


def _is_old(at: datetime, now: datetime) -> bool:
    return (now - at).total_seconds() > FORGOTTEN_AFTER_SECONDS


def _aware(moment: datetime) -> datetime:
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
