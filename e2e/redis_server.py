"""Real Redis servers for tests and benches: a single one, with Sentinel, as a cluster; with TLS; broken on purpose.

Each listens on free ports of 127.0.0.1, keeps its files in a folder that the caller owns, and dies with this process.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

POLL_SECONDS = 0.02
START_SECONDS = 15.0
LOOPBACK = "127.0.0.1"


class RedisServerError(Exception):
    """A server didn't start, or didn't do what it was asked for."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def wait_until(what: str, ready: Callable[[], bool], timeout_seconds: float = START_SECONDS) -> None:
    """Raises RedisServerError that names `what` when the time is up."""
    deadline = time.monotonic() + timeout_seconds
    while not ready():
        if time.monotonic() > deadline:
            raise RedisServerError(f"{what}: not after {timeout_seconds:.0f} s")
        time.sleep(POLL_SECONDS)


def write_directory(folder: Path, url: str, ca_file: Path | None = None) -> Path:
    """The folder that an engine reads its Redis from: `url` and, for TLS, `ca.crt`. Returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "url").write_text(url)
    if ca_file is not None:
        (folder / "ca.crt").write_bytes(ca_file.read_bytes())
    return folder


class Certificates:
    """An authority of its own and a certificate that it signed for 127.0.0.1 and localhost."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.ca, self._ca_key = folder / "ca.crt", folder / "ca.key"
        self.certificate, self.key = folder / "server.crt", folder / "server.key"
        new = ["openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        _run(*new, "-x509", "-days", "2", "-subj", "/CN=test authority", "-keyout", self._ca_key, "-out", self.ca)
        _run(
            *new, "-x509", "-days", "2", "-subj", "/CN=localhost",
            "-addext", f"subjectAltName=DNS:localhost,IP:{LOOPBACK}", "-addext", "basicConstraints=critical,CA:FALSE",
            "-CA", self.ca, "-CAkey", self._ca_key,
            "-keyout", self.key, "-out", self.certificate,
        )  # fmt: skip


class RedisServer:
    """One redis-server (or Sentinel). `with RedisServer(folder) as server: ... server.url`

    Attributes:
        port: kept over stop, kill and start.
        url: with scheme rediss where it speaks TLS; without user and password.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        certificates: Certificates | None = None,
        config: Path | None = None,
        program: str = "redis-server",
    ) -> None:
        """Starts nothing yet.

        Args:
            arguments: as on redis-server's command line: "--maxmemory", "8mb".
            certificates: it speaks TLS, and nothing else.
            config: a file that the server may rewrite; a Sentinel needs one.
            program: redis-server or redis-sentinel.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._certificates = folder, certificates
        self.port = free_port()
        self._argv = [program, *([str(config)] if config else []), *self._listening(), "--dir", str(folder), *arguments]
        if program == "redis-server":
            self._argv += ["--save", "", "--appendonly", "no", "--enable-debug-command", "yes"]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis{'s' if self._certificates else ''}://{LOOPBACK}:{self.port}/0"

    @property
    def ca_file(self) -> Path | None:
        return self._certificates.ca if self._certificates else None

    def start(self) -> Self:
        """Returns when it answers. Raises RedisServerError with the end of its log if it doesn't."""
        log = self._folder / "redis.log"
        with log.open("ab") as output:
            self._process = process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *self._argv],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

        def answers() -> bool:
            if process.poll() is not None:
                raise RedisServerError(f"redis-server ended:\n{log.read_text(errors='replace')[-2000:]}")
            try:
                return "PONG" in self.cli("PING")
            except RedisServerError as error:
                return "NOAUTH" in str(error)  # it answers, to those who have a password

        wait_until("redis-server answers", answers)
        return self

    def stop(self) -> None:
        """End it in an orderly way; no matter if it doesn't run."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once, as a node that fails does; connections break."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """SIGSTOP: connections stay, and nothing is answered."""
        self._running().send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._running().send_signal(signal.SIGCONT)

    def cli(self, *words: str, timeout_seconds: float = 10.0) -> str:
        """What redis-cli prints for a command. Raises RedisServerError where it fails or takes too long."""
        tls = ["--tls", "--cacert", str(self._certificates.ca)] if self._certificates else []
        argv = ["redis-cli", "-e", "-h", LOOPBACK, "-p", str(self.port), *tls, *words]
        return _run(*argv, timeout_seconds=timeout_seconds)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _listening(self) -> list[str]:
        words = ["--bind", LOOPBACK]
        if self._certificates is None:
            return [*words, "--port", str(self.port)]
        files = self._certificates
        return [
            *words, "--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no",
            "--tls-cert-file", str(files.certificate), "--tls-key-file", str(files.key),
            "--tls-ca-cert-file", str(files.ca),
        ]  # fmt: skip

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RedisServerError("redis-server isn't running")
        return self._process

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(how)
            self._process.wait()
            self._process = None


class SentinelSet:
    """A master, a replica and one Sentinel that exchanges them within about a second.

    Attributes:
        servers: the first is the master at the start.
    """

    SERVICE = "kv"

    def __init__(self, folder: Path) -> None:
        at_once = ("--repl-diskless-sync-delay", "0")
        master = RedisServer(folder / "first", *at_once)
        replica = RedisServer(folder / "second", *at_once, "--replicaof", LOOPBACK, str(master.port))
        self.servers = (master, replica)
        config = folder / "sentinel.conf"
        config.write_text(
            f"sentinel monitor {self.SERVICE} {LOOPBACK} {master.port} 1\n"
            f"sentinel down-after-milliseconds {self.SERVICE} 500\n"
            f"sentinel failover-timeout {self.SERVICE} 2000\n"
        )
        self._sentinel = RedisServer(folder / "sentinel", config=config, program="redis-sentinel")

    @property
    def url(self) -> str:
        return f"redis+sentinel://{LOOPBACK}:{self._sentinel.port}/{self.SERVICE}"

    def master(self) -> RedisServer:
        """The one that Sentinel calls the master now."""
        port = self._sentinel.cli("SENTINEL", "get-master-addr-by-name", self.SERVICE).split()[1]
        return next(server for server in self.servers if str(server.port) == port)

    def __enter__(self) -> Self:
        for server in self.servers:
            server.start()
        wait_until("the replica follows", lambda: "master_link_status:up" in self.servers[1].cli("INFO", "replication"))
        self._sentinel.start()  # last: it asks the master for its replicas now, and not again for ten seconds
        replicas = ("SENTINEL", "replicas", self.SERVICE)
        wait_until("Sentinel knows the replica", lambda: str(self.servers[1].port) in self._sentinel.cli(*replicas))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in (self._sentinel, *self.servers):
            server.kill()


class RedisCluster:
    """Three masters that share the slots, without replicas."""

    def __init__(self, folder: Path) -> None:
        self.servers = tuple(
            RedisServer(
                folder / f"node-{index}", "--cluster-enabled", "yes", "--cluster-port", str(free_port()),
                "--cluster-node-timeout", "1000", "--cluster-require-full-coverage", "no",
            )
            for index in range(3)
        )  # fmt: skip

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"{LOOPBACK}:{server.port}" for server in self.servers)

    def __enter__(self) -> Self:
        for server in self.servers:
            server.start()
        nodes = [f"{LOOPBACK}:{server.port}" for server in self.servers]
        _run("redis-cli", "--cluster", "create", *nodes, "--cluster-replicas", "0", "--cluster-yes", timeout_seconds=30)
        wait_until("the cluster is formed", self._is_formed)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self.servers:
            server.kill()

    def _is_formed(self) -> bool:
        return all("cluster_state:ok" in server.cli("CLUSTER", "INFO") for server in self.servers)


def _run(*argv: str | Path, timeout_seconds: float = 10.0) -> str:
    words = [str(word) for word in argv]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_seconds, check=False)
    except subprocess.TimeoutExpired:
        raise RedisServerError(f"`{' '.join(words)}` took more than {timeout_seconds:g} s") from None
    if done.returncode:
        raise RedisServerError(f"`{' '.join(words)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
