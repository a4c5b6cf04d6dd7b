"""Real Prometheus and Alertmanager servers for tests, demo and benches; broken on purpose.

Each listens on a free port of 127.0.0.1, keeps its files in a folder that the caller owns, and dies with this process.
"""

from __future__ import annotations

import json
import signal
import subprocess
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode

from redis_server import LOOPBACK, free_port, wait_until

START_SECONDS = 60.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class PrometheusServerError(Exception):
    """A server didn't start, or didn't do what it was asked for."""


@dataclass(frozen=True)
class Job:
    """What Prometheus scrapes: `labels` are added to each series; a pod's own labels are kept, as the chart has it."""

    targets: Sequence[str]
    """host:port."""
    name: str = "sixfold"
    labels: Mapping[str, str] | None = None


class _Server(ABC):
    """A process that answers HTTP.

    Attributes:
        port, url: kept over stop, kill and start.
    """

    def __init__(self, folder: Path, program: str, ready_path: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.port = folder, free_port()
        self.url = f"http://{LOOPBACK}:{self.port}"
        self._program, self._ready_path = program, ready_path
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def arguments(self) -> list[str]:
        """Of the program; writes the configuration that they name."""

    def start(self) -> Self:
        """Returns when it is ready. Raises PrometheusServerError with the end of its log if it doesn't become so."""
        log = self.folder / f"{self._program}.log"
        with log.open("ab") as output:
            self._process = process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", self._program, *self.arguments()],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

        def ready() -> bool:
            if process.poll() is not None:
                raise PrometheusServerError(f"{self._program} ended:\n{log.read_text(errors='replace')[-2000:]}")
            try:
                self.call(self._ready_path)
            except PrometheusServerError:
                return False
            return True

        wait_until(f"{self._program} is ready", ready, START_SECONDS)
        return self

    def stop(self) -> None:
        """End it in an orderly way; no matter if it doesn't run."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once, as a node that fails does."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """SIGSTOP: connections stay, and nothing is answered."""
        self._running().send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._running().send_signal(signal.SIGCONT)

    def call(self, path: str, document: Any = None) -> bytes:
        """The answer to a GET, or to a POST of a document as JSON. Raises PrometheusServerError."""
        body = None if document is None else json.dumps(document).encode()
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"})
        try:
            with _DIRECT.open(request, timeout=10) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            raise PrometheusServerError(f"{path}: {error.code} {error.read().decode(errors='replace')}") from None
        except OSError as error:
            raise PrometheusServerError(f"{path}: {error}") from None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise PrometheusServerError(f"{self._program} isn't running")
        return self._process

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(how)
            self._process.wait()
            self._process = None


class PrometheusServer(_Server):
    """`with PrometheusServer(folder, jobs=[Job([f"127.0.0.1:{port}"])]) as prometheus: prometheus.query("up")`"""

    def __init__(
        self,
        folder: Path,
        jobs: Sequence[Job] = (),
        scrape_interval: str = "1s",
        rule_files: Sequence[Path] = (),
        alertmanager: Alertmanager | None = None,
    ) -> None:
        """Starts nothing yet. Rules are evaluated as often as targets are scraped."""
        super().__init__(folder, "prometheus", "/-/ready")
        self._jobs, self._scrape_interval = list(jobs), scrape_interval
        self._rule_files, self._alertmanager = list(rule_files), alertmanager

    def arguments(self) -> list[str]:
        config = self.folder / "prometheus.yml"
        config.write_text(json.dumps(self._config()))  # JSON is YAML
        return [
            f"--config.file={config}", f"--storage.tsdb.path={self._data}", "--storage.tsdb.retention.time=365d",
            f"--web.listen-address={LOOPBACK}:{self.port}", "--web.enable-lifecycle", "--log.level=warn",
        ]  # fmt: skip

    def scrape(self, jobs: Sequence[Job]) -> None:
        """Scrape these from now on, instead of those before."""
        self._jobs = list(jobs)
        (self.folder / "prometheus.yml").write_text(json.dumps(self._config()))
        self.call("/-/reload", {})

    def backfill(self, openmetrics: str) -> None:
        """Take in samples with timestamps, in OpenMetrics' text form, before the server starts."""
        source = self.folder / "backfill.txt"
        source.write_text(openmetrics)
        words = ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(source), str(self._data)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise PrometheusServerError(f"`{' '.join(words)}` failed: {done.stderr.strip() or done.stdout.strip()}")

    def query(self, promql: str, unix_seconds: float | None = None) -> list[dict[str, Any]]:
        """The vector that a query gives: `[{"metric": {...}, "value": [time, "1"]}]`."""
        when = {} if unix_seconds is None else {"time": unix_seconds}
        answer = json.loads(self.call("/api/v1/query?" + urlencode({"query": promql, **when})))
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def _config(self) -> dict[str, Any]:
        every = self._scrape_interval
        config: dict[str, Any] = {
            "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
            "rule_files": [str(path) for path in self._rule_files],
            "scrape_configs": [
                {
                    "job_name": job.name,
                    "honor_labels": True,
                    "static_configs": [{"targets": list(job.targets), "labels": dict(job.labels or {})}],
                }
                for job in self._jobs
            ],
        }
        if self._alertmanager is not None:
            target = f"{LOOPBACK}:{self._alertmanager.port}"
            config["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [target]}]}]}
        return config


class Alertmanager(_Server):
    """Sends to one webhook. Groups wait for nothing here that a test would have to wait for."""

    def __init__(self, folder: Path, webhook_url: str, token_file: Path, repeat_interval: str = "4h") -> None:
        """Starts nothing yet. `token_file` holds the bearer token of the webhook."""
        super().__init__(folder, "prometheus-alertmanager", "/-/ready")
        self._webhook_url, self._token_file, self._repeat_interval = webhook_url, token_file, repeat_interval

    def arguments(self) -> list[str]:
        config = self.folder / "alertmanager.yml"
        config.write_text(json.dumps(self._config()))
        return [
            f"--config.file={config}", f"--storage.path={self.folder / 'data'}", "--cluster.listen-address=",
            f"--web.listen-address={LOOPBACK}:{self.port}", "--log.level=debug",
        ]  # fmt: skip

    def post(self, labels: Mapping[str, str], ends_at: datetime | None = None) -> None:
        """Tell it of an alert as Prometheus does. One that `ends_at` a time in the past is resolved."""
        alert: dict[str, Any] = {"labels": dict(labels), "annotations": {}}
        if ends_at is not None:
            alert["endsAt"] = ends_at.astimezone(UTC).isoformat()
        self.call("/api/v2/alerts", [alert])

    def _config(self) -> dict[str, Any]:
        authorization = {"type": "Bearer", "credentials_file": str(self._token_file)}
        webhook = {"url": self._webhook_url, "send_resolved": True, "http_config": {"authorization": authorization}}
        return {
            "route": {
                "receiver": "sixfold", "group_by": ["alertname", "namespace", "policy"],
                "group_wait": "1s", "group_interval": "1s", "repeat_interval": self._repeat_interval,
            },
            "receivers": [{"name": "sixfold", "webhook_configs": [webhook]}],
        }  # fmt: skip
