"""What the sampler pipeline's design rests on: picking in line, in threads and in processes, and the way of the logits.

Each figure is the best of many short runs.
"""

from __future__ import annotations

import multiprocessing
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from stack import REPOSITORY
from tokenizers import Tokenizer

from sixfold_runtime.engine.logprobs import TokenBytes
from sixfold_runtime.engine.picker import Draft, Picker
from sixfold_runtime.engine.pipeline import InlineSampler, SamplerPipeline, Task, slot_bytes
from sixfold_runtime.engine.protocol import Generate, Sampling
from sixfold_runtime.engine.stream import OutputStream
from sixfold_runtime.modes.acceptance import Lossless

ROWS = 8
PROMPT_TOKENS = 256
RUN_STEPS = 6
SAMPLING = Sampling(max_tokens=10**9, temperature=0.8, top_p=0.9, repetition_penalty=1.1, frequency_penalty=0.3)
Array = npt.NDArray[np.float32]


def measure(logits: Array, prompts: list[list[int]], runs: int) -> dict[str, float]:
    """Milliseconds that a step takes in each arrangement.

    Args:
        logits: [rows, vocabulary].
    """
    return {
        "in_line_ms": milliseconds(in_line(logits, prompts, runs)),
        "one_thread_ms": milliseconds(in_threads(1, logits, prompts, runs)),
        "two_threads_ms": milliseconds(in_threads(2, logits, prompts, runs)),
        "one_process_ms": milliseconds(in_processes(1, logits, prompts, runs)),
        "two_processes_ms": milliseconds(in_processes(2, logits, prompts, runs)),
        **transfers(logits, runs),
    }


def seconds_of(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 3)


def least_seconds(run: Callable[[int], None], runs: int) -> float:
    """Seconds a step in the best of some runs: what else the machine does disturbs threads most of all."""
    return min(seconds_of(lambda: run(RUN_STEPS)) / RUN_STEPS for _ in range(runs))


def pickers(prompts: list[list[int]], vocabulary: int) -> list[Picker]:
    tokenizer = Tokenizer.from_file(str(REPOSITORY / "examples" / "models" / "chat" / "tokenizer.json"))
    token_bytes = TokenBytes(tokenizer)
    return [
        Picker(
            Generate("bench", "bench", prompt, SAMPLING),
            OutputStream(tokenizer, (), frozenset(), SAMPLING.max_tokens),
            vocabulary,
            Lossless(),
            token_bytes,
        )
        for prompt in prompts
    ]


def in_line(logits: Array, prompts: list[list[int]], runs: int) -> float:
    """Seconds a step in the producer's own thread."""
    of_row, tensor = pickers(prompts, logits.shape[1]), torch.from_numpy(logits)[:, None]
    sampler, tasks = InlineSampler(), [Task(picker, Draft(), 1) for picker in of_row]

    def run(count: int) -> None:
        for _ in range(count):
            sampler.submit(tensor, tasks).result()

    return least_seconds(run, runs)


def in_threads(workers: int, logits: Array, prompts: list[list[int]], runs: int) -> float:
    """Seconds a step of the sampler pipeline, two steps under way."""
    vocabulary = logits.shape[1]
    tensor = torch.from_numpy(logits)[:, None]
    lanes = [[Task(picker, Draft(), 1) for picker in pickers(prompts, vocabulary)] for _ in range(2)]
    needed = slot_bytes(ROWS, 0, vocabulary)
    pipeline = SamplerPipeline(
        torch.device("cpu"), workers=workers, needed_bytes=needed, buffer_bytes=None, waited=lambda _: None
    )

    def run(count: int) -> None:
        flights = [pipeline.submit(tensor, lane) for lane in lanes]
        for step in range(count - 2):
            flights[step % 2].result()
            flights[step % 2] = pipeline.submit(tensor, lanes[step % 2])
        for flight in flights:
            flight.result()

    try:
        return least_seconds(run, runs)
    finally:
        pipeline.close()


_in_process: dict[str, Any] = {}
"""What a sampler process holds."""


def _start_process(name: str, shape: tuple[int, int], prompts: list[list[int]]) -> None:
    memory = SharedMemory(name)
    _in_process["memory"] = memory
    _in_process["logits"] = np.ndarray(shape, dtype=np.float32, buffer=memory.buf)
    _in_process["pickers"] = pickers(prompts, shape[1])


def _pick_in_process(row: int) -> tuple[tuple[int, ...], str]:
    picked = _in_process["pickers"][row].pick(_in_process["logits"][row][None], Draft())
    return picked.tokens, picked.text


def in_processes(workers: int, logits: Array, prompts: list[list[int]], runs: int) -> float:
    """Seconds a step with sampler processes over shared memory; favours them: no drafts or log-probabilities pass."""
    memory = SharedMemory(create=True, size=logits.nbytes)
    try:
        with ProcessPoolExecutor(
            workers,
            multiprocessing.get_context("spawn"),
            _start_process,
            (memory.name, logits.shape, prompts),
        ) as pool:

            def run(count: int) -> None:
                for _ in range(count):
                    memory.buf[: logits.nbytes] = memoryview(logits).cast("B")
                    list(pool.map(_pick_in_process, range(ROWS)))

            return least_seconds(run, runs)
    finally:
        memory.close()
        memory.unlink()


@contextmanager
def receiver(size_bytes: int) -> Iterator[socket.socket]:
    """A TCP connection to a thread that reads `size_bytes` into a buffer and answers each with a byte."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            buffer = memoryview(bytearray(size_bytes))
            with connection:
                while True:
                    read = 0
                    while read < size_bytes:
                        count = connection.recv_into(buffer[read:])
                        if not count:
                            return
                        read += count
                    connection.sendall(b"1")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with socket.create_connection(server.getsockname()) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield connection
        thread.join()


def transfers(logits: Array, steps: int) -> dict[str, float]:
    """Milliseconds that a step's logits take to the sampler: into the shared buffer, and through a socket."""
    source, slot = torch.from_numpy(logits), torch.empty(logits.shape)
    copying = [seconds_of(lambda: slot.copy_(source)) for _ in range(steps)]
    with receiver(logits.nbytes) as connection:

        def send() -> None:
            connection.sendall(memoryview(logits).cast("B"))
            connection.recv(1)

        sending = [seconds_of(send) for _ in range(steps)]
    return {
        "bytes": logits.nbytes,
        "shared_buffer_ms": milliseconds(min(copying)),
        "loopback_tcp_ms": milliseconds(min(sending)),
        "wire_ms_at_10_gbit": milliseconds(logits.nbytes * 8 / 10e9),
    }
