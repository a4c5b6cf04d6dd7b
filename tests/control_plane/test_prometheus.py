"""The built-in queries and the collector against a real Prometheus: right values, and every way in which it fails."""

from __future__ import annotations

import asyncio
import ssl
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "e2e"))

from prometheus_server import Job, PrometheusServer
from redis_server import Certificates

from sixfold_api.control_status import Verdict
from sixfold_api.ticket import Cause
from sixfold_operator.collector import Collector, SignalsFile
from sixfold_operator.control.answers import readings
from sixfold_operator.control.figures import arm_figures, busy_share, request_cost_seconds
from sixfold_operator.control.model import Reading, Signal, Snapshot
from sixfold_operator.control.promql import expression_of
from sixfold_operator.control.signals import BUILT_IN, load
from sixfold_operator.control.verdicts import observe
from sixfold_operator.prometheus import Prometheus, PrometheusError

PLACE = ("shop", "support-bot")
SIGNALS = {signal.name: signal for signal in load([{"name": "IdleAccelerator", "window": "10m"}])}
"""Within the series that are there."""
STEP_SECONDS, STEPS = 15, 60
STABLE = 'level="2",arm="stable"'
CHAT = 'variant="chat"'


class Samples:
    """Counters that grow evenly over 15 minutes, in OpenMetrics' text form."""

    def __init__(self, end_seconds: int) -> None:
        self._end_seconds = end_seconds
        self._lines: list[str] = []

    def counter(self, name: str, labels: str, per_second: float, *, until: int = STEPS, reset_at: int = 0) -> None:
        """`until`: the pod went at that step. `reset_at`: it was started anew at that step."""
        for step in range(until):
            value = per_second * STEP_SECONDS * (step - (reset_at if step >= reset_at else 0))
            self.sample(name, labels, value, step)

    def gauge(self, name: str, labels: str, value: float) -> None:
        for step in range(STEPS):
            self.sample(name, labels, value, step)

    def histogram(self, name: str, labels: str, buckets: dict[str, float], sum_per_second: float = 1.0) -> None:
        """buckets: upper bound -> observations a second up to it."""
        for bound, per_second in buckets.items():
            self.counter(f"{name}_bucket", f'{labels},le="{bound}"', per_second)
        self.counter(f"{name}_count", labels, buckets["+Inf"])
        self.counter(f"{name}_sum", labels, sum_per_second)

    def sample(self, name: str, labels: str, value: float, step: int) -> None:
        moment = self._end_seconds - (STEPS - 1 - step) * STEP_SECONDS
        where = f'namespace="{PLACE[0]}",policy="{PLACE[1]}",{labels}'
        self._lines.append(f"{name}{{{where}}} {value} {moment}")

    def text(self) -> str:
        return "\n".join([*sorted(self._lines, key=lambda line: line.split("}")[0]), "# EOF\n"])


def _traffic(samples: Samples) -> None:
    """What gateways count: level 2 answers 9 of 10, and 1 of 10 fails."""
    for labels, outcome, per_second in (
        (STABLE, "ok", 9),
        (STABLE, "error", 1),
        (STABLE, "limited", 5),
        ('level="2",arm="canary"', "ok", 1),
    ):
        samples.counter("sixfold_requests_total", f'{labels},outcome="{outcome}",instance="a"', per_second)
    place = f'{STABLE},{CHAT},length_bucket="100-500",outcome="limited",instance="b"'
    samples.counter("sixfold_requests_total", place, 1)
    gone = 'level="2",arm="stable",outcome="error",instance="gone"'
    samples.counter("sixfold_requests_total", gone, 50, until=STEPS - 24)
    samples.counter("sixfold_requests_total", 'level="3",arm="stable",outcome="error",instance="a"', 7)
    slow = {"0.1": 0, "1.0": 9, "2.5": 10, "+Inf": 10}
    for name in ("request_seconds", "time_to_first_token_seconds", "inter_token_latency_seconds"):
        samples.histogram(f"sixfold_{name}", STABLE, slow)
    samples.histogram("sixfold_gateway_queue_wait_seconds", 'priority="normal"', slow)
    samples.histogram("sixfold_request_engine_seconds", STABLE, slow, sum_per_second=2)
    samples.histogram("sixfold_answer_tokens", f"{CHAT},{STABLE}", {"2.0": 1, "4.0": 6, "8.0": 9, "+Inf": 10})


