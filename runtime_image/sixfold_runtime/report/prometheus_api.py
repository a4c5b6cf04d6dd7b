"""Questions to a Prometheus, and why there is no answer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from sixfold_runtime.report.growth import Samples
from sixfold_runtime.report.model import ReportError

TIMEOUT_SECONDS = 30
IN_CLUSTER = (
    "If it runs in the cluster, make it reachable first: `kubectl -n sixfold-system port-forward"
    " svc/sixfold-prometheus 9090`, and then --prometheus http://localhost:9090"
)

Labels = Mapping[str, str]


class PrometheusApi:
    """One Prometheus. Every method raises ReportError with what was asked where, and what to do.

    Attributes:
        name: its address without user, password and parameters, for pages and messages that others read.
    """

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url.rstrip("/"))
        except ValueError as error:
            raise ReportError(f"--prometheus: that is no address ({error})") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ReportError("--prometheus: give an address such as http://localhost:9090")
        self.name = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
        self._url = url.rstrip("/")

    def now(self, query: str, unix_seconds: int) -> list[tuple[Labels, float]]:
        """The vector at a moment; values that aren't finite are left out."""
        from prometheus_api_client import PrometheusConnect

        def ask(client: PrometheusConnect) -> Any:
            return client.custom_query(query, {"time": unix_seconds})

        rows = [(entry["metric"], float(entry["value"][1])) for entry in self._asked(ask)]
        return [(labels, value) for labels, value in rows if math.isfinite(value)]

    def over(self, query: str, start: int, end: int, step: int) -> list[tuple[Labels, Samples]]:
        """Series at `start`, every `step` seconds, until `end`; values that aren't finite are left out."""
        from prometheus_api_client import PrometheusConnect

        def ask(client: PrometheusConnect) -> Any:
            moments = (datetime.fromtimestamp(moment, UTC) for moment in (start, end))
            return client.custom_query_range(query, *moments, str(step))

        found: list[tuple[Labels, Samples]] = []
        for entry in self._asked(ask):
            samples = [(float(at), float(value)) for at, value in entry["values"]]
            found.append((entry["metric"], [(at, value) for at, value in samples if math.isfinite(value)]))
        return found

    def _asked(self, ask: Any) -> Any:
        import requests
        from prometheus_api_client import PrometheusConnect
        from prometheus_api_client.exceptions import PrometheusApiClientException
        from urllib3.util.retry import Retry

        try:
            return ask(PrometheusConnect(self._url, retry=Retry(total=0), timeout=TIMEOUT_SECONDS))
        except PrometheusApiClientException as error:
            raise ReportError(self._refused(str(error))) from error
        except requests.exceptions.SSLError as error:
            raise ReportError(f"the certificate of {self.name} isn't trusted here; is it the right address?") from error
        except requests.exceptions.ConnectionError as error:
            raise ReportError(f"{self.name} can't be reached: {_reason(error)}. {IN_CLUSTER}") from error
        except requests.exceptions.Timeout as error:
            raise ReportError(f"{self.name} doesn't answer within {TIMEOUT_SECONDS} s. {IN_CLUSTER}") from error
        except (requests.RequestException, ValueError, KeyError, TypeError) as error:
            raise ReportError(
                f"what {self.name} answers isn't an answer of Prometheus: is it the address of one, such as"
                " http://localhost:9090?"
            ) from error

    def _refused(self, answer: str) -> str:
        if "Status Code 401" in answer or "Status Code 403" in answer:
            return f"{self.name} lets nobody in without a password: give it as http://USER:PASSWORD@HOST"
        return f"{self.name} answers: {answer[:300]}"


def _reason(error: Exception) -> str:
    """In words; the error's own repeat the address, with its password."""
    text = str(error)
    for sign, words in (
        ("refused", "nothing listens there"),
        ("resolve", "there is no such host"),
        ("not known", "there is no such host"),
        ("unreachable", "there is no way to it"),
        ("timed out", f"no answer within {TIMEOUT_SECONDS} s"),
    ):
        if sign in text:
            return words
    return "the connection broke"
