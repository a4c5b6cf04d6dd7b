"""Where picks run: at once in the engine's thread, or in sampler threads beside it (the sampler pipeline).

The pipeline sets the producer of logits and the sampler apart: the engine's thread copies a step's logits into one of
two slots of a shared buffer and goes on with the other half of its sequences, while workers draw tokens, detokenise
and look for stops. Only what they report lets the producer compute another step for a sequence.

Why threads: a pick is a few passes of NumPy over the vocabulary, and NumPy lets go of the interpreter's lock in them,
so that picks overlap each other and the producer. Processes would put a pickle and a pipe on both ways of every row.
Why on the same machine: a step of 8 rows over a vocabulary of 152k is 4.9 MB, sampled in 3 ms. Copying it into the
buffer takes 0.4 ms; a TCP socket takes 1.2 ms or more on the loopback device, and 3.9 ms at 10 Gbit/s is longer than
sampling it. `make bench B=sampler` measures all of these: 8 rows of a vocabulary of 32k took 0.9 ms in line, 1.5 ms in
one thread and 3.0 ms in one process beside.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from sixfold_runtime.engine.picker import Draft, Picked, Picker

log = logging.getLogger(__name__)

SLOTS = 2
_ITEM_BYTES = 4
"""Of a float32."""


def slot_bytes(rows: int, draft_tokens: int, vocabulary_tokens: int) -> int:
    """What a slot needs for the largest step: every row of a full batch with the longest draft and one more token."""
    return rows * (draft_tokens + 1) * vocabulary_tokens * _ITEM_BYTES


@dataclass(frozen=True)
class Task:
    """A row of a step's logits, and who picks from it."""

    picker: Picker
    draft: Draft
    positions: int
    """Logits used of the row: drafted tokens + 1."""


class Picks(Protocol):
    """The results of a submitted step."""

    def result(self) -> list[Picked]:
        """One for each task, in order; waits for the last of them."""


class LogitsSampler(Protocol):
    """Takes a step's logits and picks from them."""

    def submit(self, logits: torch.Tensor, tasks: Sequence[Task]) -> Picks:
        """Start picking.

        Args:
            logits: float32 [rows, positions, vocabulary]; row i belongs to tasks[i]. On a GPU it may still be read
                when this returns: the caller may drop it, and doesn't write to it.
        """

    def close(self) -> None:
        """Finish what was submitted, and take nothing more."""


def pick(task: Task, logits: npt.NDArray[np.float32]) -> Picked:
    """One task's pick; whatever it raises fails its request and no other.

    Args:
        logits: [positions or more, vocabulary].
    """
    try:
        return task.picker.pick(logits[: task.positions], task.draft)
    except Exception:
        log.exception("the sampler failed on a request")
        return Picked(faulty=True)


@dataclass(frozen=True)
class _Done:
    picked: list[Picked]

    def result(self) -> list[Picked]:
        return self.picked


class InlineSampler:
    """Picks in the calling thread."""

    def submit(self, logits: torch.Tensor, tasks: Sequence[Task]) -> Picks:
        """See LogitsSampler."""
        rows = logits.detach().cpu().numpy()
        return _Done([pick(task, row) for task, row in zip(tasks, rows, strict=True)])

    def close(self) -> None:
        """Nothing is held."""


class _Step:
    """A submitted step whose rows are picked one by one, in any order, by any worker."""

    def __init__(self, slot: _Slot, tasks: Sequence[Task], free: Callable[[_Slot], None]) -> None:
        self.slot = slot
        self.tasks = tasks
        self._free = free
        self._picked: list[Picked] = [Picked()] * len(tasks)
        self._missing = len(tasks)
        self._lock = threading.Lock()
        self._complete = threading.Event()

    def put(self, row: int, picked: Picked) -> None:
        with self._lock:
            self._picked[row] = picked
            self._missing -= 1
            last = self._missing == 0
        if last:
            self._free(self.slot)
            self._complete.set()

    def result(self) -> list[Picked]:
        self._complete.wait()
        return self._picked


