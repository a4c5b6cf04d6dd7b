"""Processes that outlive the command that started them, found again by id and start time."""

import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from console import HarnessError

POLL_SECONDS = 0.05
LOG_TAIL_LINES = 25


def _start_ticks(pid: int) -> str | None:
    """The kernel's start time of a running process, None if there is none (or only its zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def run(*argv: str | Path, stdin: str | None = None, env: Mapping[str, str] | None = None) -> str:
    """Run a command to its end and return its standard output.

    Raises HarnessError with the command and its standard error if it fails.
    """
    done = subprocess.run(
        [str(part) for part in argv], input=stdin, text=True, capture_output=True, env=env, check=False
    )
    if done.returncode:
        shown = " ".join(str(part) for part in argv)
        raise HarnessError(f"`{shown}` failed ({done.returncode}):\n{done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


@contextmanager
def exclusive(lock_file: Path) -> Iterator[None]:
    """Let one process at a time do this; the others wait. The lock falls with its process."""
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    with lock_file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def wait_until(what: str, ready: Callable[[], bool], timeout_seconds: float) -> None:
    """Poll `ready` until it holds; HarnessError names `what` when the time is up."""
    deadline = time.monotonic() + timeout_seconds
    while not ready():
        if time.monotonic() > deadline:
            raise HarnessError(f"{what}: not after {timeout_seconds:.0f} s")
        time.sleep(POLL_SECONDS)


class Daemon:
    """A background process with its pid file and log in `folder`.

    The pid file holds the start time too, so that a number that the kernel gave to another process since
    is never signalled.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._pid_file = folder / f"{name}.pid"
        self._child: subprocess.Popen[bytes] | None = None

    def start(
        self, argv: Sequence[str | Path], env: Mapping[str, str] | None = None, die_with_parent: bool = False
    ) -> None:
        """Start in a session of its own; a process that is already running is left as it is."""
        if self.running():
            return
        command = [str(part) for part in argv]
        if die_with_parent:
            command = ["setpriv", "--pdeathsig", "KILL", *command]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
            )
        self._pid_file.write_text(f"{self._child.pid} {_start_ticks(self._child.pid)}")

    def pid(self) -> int | None:
        """The process id while the process runs, else None."""
        try:
            pid, ticks = self._pid_file.read_text().split()
        except (OSError, ValueError):
            return None
        return int(pid) if _start_ticks(int(pid)) == ticks else None

    def running(self) -> bool:
        """Whether the process that was started here still runs."""
        return self.pid() is not None

    def wait_ready(self, ready: Callable[[], bool], timeout_seconds: float) -> None:
        """Wait for `ready`; a process that ends or takes too long raises HarnessError with its last lines."""

        def ready_or_dead() -> bool:
            return not self.running() or ready()

        try:
            wait_until(f"{self.name} is ready", ready_or_dead, timeout_seconds)
        except HarnessError as late:
            raise HarnessError(f"{late}; the end of {self.log}:\n{self._tail()}") from None
        if not self.running():
            raise HarnessError(f"{self.name} ended; the end of {self.log}:\n{self._tail()}")

    def stop(self, timeout_seconds: float = 20.0) -> None:
        """Ask the process to end, insist after `timeout_seconds`, and forget it."""
        pid = self.pid()
        if pid is not None:
            os.kill(pid, signal.SIGTERM)
            try:
                wait_until(self.name, lambda: not self.running(), timeout_seconds)
            except HarnessError:
                os.kill(pid, signal.SIGKILL)
                wait_until(f"{self.name} ends", lambda: not self.running(), timeout_seconds)
        if self._child is not None:
            self._child.wait()
            self._child = None
        self._pid_file.unlink(missing_ok=True)

    def _tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
