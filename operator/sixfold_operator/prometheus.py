"""Asking Prometheus: one query a signal, with time-outs, in threads of its own. What it says is checked here."""

from __future__ import annotations

import ast
import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from sixfold_operator.control.answers import AnswerError, Readings, readings
from sixfold_operator.control.model import Signal
from sixfold_operator.control.promql import expression_of

PARALLEL = 4
CONNECT_SECONDS = 2.0


class PrometheusError(Exception):
    """Prometheus couldn't be asked, or gave no answer that can be read."""


class Prometheus:
    """A connection to one Prometheus. Nothing here blocks the loop, however long the server takes."""

    def __init__(
        self, url: str, timeout_seconds: float, token_file: Path | None = None, ca_file: Path | None = None
    ) -> None:
        self._url = url
        self._name = _without_password(url)
        self._timeout_seconds = timeout_seconds
        self._token_file, self._ca_file = token_file, ca_file
        self._threads = ThreadPoolExecutor(PARALLEL, thread_name_prefix="prometheus")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def ask(self, signal: Signal) -> Readings:
        """Readings by namespace and policy. Raises PrometheusError."""
        try:
            return readings(await self.query(expression_of(signal)))
        except AnswerError as error:
            raise PrometheusError(str(error)) from error

    async def query(self, expression: str) -> Any:
        """The result of an instant query. Raises PrometheusError."""
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._threads, self._query, expression)
        try:
            # A server that trickles its answer never runs into the time-out of a read.
            return await asyncio.wait_for(work, CONNECT_SECONDS + 2 * self._timeout_seconds)
        except TimeoutError:
            raise PrometheusError(f"{self._name} doesn't answer in time") from None

    def _query(self, expression: str) -> Any:
        import requests  # it and its client: only where a Prometheus is configured
        from prometheus_api_client.exceptions import PrometheusApiClientException

        try:
            limits = (CONNECT_SECONDS, self._timeout_seconds)
            with self._client() as client:
                found: Any = client.custom_query(expression, {"timeout": f"{self._timeout_seconds:g}s"}, timeout=limits)
        except PrometheusApiClientException as error:
            raise PrometheusError(f"{self._name} answers {_shortened(_status_text(str(error)))}") from error
        except requests.Timeout as error:
            raise PrometheusError(f"{self._name} doesn't answer in time") from error
        except requests.exceptions.SSLError as error:
            raise PrometheusError(f"the certificate of {self._name} isn't trusted, or it speaks no TLS") from error
        except requests.ConnectionError as error:
            raise PrometheusError(f"{self._name} can't be reached") from error
        except (requests.RequestException, ValueError, KeyError, TypeError, OSError) as error:
            raise PrometheusError(f"{self._name} gives no answer of Prometheus: {_shortened(repr(error))}") from error
        return found

    def _client(self) -> Any:
        import requests
        from prometheus_api_client import PrometheusConnect
        from urllib3.util.retry import Retry

        session = requests.Session()
        session.verify = str(self._ca_file) if self._ca_file else True
        session.trust_env = False
        headers = {}
        if self._token_file is not None:
            headers["Authorization"] = f"Bearer {self._token_file.read_text().strip()}"
        return PrometheusConnect(self._url, headers=headers, retry=Retry(total=0), session=session, method="POST")


def _status_text(message: str) -> str:
    """Status and reason out of the client's "HTTP Status Code 400 (b'{...}')"."""
    match = re.fullmatch(r"HTTP Status Code (\d+) \((b.*)\)", message, re.DOTALL)
    if match is None:
        return message
    try:
        body = ast.literal_eval(match[2]).decode(errors="replace")
        document = json.loads(body)
    except (ValueError, SyntaxError, AttributeError):
        return f"with status {match[1]}"
    reason = document.get("error") if isinstance(document, dict) else None
    return f"with status {match[1]}: {reason}" if reason else f"with status {match[1]}"


def _without_password(url: str) -> str:
    """For messages, which end up in statuses and logs."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:199]}…"