class _Slot:
    """Room for one step's logits in host memory, pinned where a GPU copies into it."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._room = torch.empty(size_bytes // _ITEM_BYTES, dtype=torch.float32, pin_memory=is_cuda)
        self._held = self._room[:0]
        self._copied = torch.cuda.Event(blocking=True) if is_cuda else None  # type: ignore[no-untyped-call]

    def fill(self, logits: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        """Copy logits; on a GPU this only enqueues the copy, on a stream beside that of the model.

        Raises:
            ValueError: they don't fit.
        """
        if logits.numel() > len(self._room):
            raise ValueError(
                f"logits of {tuple(logits.shape)} need {logits.numel() * _ITEM_BYTES} bytes, "
                f"a slot has {len(self._room) * _ITEM_BYTES}"
            )
        self._held = self._room[: logits.numel()].view(logits.shape)
        if stream is None or self._copied is None:
            self._held.copy_(logits)
            return
        stream.wait_stream(torch.cuda.current_stream(logits.device))
        with torch.cuda.stream(stream):
            self._held.copy_(logits, non_blocking=True)
            self._copied.record(stream)
        logits.record_stream(stream)  # so that its memory isn't given to others before it is copied

    def row(self, row: int) -> npt.NDArray[np.float32]:
        """Logits [positions, vocabulary], once they have arrived."""
        if self._copied is not None:
            self._copied.synchronize()
        rows: npt.NDArray[np.float32] = self._held[row].numpy()
        return rows


class SamplerPipeline:
    """Picks in worker threads, over a double buffer. Submitted to, resized and closed from one thread.

    `submit` waits while both slots are taken: that is the back pressure on the producer.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        workers: int,
        needed_bytes: int,
        buffer_bytes: int | None,
        waited: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            needed_bytes: of the logits of the largest step: see slot_bytes.
            buffer_bytes: size of a slot; None is what is needed.
            waited: told for each step how many seconds it waited for a slot.

        Raises:
            ValueError: the buffer is too small, or there are no workers.
        """
        if buffer_bytes is not None and buffer_bytes < needed_bytes:
            raise ValueError(
                f"samplerPipeline.bufferSize is {buffer_bytes} bytes, and the logits of the largest step take "
                f"{needed_bytes} (batch x (draft tokens + 1) x vocabulary x {_ITEM_BYTES}): "
                "raise it, or leave it out for what is needed"
            )
        self._waited = waited
        self._clock = clock
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._free: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        for _ in range(SLOTS):
            self._free.put(_Slot(buffer_bytes or needed_bytes, device))
        self._work: queue.SimpleQueue[tuple[_Step, int] | None] = queue.SimpleQueue()
        """Rows to pick; None ends one worker, once all that was submitted before is taken."""
        self._threads: list[threading.Thread] = []
        self._workers = 0
        self.resize(workers)

    def submit(self, logits: torch.Tensor, tasks: Sequence[Task]) -> Picks:
        """See LogitsSampler.

        Raises:
            ValueError: the logits don't fit into a slot, or rows and tasks differ in number.
            RuntimeError: the pipeline is closed.
        """
        if not self._workers:
            raise RuntimeError("the sampler pipeline is closed")
        if len(logits) != len(tasks):
            raise ValueError(f"{len(logits)} rows of logits for {len(tasks)} tasks")
        if not tasks:
            return _Done([])
        started = self._clock()
        slot = self._free.get()
        self._waited(self._clock() - started)
        try:
            slot.fill(logits.detach(), self._stream)
        except BaseException:
            self._free.put(slot)
            raise
        step = _Step(slot, tasks, self._free.put)
        for row in range(len(tasks)):
            self._work.put((step, row))
        return step

    def resize(self, workers: int) -> None:
        """Change the number of workers; those that are too many end after the rows submitted so far."""
        if workers < 1:
            raise ValueError(f"a sampler pipeline with {workers} workers picks nothing: at least 1 is needed")
        self._scale(workers)

    def close(self) -> None:
        """Finish what was submitted, and take nothing more."""
        self._scale(0)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _scale(self, workers: int) -> None:
        for _ in range(self._workers - workers):
            self._work.put(None)
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        for number in range(self._workers, workers):
            thread = threading.Thread(target=self._run, name=f"sampler-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)
        self._workers = workers

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            step, row = work
            try:
                logits = step.slot.row(row)
            except Exception:  # CUDA reports a fault of the model where its results are awaited
                log.exception("logits of a step didn't arrive")
                step.put(row, Picked(faulty=True))
                continue
            step.put(row, pick(step.tasks[row], logits))
