"""What Prometheus counted over a period."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from sixfold_runtime.report.growth import Counters, Samples
from sixfold_runtime.report.model import (
    CLASSIFIER,
    ENGINE,
    UNKNOWN,
    Counted,
    Held,
    Place,
    ReportError,
    Work,
)
from sixfold_runtime.report.modes import TALLIES
from sixfold_runtime.report.money import CLASSIFICATIONS
from sixfold_runtime.report.prometheus_api import Labels, PrometheusApi
from sixfold_runtime.report.slots import Slots
from sixfold_runtime.report.words import moment

POINTS = 480
"""Samples of a series that are asked for at once; a longer period is asked for in pieces."""
STEPS_SECONDS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800)
"""Between samples: the columns of a page are multiples of them, and the longest still tells hours of the day apart."""
LOOKBACK_SECONDS = 300
"""How far apart scrapes may be; as Prometheus has it."""
FIRST_SCRAPES_SECONDS = 60
"""Within which a Prometheus that just began has scraped all that was there already."""
_ENGINE_SECONDS = "sixfold_request_engine_seconds"


class PrometheusSource:
    """Reads one Prometheus; raises ReportError with the reason."""

    def __init__(self, url: str, namespace: str | None, policy: str | None) -> None:
        self._api = PrometheusApi(url)
        self._namespace, self._policy = namespace, policy
        labels = (("namespace", namespace), ("policy", policy))
        self._where = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels if value)

    def read(self, since: timedelta, now: datetime) -> Counted:
        """What was counted from `since` before `now` on."""
        end = int(now.timestamp())
        asked_from = end - int(since.total_seconds())
        self._check_names(asked_from, end)
        start = self._recorded_from(asked_from, end)
        counted = Counted(
            source=self._api.name,
            start=moment(start),
            end=moment(end),
            hours=(end - start) / 3600,
            slots=Slots.of(start, end),
        )
        if start > asked_from:
            counted.notes.append(f"{self._api.name} began to record at {counted.start}: nothing is known of before.")
        return _Reading(self._api, self._where, start, end, counted, is_young=start > asked_from).all()

    def _recorded_from(self, start: int, end: int) -> int:
        """When this Prometheus began, if that was within the period; else the period's start."""
        step = max(1, (end - start) // POINTS)
        first = self._first_up(start, end, step)
        if first is None or first <= start:
            return start
        return self._first_up(first - step, first, max(1, step // POINTS)) or first

    def _first_up(self, start: int, end: int, step: int) -> int | None:
        return min((int(samples[0][0]) for _, samples in self._api.over("count(up)", start, end, step)), default=None)

    def _check_names(self, start: int, end: int) -> None:
        """The policies that are asked for are there; an error names those that are."""
        known = self._api.now(f"group by (namespace, policy) (present_over_time(sixfold_level[{end - start}s]))", end)
        names = sorted(_policy(labels) for labels, _ in known)
        wanted = [
            name
            for name in names
            if (not self._namespace or name.split("/")[0] == self._namespace)
            and (not self._policy or name.split("/")[1] == self._policy)
        ]
        if wanted:
            return
        period = f"from {moment(start)} to {moment(end)}"
        if not names:
            raise ReportError(
                f"{self._api.name} has no series of Sixfold {period}: does it scrape the pods of policies? The chart"
                " brings a Prometheus with prometheus.enabled, and a PodMonitor with podMonitor.enabled"
            )
        asked = "/".join(name for name in (self._namespace, self._policy) if name)
        raise ReportError(
            f"{self._api.name} knows no policy {asked} {period}; it knows {', '.join(names[:10])}"
            + (f" and {len(names) - 10} more" if len(names) > 10 else "")
        )


@dataclass
class _Pod:
    policy: str
    component: str
    """What the label says; empty without one."""
    variants: set[str] = field(default_factory=set)
    moments: set[float] = field(default_factory=set)
    """At which it was there."""


class _Reading:
    """One period of one Prometheus."""

    def __init__(
        self, api: PrometheusApi, where: str, start: int, end: int, counted: Counted, is_young: bool = False
    ) -> None:
        """`is_young`: Prometheus began at `start`, and what it saw first may be older."""
        self._api, self._where, self._counted = api, where, counted
        steps = (step for step in STEPS_SECONDS if step * POINTS >= end - start)
        self._step = next(steps, STEPS_SECONDS[-1])
        # The last sample is to be the newest one: what remains of a step is added before the period.
        self._start, self._end = end - math.ceil((end - start) / self._step) * self._step, end
        self._window = f"{max(self._step, LOOKBACK_SECONDS)}s"
        self._first_seen = self._first_scrapes() if is_young else {}

    def all(self) -> Counted:
        self._prices()
        self._requests()
        self._engine_seconds()
        self._operations()
        self._tallies()
        self._pods()
        self._rooms()
        return self._counted

    def _first_scrapes(self) -> dict[str, float]:
        """Instance -> its first scrape, of those that a Prometheus saw first when it began."""
        first: dict[str, float] = {}
        for labels, samples in self._over("min by (instance) (timestamp(up))"):
            if samples:
                first.setdefault(labels.get("instance", ""), samples[0][0])
        return {instance: at for instance, at in first.items() if at <= self._start + FIRST_SCRAPES_SECONDS}

    def _known_from(self, labels: Labels) -> float:
        """Until when a series that appears was there already: what the first scrape of all shows may have run for
        days, what appears later began within the period."""
        return self._first_seen.get(labels.get("instance", ""), self._start)

    def _prices(self) -> None:
        newest = f"last_over_time({self._of('sixfold_cost_per_hour')}[{self._end - self._start}s])"
        for labels, value in self._api.now(f"max by (namespace, policy, component) ({newest})", self._end):
            self._counted.prices[Place(_policy(labels), labels.get("component", ENGINE))] = value

    def _requests(self) -> None:
        counted = self._counted
        for labels, grown in self._grown('sixfold_requests_total{outcome!~"refused|limited"}'):
            variant, bucket = labels.get("variant"), labels.get("length_bucket") or UNKNOWN
            if not variant:
                continue
            if labels.get("task"):
                counted.tasks[variant] = labels["task"]
            for at, number in grown:
                counted.requests[counted.slots.column(at), bucket, variant] += number
            if labels.get("outcome") == "error":
                counted.failed += _sum(grown)

    def _engine_seconds(self) -> None:
        counted = self._counted
        for labels, grown in self._grown(f"{_ENGINE_SECONDS}_sum"):
            counted.spent[_work(labels)].seconds += _sum(grown)
            counted.tasks.setdefault(labels["variant"], labels.get("task", ""))
        for labels, grown in self._grown(f"{_ENGINE_SECONDS}_count"):
            counted.spent[_work(labels)].requests += _sum(grown)
        counted.spent = {work: spent for work, spent in counted.spent.items() if spent.requests > 0}
        cumulative: dict[tuple[str, str], dict[float, float]] = {}
        for labels, grown in self._grown(f"{_ENGINE_SECONDS}_bucket"):
            bounds = cumulative.setdefault((_policy(labels), labels["variant"]), {})
            bound = float(labels["le"])
            bounds[bound] = bounds.get(bound, 0.0) + _sum(grown)
        for key, bounds in cumulative.items():
            below = 0.0
            for bound in sorted(bounds):
                counted.spread[key][bound] = max(0.0, bounds[bound] - below)
                below = max(below, bounds[bound])

    def _operations(self) -> None:
        for labels, grown in self._grown("sixfold_flops_total"):
            self._counted.flops[_policy(labels), labels["variant"], labels.get("cause", "")] += _sum(grown)
        for labels, grown in self._grown("sixfold_exit_total"):
            if labels.get("depth", "").isdigit():
                self._counted.exits[labels["variant"], int(labels["depth"])] += _sum(grown)

    def _tallies(self) -> None:
        for counter, label in TALLIES.items():
            for labels, grown in self._grown(counter):
                self._counted.tallies[counter, labels.get(label, "")] += _sum(grown)

    def _pods(self) -> None:
        """Hours of pods that hold models, and those in which they computed."""
        counted, pods = self._counted, self._found_pods()
        if not pods:
            return
        places = {name: self._place(pod) for name, pod in pods.items()}
        counted.split_policies = {place.policy for place in places.values() if place.component == CLASSIFIER}
        held = counted.pods = defaultdict(Held)
        for name, pod in pods.items():
            for at in pod.moments:
                held[places[name], counted.slots.column(at - self._step / 2)].up_seconds += self._step
        for labels, grown in self._grown("sixfold_engine_busy_seconds_total"):
            if (name := _pod_name(labels)) in places:
                for at, seconds in grown:
                    held[places[name], counted.slots.column(at)].busy_seconds += seconds

    def _found_pods(self) -> dict[str, _Pod]:
        """Pods that held models in the period; counts the loads of those that started."""
        pods: dict[str, _Pod] = {}
        loads: dict[tuple[str, str], tuple[bool, float]] = {}
        for labels, samples in self._over(self._of("sixfold_model_load_seconds")):
            name, variant = _pod_name(labels), labels["variant"]
            pod = pods.setdefault(name, _Pod(_policy(labels), labels.get("component", "")))
            pod.variants.add(variant)
            pod.moments.update(at for at, _ in samples if at > self._start)
            if samples:
                has_started = samples[0][0] > self._known_from(labels)
                loads[name, variant] = loads.get((name, variant), (has_started, 0.0))[0], samples[-1][1]
        for (_, variant), (has_started, seconds) in loads.items():
            self._counted.loads[variant].add(seconds, has_started)
        return pods

    def _place(self, pod: _Pod) -> Place:
        """Whose pod it is: by the label that the chart adds; without it, by what it holds."""
        tasks = self._counted.tasks
        if pod.component in (ENGINE, CLASSIFIER):
            return Place(pod.policy, pod.component)
        has_price = Place(pod.policy, CLASSIFIER) in self._counted.prices
        only_classifies = all(tasks.get(name) in CLASSIFICATIONS for name in pod.variants)
        return Place(pod.policy, CLASSIFIER if has_price and only_classifies else ENGINE)

    def _rooms(self) -> None:
        points = (self._end - self._start) / self._step
        for labels, samples in self._over(self._of('sixfold_memory_bytes{kind=~"reserved|used"}')):
            mean = sum(value for at, value in samples if at > self._start) / points  # 0 while a pod isn't there
            room = self._counted.rooms[labels["variant"]]
            if labels["kind"] == "reserved":
                room.reserved_bytes += mean
            else:
                room.used_bytes += mean

    def _grown(self, selector: str) -> Iterator[tuple[Labels, list[tuple[float, float]]]]:
        """Series of a counter, and when they grew by how much: the middle of the step in which they did."""
        counters = Counters()
        for labels, samples in self._over(f"last_over_time({self._of(selector)}[{self._window}])"):
            grown = counters.grown(tuple(sorted(labels.items())), samples, self._known_from(labels))
            if grown:
                yield labels, [(at - self._step / 2, number) for at, number in grown]

    def _over(self, query: str) -> Iterator[tuple[Labels, Samples]]:
        """All series, in pieces of the period, one behind the other; the first piece has the period's start too."""
        piece = POINTS * self._step
        for first in range(self._start, self._end, piece):
            begin = first if first == self._start else first + self._step
            end = min(first + piece, self._end)
            if begin <= end:
                yield from self._api.over(query, begin, end, self._step)

    def _of(self, selector: str) -> str:
        """`name` or `name{matchers}`, of the policies that are asked for only."""
        name, _, matchers = selector.rstrip("}").partition("{")
        return f"{name}{{{','.join(part for part in (self._where, matchers) if part)}}}"


def _work(labels: Labels) -> Work:
    return Work(_policy(labels), labels["variant"], labels.get("level", ""), labels.get("length_bucket") or UNKNOWN)


def _policy(labels: Labels) -> str:
    return f"{labels.get('namespace', '')}/{labels.get('policy', '')}"


def _pod_name(labels: Labels) -> str:
    return f"{_policy(labels)}/{labels.get('pod') or labels.get('instance', '')}"


def _sum(grown: list[tuple[float, float]]) -> float:
    return sum(number for _, number in grown)


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
