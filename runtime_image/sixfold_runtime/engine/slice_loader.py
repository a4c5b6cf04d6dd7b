"""Reads headers of task slices, maps their files and warms their pages: here, or in a thread of its own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch

from sixfold_api.runtime_config import SubgraphsConfig
from sixfold_api.scalars import Task
from sixfold_runtime.engine.checkpoint import TensorStore
from sixfold_runtime.engine.device import set_threads
from sixfold_runtime.engine.errors import ModelLoadError
from sixfold_runtime.engine.fingerprint import trunk_fingerprint
from sixfold_runtime.engine.slice_file import SliceInfo, slice_info, slice_path
from sixfold_runtime.engine.task_slice import SliceHost, TaskSlice, check_trunk, load_slice

_CLOSE_SECONDS = 0.2


class Host(SliceHost, Protocol):
    """What slices are put on, and where it computes."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...


@dataclass(frozen=True)
class TrunkFolder:
    """Whose slices they are."""

    path: Path
    """Of the model folder with the weights that they were made for, which need not be those that answer."""
    task: Task
    """That the model is served for."""

    @cached_property
    def fingerprint(self) -> str:
        """Of the weights. Raises ModelLoadError: they can't be read."""
        return trunk_fingerprint(TensorStore(self.path))


@dataclass(frozen=True)
class Scan:
    """Read the headers of what a configuration offers."""

    section: SubgraphsConfig | None


@dataclass(frozen=True)
class Load:
    task: str


@dataclass(frozen=True)
class Remind:
    """Wake after so long; only the last one counts."""

    seconds: float


@dataclass(frozen=True)
class Scanned:
    section: SubgraphsConfig | None
    headers: dict[str, SliceInfo | str]
    """A text where one can't be read: why."""


@dataclass(frozen=True)
class Loaded:
    task: str
    slice: TaskSlice | None
    problem: str
    """Why there is none."""
    seconds: float


class Reminded:
    """The time that was asked for has come."""


Result = Scanned | Loaded | Reminded
Job = Scan | Load | Remind | TaskSlice
"""A TaskSlice is let go of: unmapping a large file takes a while."""


class SliceLoader:
    """For one trunk. The thread starts with the first job."""

    def __init__(
        self,
        folder: TrunkFolder,
        host: Host,
        name: str,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            name: of the model, for the thread's.
            wake: called in the thread when there is a result to take.
        """
        self._folder, self._host, self._name = folder, host, name
        self._wake, self._clock = wake, clock
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, job: Job) -> None:
        """Do it in the thread, after what was asked for before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"slices-{self._name}", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def take_results(self) -> Iterator[Result]:
        """Those that are there; never waits."""
        while not self._results.empty():
            yield self._results.get()

    def close(self) -> None:
        """End the thread, without waiting for a load."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(_CLOSE_SECONDS)

    def scan(self, section: SubgraphsConfig | None) -> Scanned:
        """Read the headers of the tasks' files."""
        tasks = section.tasks if section is not None else ()
        return Scanned(section, {task.name: self._header(task.name) for task in tasks})

    def load(self, task: str) -> Loaded:
        """Load one slice."""
        try:
            fingerprint, started = self._folder.fingerprint, self._clock()
            path = slice_path(self._folder.path, task)
            loaded = load_slice(path, self._host, fingerprint, self._host.dtype, self._host.device)
        except Exception as error:  # whatever a foreign file raises: the other tasks are served
            return Loaded(task, None, _described(error), 0.0)
        if problem := self._wrong_kind(loaded.task):
            return Loaded(task, None, problem, 0.0)
        return Loaded(task, loaded, "", self._clock() - started)

    def _header(self, task: str) -> SliceInfo | str:
        path = slice_path(self._folder.path, task)
        try:
            info = slice_info(path)
            check_trunk(path, info, self._folder.fingerprint)
        except Exception as error:
            return _described(error)
        return self._wrong_kind(info.task) or info

    def _wrong_kind(self, task: Task) -> str:
        if (task is Task.GENERATION) == (self._folder.task is Task.GENERATION):
            return ""
        return f"the slice is for {task}, and the model for {self._folder.task}"

    def _work(self) -> None:
        set_threads()
        remind_seconds: float | None = None
        while True:
            try:
                timeout = None if remind_seconds is None else max(0.0, remind_seconds - self._clock())
                job = self._jobs.get(timeout=timeout)
            except queue.Empty:
                remind_seconds = None
                self._finish(Reminded())
                continue
            if job is None:
                return
            if isinstance(job, Remind):
                remind_seconds = self._clock() + job.seconds
            elif isinstance(job, Scan):
                self._finish(self.scan(job.section))
            elif isinstance(job, Load):
                self._finish(self.load(job.task))
            del job  # or a slice that was let go of stays in memory until the next job

    def _finish(self, result: Result) -> None:
        self._results.put(result)
        self._wake()


def slice_bytes(folder: TrunkFolder, section: SubgraphsConfig | None) -> int:
    """Memory that the slices which a configuration offers may take; those that can't be read take none."""
    if section is None:
        return 0
    total = 0
    for task in section.tasks:
        with suppress(ModelLoadError):
            total += slice_info(slice_path(folder.path, task.name)).size_bytes
    is_bounded = section.on_demand and section.cache_bytes is not None
    return min(total, section.cache_bytes or 0) if is_bounded else total


def _described(error: Exception) -> str:
    return str(error) if isinstance(error, ModelLoadError) else f"{type(error).__name__}: {error}"
