"""What Prometheus counted over a period."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from sixfold_runtime.report.model import Counted, ReportError

HOUR_SECONDS = 3600
TIMEOUT_SECONDS = 30
UNKNOWN = "unknown"
"""Length of a prompt that wasn't told: Prometheus leaves empty labels out."""
_GROUPS = {
    "exited": 'sixfold_exit_request_seconds_count{{{w}exited="true"}}',
    "exit_texts": "sixfold_exit_request_seconds_count{{{w}}}",
    "accepted": "sixfold_accepted_tokens_total{{{w}}}",
    "drafted": "sixfold_draft_tokens_total{{{w}}}",
    "draft_seconds": "sixfold_draft_seconds_sum{{{w}}}",
    "verify_seconds": "sixfold_verify_seconds_sum{{{w}}}",
    "kv_hits": 'sixfold_kv_blocks_total{{{w}result=~"hit_.*"}}',
    "kv_lookups": 'sixfold_kv_blocks_total{{{w}result!="skipped"}}',
    "reused_tokens": "sixfold_reused_tokens_total{{{w}}}",
    "padded": 'sixfold_tokens_total{{{w}kind="padded"}}',
    "actual": 'sixfold_tokens_total{{{w}kind="actual"}}',
    "slice_loads": 'sixfold_slice_loads_total{{{w}result="ok"}}',
    "sent": 'sixfold_stream_bytes_total{{{w}kind="sent"}}',
    "raw": 'sixfold_stream_bytes_total{{{w}kind="raw"}}',
    "differ": 'sixfold_shadow_total{{{w}result="differ"}}',
    "shadowed": 'sixfold_shadow_total{{{w}result=~"agree|differ"}}',
}


class PrometheusSource:
    """Reads one Prometheus; raises ReportError with the reason."""

    def __init__(self, url: str, namespace: str | None, policy: str | None) -> None:
        self._url = url.rstrip("/")
        self._name = _without_password(self._url)
        labels = (("namespace", namespace), ("policy", policy))
        self._where = "".join(f'{name}="{_escaped(value)}",' for name, value in labels if value)

    def read(self, since: timedelta, now: datetime) -> Counted:
        """What was counted from `since` before `now` on."""
        seconds = int(since.total_seconds())
        counted = Counted(
            source=self._name,
            start=_text(now - since),
            end=_text(now),
            hours=seconds / HOUR_SECONDS,
        )
        span, w = f"{seconds}s", self._where
        self._requests(counted, seconds, now)
        counted.failed = self._one(f'sum(increase(sixfold_requests_total{{{w}outcome="error"}}[{span}]))', now) or 0.0
        engine = "sixfold_request_engine_seconds"
        for labels, number in self._by("variant, level", f"{engine}_count", span, now):
            counted.by_level[labels["variant"], labels["level"]] = number
        for labels, number in self._by("variant, level", f"{engine}_sum", span, now):
            counted.engine_seconds[labels["variant"], labels["level"]] = number
        sums = {
            (labels.get("length_bucket") or UNKNOWN, labels["variant"]): number
            for labels, number in self._by("length_bucket, variant", f"{engine}_sum", span, now)
        }
        for labels, number in self._by("length_bucket, variant", f"{engine}_count", span, now):
            key = labels.get("length_bucket") or UNKNOWN, labels["variant"]
            counted.by_length[key] = number, sums.get(key, 0.0)
        for labels, number in self._by("cause", "sixfold_flops_total", span, now):
            counted.flops[labels.get("cause", "")] = number
        buckets = self._by("le", f"{engine}_bucket", span, now)
        counted.spread = sorted((float(labels["le"].replace("+Inf", "inf")), number) for labels, number in buckets)
        for labels, _ in self._by("variant, task", "sixfold_requests_total", span, now):
            if labels.get("variant") and labels.get("task"):
                counted.tasks[labels["variant"]] = labels["task"]
        self._modes(counted, span, now)
        self._pods(counted, span, now)
        return counted

    def _requests(self, counted: Counted, seconds: int, now: datetime) -> None:
        """By hour of the day: one window an hour, back from now."""
        series = f'sixfold_requests_total{{{self._where}outcome!="refused"}}'
        for back in range(0, seconds, HOUR_SECONDS):
            step = min(HOUR_SECONDS, seconds - back)  # the period needn't be of whole hours
            query = f"sum by (variant, length_bucket) (increase({series}[{step}s]))"
            moment = now - timedelta(seconds=back)
            hour = (moment - timedelta(seconds=step / 2)).hour
            for labels, number in self._ask(query, moment):
                if labels.get("variant") and number > 0:
                    key = hour, labels.get("length_bucket") or UNKNOWN, labels["variant"]
                    counted.requests[key] = counted.requests.get(key, 0.0) + number

    def _modes(self, counted: Counted, span: str, now: datetime) -> None:
        for name, template in _GROUPS.items():
            selector = template.format(w=self._where)
            value = self._one(f"sum(increase({selector}[{span}]))", now)
            if value is not None:
                counted.modes[name] = value
        if "padded" in counted.modes:
            counted.modes["padding"] = counted.modes["padded"] - counted.modes.get("actual", 0.0)

    def _pods(self, counted: Counted, span: str, now: datetime) -> None:
        w = self._where
        pods = f"max by (namespace, policy, instance) (sixfold_model_load_seconds{{{w}}})"
        minutes = self._one(f"sum(count_over_time({pods}[{span}:1m]))", now)
        counted.pod_hours = None if minutes is None else minutes / 60
        busy = self._one(f"sum(increase(sixfold_engine_busy_seconds_total{{{w}}}[{span}]))", now)
        counted.busy_hours = None if busy is None else busy / HOUR_SECONDS
        for labels, number in self._ask(
            f"max by (variant) (max_over_time(sixfold_model_load_seconds{{{w}}}[{span}]))", now
        ):
            counted.loads[labels["variant"]] = number
        for labels, number in self._ask(
            f"max by (component) (max_over_time(sixfold_cost_per_hour{{{w}}}[{span}]))", now
        ):
            counted.cost_per_hour[labels["component"]] = number

    def _by(self, by: str, metric: str, span: str, now: datetime) -> Iterator[tuple[Mapping[str, str], float]]:
        yield from self._ask(f"sum by ({by}) (increase({metric}{{{self._where}}}[{span}]))", now)

    def _one(self, query: str, now: datetime) -> float | None:
        return next((number for _, number in self._ask(query, now)), None)

    def _ask(self, query: str, now: datetime) -> list[tuple[Mapping[str, str], float]]:
        import requests
        from prometheus_api_client import PrometheusConnect
        from prometheus_api_client.exceptions import PrometheusApiClientException
        from urllib3.util.retry import Retry

        try:
            client = PrometheusConnect(self._url, retry=Retry(total=0), timeout=TIMEOUT_SECONDS)
            found: list[Any] = client.custom_query(query, {"time": now.timestamp()})
        except PrometheusApiClientException as error:
            raise ReportError(f"{self._name} answers: {str(error)[:300]}") from error
        except (requests.RequestException, ValueError, KeyError) as error:
            raise ReportError(
                f"{self._name} can't be asked: is it the address of a Prometheus? ({_reason(error)})"
            ) from error
        rows = [(entry["metric"], float(entry["value"][1])) for entry in found]
        return [(labels, number) for labels, number in rows if math.isfinite(number)]


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"')


def _without_password(url: str) -> str:
    """For the page and for messages, which others read."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _reason(error: Exception) -> str:
    """What went wrong; a failed connection's own words repeat the address."""
    return type(error).__name__ if "@" in str(error) else str(error)


def _text(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
