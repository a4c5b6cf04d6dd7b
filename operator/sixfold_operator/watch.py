"""What is watched outside of Kubernetes, put together from the settings: Prometheus and Alertmanager."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from pydantic import ValidationError

from sixfold_api.names import POLICY_KIND
from sixfold_api.policy import InferencePolicySpec
from sixfold_api.scalars import duration_seconds
from sixfold_operator.alerts import Alerts, Listed
from sixfold_operator.cache import Cache, Place
from sixfold_operator.collector import Collector, SignalsFile
from sixfold_operator.prometheus import Prometheus
from sixfold_operator.reconcile.context import Clock
from sixfold_operator.reconcile.decided import NOTHING_WATCHED
from sixfold_operator.settings import OperatorSettings

log = logging.getLogger(__name__)

LONGEST_ROUND_SECONDS = 30.0


class Watch:
    """Takes alerts from `start` to `stop`, refusing them until `lead`, which reads Prometheus.

    Attributes:
        watched: what is known, for whoever decides.
    """

    def __init__(
        self, settings: OperatorSettings, cache: Cache, wake: Callable[[str, str], None], clock: Clock
    ) -> None:
        self._settings = settings
        self._cache = cache
        self._leads = False
        self._prometheus = self._collector = self._alerts = None
        self.watched = NOTHING_WATCHED
        if settings.prometheus_url:
            self._prometheus = Prometheus(
                settings.prometheus_url,
                settings.prometheus_timeout_seconds,
                settings.prometheus_bearer_token_file,
                settings.prometheus_ca_file,
            )
            signals = SignalsFile(settings.signals_file)
            self._collector = Collector(
                self._prometheus, signals, self._places, self._interval_seconds, wake, clock.now
            )
            self.watched = replace(self.watched, signals=self._collector.signals, snapshot=self._collector.snapshot)
        token_file = settings.alerts_token_file
        if token_file is not None:
            self._alerts = Alerts(token_file, self._listed, wake, clock.now, lambda: self._leads)
            self.watched = replace(self.watched, firing=self._alerts.firing, hears=True)

    async def start(self) -> None:
        if self._alerts is not None:
            port = await self._alerts.start(self._settings.alerts_port)
            log.info("serving /alerts", extra={"fields": {"port": port}})

    async def lead(self) -> None:
        """Take alerts, and read Prometheus until cancelled where one is configured."""
        self._leads = True
        if self._collector is not None:
            await self._collector.run()

    async def stop(self) -> None:
        if self._prometheus is not None:
            self._prometheus.close()
        if self._alerts is not None:
            await self._alerts.stop()

    def forget(self, namespace: str, policy: str) -> None:
        if self._alerts is not None:
            self._alerts.forget(namespace, policy)

    def _places(self) -> Iterable[Place]:
        return self._cache.places(POLICY_KIND)

    def _interval_seconds(self) -> float:
        """The shortest that any policy wants."""
        intervals = [duration_seconds(spec.analysis.interval) for spec in self._specs()]
        return min([LONGEST_ROUND_SECONDS, *intervals])

    def _specs(self) -> Iterator[InferencePolicySpec]:
        for place in self._places():
            spec = self._spec(*place)
            if spec is not None:
                yield spec

    def _spec(self, namespace: str, name: str) -> InferencePolicySpec | None:
        policy = self._cache.get(POLICY_KIND, namespace, name)
        try:
            return None if policy is None else InferencePolicySpec.model_validate(policy["spec"])
        except ValidationError:
            return None  # the policy's own condition tells

    def _listed(self, namespace: str, name: str) -> Listed:
        spec = self._spec(namespace, name)
        return Listed(False) if spec is None else Listed(True, [rule.alert_name for rule in spec.analysis.alerts])