def _work(samples: Samples) -> None:
    """What engines count."""
    samples.histogram("sixfold_buffer_wait_seconds", f'{CHAT},level="2"', {"0.01": 0, "0.1": 10, "+Inf": 10})
    samples.counter("sixfold_draft_tokens_total", f'{CHAT},level="2"', 10)
    for position, per_second in (("1", 4), ("2", 2)):
        samples.counter("sixfold_accepted_tokens_total", f'{CHAT},level="2",position="{position}"', per_second)
    samples.histogram("sixfold_draft_seconds", f'{CHAT},level="2"', {"+Inf": 10}, sum_per_second=0.2)
    samples.histogram("sixfold_verify_seconds", f'{CHAT},level="2"', {"+Inf": 10}, sum_per_second=0.4)
    for exited, per_second in (("true", 3), ("false", 7)):
        samples.counter("sixfold_exit_request_seconds_count", f'variant="intent",exited="{exited}"', per_second)
    for depth, per_second in (("2", 10), ("4", 8)):
        samples.counter("sixfold_exit_confidence_count", f'variant="intent",depth="{depth}"', per_second)
    for result, per_second in (("hit_memory", 1), ("hit_redis", 1), ("miss", 6), ("fault", 2), ("skipped", 100)):
        samples.counter("sixfold_kv_blocks_total", f'result="{result}"', per_second)
    for task, result, per_second in (
        ("Classification", "agree", 9),
        ("Classification", "differ", 1),
        ("Classification", "skipped", 9),
        ("Generation", "differ", 9),
    ):
        samples.counter("sixfold_shadow_total", f'{STABLE},task="{task}",result="{result}"', per_second)
    for result, per_second in (("agree", 8), ("differ", 2)):
        samples.counter("sixfold_shadow_tokens_total", f'{STABLE},{CHAT},result="{result}"', per_second)
    samples.counter("sixfold_shadow_kl_nats_total", f"{STABLE},{CHAT}", 0.4)
    for outcome, cause, per_second in (
        ("useful", "", 20),
        ("wasted", "padding", 40),
        ("wasted", "rejected_draft", 10),
        ("wasted", "recomputed_prefix", 15),
        ("wasted", "unneeded_layers", 10),
        ("wasted", "cancelled", 5),
    ):
        samples.counter("sixfold_flops_total", f'{CHAT},{STABLE},outcome="{outcome}",cause="{cause}"', per_second)
    for kind, per_second in (("padded", 10), ("actual", 4)):
        samples.counter("sixfold_tokens_total", f'{CHAT},phase="prefill",kind="{kind}"', per_second)
    samples.counter("sixfold_engine_requests_total", f'{CHAT},outcome="stop"', 10, reset_at=STEPS - 20)
    samples.counter("sixfold_slice_loads_total", 'variant="tagger",task="pos",result="ok"', 1 / 60)
    samples.counter("sixfold_engine_busy_seconds_total", f'{CHAT},level="2",instance="a"', 0.4)
    samples.counter("sixfold_engine_busy_seconds_total", f'{CHAT},level="2",instance="gone"', 1, until=STEPS - 24)
    for instance in ("a", "idle"):
        samples.gauge("sixfold_model_load_seconds", f'{CHAT},instance="{instance}"', 3)
        samples.gauge("sixfold_level", f'instance="{instance}"', 2)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], tuple[Reading, ...]]]:
    """What a real Prometheus answers to a signal's query, of known metrics."""
    end_seconds = int(time.time())
    samples = Samples(end_seconds)
    _traffic(samples)
    _work(samples)
    server = PrometheusServer(tmp_path_factory.mktemp("known"))
    server.backfill(samples.text())

    def ask(name: str) -> tuple[Reading, ...]:
        return readings(server.query(expression_of(SIGNALS[name]), end_seconds + 2)).get(PLACE, ())

    with server:
        yield ask


EXPECTED = {
    "ErrorRate": (0.1, 600),
    "RequestP95": (1.75, 600),
    "TTFTP95": (1.75, 600),
    "InterTokenP95": (1.75, 600),
    "ExitRate": (0.3, 600),
    "AcceptanceRate": (0.6, 600),
    "DraftTime": (0.5, 600),
    "KVFaults": (0.2, 600),
    "BufferWait": (0.0955, 600),
    "QueueWait": (1.75, 600),
    "ShadowDisagreement": (0.1, 6000),
    "ShadowDivergence": (0.04, 6000),
    "WastedFlops": (0.8, 6000),
    "PaddingWaste": (0.6, 6000),
    "RejectedDrafts": (0.4, 6000),
    "RecomputedPrefix": (0.15, 6000),
    "UnneededLayers": (0.1, 6000),
    "CancelledWork": (0.05, 6000),
    "KVHitRate": (0.2, 6000),
    "MisHotTask": (60, 10),
    "IdleAccelerator": (0.2, 10),
    "GeneratedLabels": (0.6, 6000),
    "RequestCost": (0.2, 6000),
    "BusyShare": (0.2, 40),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_query_gives_what_was_counted(name: str, answers: Callable[[str], tuple[Reading, ...]]) -> None:
    found = [each for each in answers(name) if each.level in (None, 2) and each.arm in (None, "stable")]
    assert len(found) == 1, found
    value, count = EXPECTED[name]
    assert found[0].value == pytest.approx(value, rel=0.02)
    assert found[0].samples == pytest.approx(count, rel=0.05, abs=1)  # where the window begins


def test_what_is_told_apart(answers: Callable[[str], tuple[Reading, ...]]) -> None:
    shares = {each.cause: each.value for each in answers("WastedByCause")}
    assert shares[Cause.PADDING] == pytest.approx(0.4, rel=0.02)
    assert sum(shares.values()) == pytest.approx(0.8, rel=0.02)
    assert all(each.variant == "chat" and each.samples > 5000 for each in answers("WastedByCause"))
    assert answers("MisHotTask")[0].variant == "pos"
    by_level = {(each.level, each.arm): each.value for each in answers("ErrorRate")}
    assert by_level == {(2, "stable"): pytest.approx(0.1), (2, "canary"): 0.0, (3, "stable"): 1.0}


def test_the_newest_sample_is_found(answers: Callable[[str], tuple[Reading, ...]]) -> None:
    newest = answers("Freshness")
    assert len(newest) == 1
    assert newest[0].value == pytest.approx(2, abs=0.1)
    assert newest[0].samples == pytest.approx(1.5, abs=0.5)


def test_arms_side_by_side(answers: Callable[[str], tuple[Reading, ...]]) -> None:
    snapshot = Snapshot(datetime.now(UTC), {name: answers(name) for name in SIGNALS})
    stable, canary = arm_figures(snapshot, "stable", level=2), arm_figures(snapshot, "canary")
    assert (stable.requests, stable.p95_seconds) == (pytest.approx(3000, rel=0.05), pytest.approx(1.75, rel=0.02))
    assert stable.errors / stable.requests == pytest.approx(0.1)
    assert stable.differed / stable.shadowed == pytest.approx(0.1, rel=0.02)
    assert stable.divergence_nats == pytest.approx(0.04, rel=0.02)
    assert (canary.requests, canary.errors) == (pytest.approx(300, rel=0.05), 0)
    assert canary.p95_seconds is None
    assert request_cost_seconds(snapshot) == pytest.approx(0.2, rel=0.02)
    assert request_cost_seconds(snapshot, arm="canary") is None
    assert busy_share(snapshot) == pytest.approx(0.2, rel=0.02)


@pytest.mark.parametrize("signal", BUILT_IN, ids=lambda signal: signal.name)
def test_every_built_in_query_parses(signal: Signal, answers: Callable[[str], tuple[Reading, ...]]) -> None:
    assert answers(signal.name)


class Pod:
    """Metrics of a gateway, over HTTP."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        where = {"namespace": PLACE[0], "policy": PLACE[1]}
        Gauge("sixfold_level", "", list(where), registry=registry).labels(**where).set(2)
        names = [*where, "level", "arm", "outcome"]
        requests = Counter("sixfold_requests", "", names, registry=registry)
        self.ok, self.failed = (
            requests.labels(**where, level="2", arm="stable", outcome=outcome) for outcome in ("ok", "error")
        )
        self.server, self._thread = start_http_server(0, "127.0.0.1", registry)
        self.target = f"127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


SHORT_WINDOWS = "[{name: ErrorRate, window: 5s}, {name: Odd, query: 'sum(', samples: 'up', threshold: 1}]"


@pytest.fixture(scope="module")
def pod() -> Iterator[Pod]:
    made = Pod()
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, pod: Pod) -> Iterator[PrometheusServer]:
    with PrometheusServer(tmp_path_factory.mktemp("live"), [Job([pod.target])]) as running:
        yield running


@pytest.fixture
async def collector(server: PrometheusServer, tmp_path: Path) -> AsyncIterator[Collector]:
    signals = tmp_path / "signals.yaml"
    signals.write_text(SHORT_WINDOWS)
    prometheus = Prometheus(server.url, timeout_seconds=1.0)
    yield Collector(prometheus, SignalsFile(signals), lambda: [PLACE], lambda: 1.0, lambda *_: None)
    prometheus.close()


async def _until(collector: Collector, pod: Pod, wanted: Callable[[Snapshot], bool]) -> Snapshot:
    """Round after round, under traffic of which a fifth fails."""
    for _ in range(120):
        pod.ok.inc(40)
        pod.failed.inc(10)
        await collector.round()
        snapshot = collector.snapshot(*PLACE)
        assert snapshot is not None
        if wanted(snapshot):
            return snapshot
        await asyncio.sleep(0.3)
    raise AssertionError(snapshot)


def _is_judged(snapshot: Snapshot) -> bool:
    return _verdict(snapshot) is not Verdict.UNKNOWN


def _verdict(snapshot: Snapshot) -> Verdict:
    signals = [signal for signal in BUILT_IN if signal.name == "ErrorRate"]
    return observe(signals, snapshot, {}, (), 2, snapshot.at)[0].verdict


async def test_a_fault_of_prometheus_is_never_a_breach_and_ends_by_itself(
    collector: Collector, pod: Pod, server: PrometheusServer
) -> None:
    healthy = await _until(collector, pod, _is_judged)
    assert healthy.reason == "Found"
    assert _verdict(healthy) is Verdict.BREACH
    assert "parse error" in healthy.problems["Odd"]
    assert set(healthy.problems) == {"Odd"}, "one bad query stops no other"

    server.pause()
    silent = await _until(collector, pod, lambda snapshot: snapshot.reason == "PrometheusError")
    assert "in time" in silent.message
    assert _verdict(silent) is Verdict.UNKNOWN
    server.resume()
    await _until(collector, pod, _is_judged)

    server.kill()
    gone = await _until(collector, pod, lambda snapshot: snapshot.reason == "PrometheusError")
    assert "can't be reached" in gone.message
    server.start()
    await _until(collector, pod, _is_judged)

    server.scrape([])
    unwatched = await _until(collector, pod, lambda snapshot: snapshot.reason != "Found")
    assert unwatched.reason in ("Missing", "Stale")
    assert _verdict(unwatched) is Verdict.UNKNOWN
    server.scrape([Job([pod.target])])
    await _until(collector, pod, _is_judged)


async def test_the_signals_file_is_read_again_and_a_bad_one_is_told(server: PrometheusServer, tmp_path: Path) -> None:
    path = tmp_path / "signals.yaml"
    path.write_text("[{name: TTFTP95, threshold: 0.5}]")
    file = SignalsFile(path)
    for content in ("[{name: TTFTP95, threshold: 0.7}]", "[{name: TTFTP95, colour: red}]", "{", "\x00"):
        file.read()
        path.write_text(content)
    file.read()
    assert {signal.name: signal for signal in file.current}["TTFTP95"].threshold == 0.7
    assert "isn't right" in file.problem


@contextmanager
def _answering(
    status: int, body: bytes, delay_seconds: float = 0.0, certificates: Certificates | None = None
) -> Iterator[tuple[str, list[str]]]:
    """A server that answers everything alike; its address and the Authorization headers that it got."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append(self.headers.get("Authorization", ""))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            for byte in body:
                self.wfile.write(bytes([byte]))
                if delay_seconds:
                    time.sleep(delay_seconds)

        def log_message(self, *_: object) -> None:
            pass

        def handle(self) -> None:
            with suppress(OSError):
                super().handle()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if certificates is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificates.certificate, certificates.key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http{'s' if certificates else ''}://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (500, b"boom", "500"),
        (503, b"", "503"),
        (200, b"<html>login</html>", "no answer of Prometheus"),
        (200, b"", "no answer of Prometheus"),
        (200, b"[]", "no answer of Prometheus"),
        (200, b'{"status":"success"}', "no answer of Prometheus"),
        (200, b'{"data":{"result":[1796079580,"1"]}}', "than a vector"),
        (200, b'{"data":{"result":{}}}', "than a vector"),
        (401, b"who are you", "401"),
    ],
)
async def test_what_is_no_answer_of_prometheus_is_an_error_in_words(status: int, body: bytes, says: str) -> None:
    with _answering(status, body) as (url, _):
        prometheus = Prometheus(url, timeout_seconds=1.0)
        with pytest.raises(PrometheusError, match=says):
            await prometheus.ask(SIGNALS["ErrorRate"])
        prometheus.close()


async def test_a_trickling_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with _answering(200, b" " * 200, delay_seconds=0.05) as (url, _):
        prometheus = Prometheus(url, timeout_seconds=0.3)
        with pytest.raises(PrometheusError, match="in time"):
            await prometheus.ask(SIGNALS["ErrorRate"])
        prometheus.close()


async def test_the_certificate_is_checked_and_no_password_is_told(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    with _answering(200, b'{"data":{"result":[]}}', certificates=certificates) as (url, _):
        trusting = Prometheus(url, timeout_seconds=1.0, ca_file=certificates.ca)
        assert await trusting.ask(SIGNALS["ErrorRate"]) == {}
        trusting.close()
        wary = Prometheus(url.replace("://", "://user:secret@"), timeout_seconds=1.0)
        with pytest.raises(PrometheusError, match="certificate") as refused:
            await wary.ask(SIGNALS["ErrorRate"])
        wary.close()
    assert "secret" not in str(refused.value)


async def test_the_token_is_read_each_time(tmp_path: Path) -> None:
    token = tmp_path / "token"
    with _answering(200, b'{"data":{"result":[]}}') as (url, seen):
        prometheus = Prometheus(url, timeout_seconds=1.0, token_file=token)
        with pytest.raises(PrometheusError):
            await prometheus.ask(SIGNALS["ErrorRate"])
        for text in ("one\n", "two\n"):
            token.write_text(text)
            assert await prometheus.ask(SIGNALS["ErrorRate"]) == {}
        prometheus.close()
    assert seen == ["Bearer one", "Bearer two"]
