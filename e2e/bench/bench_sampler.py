"""Sampling a batch of 8: the engine's sampler over transformers' logits processors. One thread, alternating pairs.

Each step draws a token for every row by temperature, top-p 0.9, repetition and frequency penalty. The peer is what
`generate()` does with the same settings: its processors, softmax and multinomial; transformers has no frequency
penalty, so one in the style of its processors stands in.

Logits as a language model's are: probabilities fall with a power of the rank, the power differing by row from open
positions to decided ones. `flat` is the hard case for a sampler that avoids sorting: most of the vocabulary is in the
nucleus. The ratio that counts is the worse vocabulary's on realistic logits.

Printed besides, since the design rests on them: picking in one thread, two threads and two processes, and what the
way of a step's logits to the sampler costs through the shared buffer and through a TCP socket.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import numpy.typing as npt
import torch
from stack import REPOSITORY
from tokenizers import Tokenizer
from transformers import (
    LogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from sixfold_runtime.engine.logprobs import TokenBytes
from sixfold_runtime.engine.picker import Draft, Picker
from sixfold_runtime.engine.pipeline import SamplerPipeline, Task, slot_bytes
from sixfold_runtime.engine.protocol import Generate, Sampling
from sixfold_runtime.engine.sampler import Sampler, is_finite
from sixfold_runtime.engine.stream import OutputStream
from sixfold_runtime.modes.acceptance import Lossless

GOAL = 4.2
ROWS = 8
VOCABULARIES = (32_000, 151_936)
PROMPT_TOKENS = 256
REPEATS = 5
SAMPLING = Sampling(max_tokens=10**9, temperature=0.8, top_p=0.9, repetition_penalty=1.1, frequency_penalty=0.3)
POWERS = (1.1, 1.3, 1.5, 1.8, 2.0, 2.5, 3.0, 4.0)
"""Of the realistic rows."""
Array = npt.NDArray[np.float32]


def realistic(random: np.random.Generator, vocabulary: int) -> Array:
    ranks = np.log(np.arange(1, vocabulary + 1))
    rows = [random.permutation(12 - power * ranks + random.standard_normal(vocabulary) * 0.3) for power in POWERS]
    return np.array(rows, dtype=np.float32)


def flat(random: np.random.Generator, vocabulary: int) -> Array:
    return (random.standard_normal((ROWS, vocabulary)) * 0.5).astype(np.float32)


class FrequencyPenaltyLogitsProcessor(LogitsProcessor):
    """OpenAI's frequency penalty as transformers would write it."""

    def __init__(self, penalty: float, prompt_tokens: int) -> None:
        self._penalty = penalty
        self._prompt_tokens = prompt_tokens

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        answer = input_ids[:, self._prompt_tokens :]
        counts = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - self._penalty * counts


class Peer:
    """The sampling of transformers' generate()."""

    def __init__(self, prompts: list[list[int]]) -> None:
        self._input_ids = torch.tensor(prompts)
        self._processors = [
            RepetitionPenaltyLogitsProcessor(SAMPLING.repetition_penalty),
            FrequencyPenaltyLogitsProcessor(SAMPLING.frequency_penalty, PROMPT_TOKENS),
            TemperatureLogitsWarper(SAMPLING.temperature),
            TopPLogitsWarper(SAMPLING.top_p),
        ]

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        scores = logits
        for processor in self._processors:
            scores = processor(self._input_ids, scores)
        return torch.softmax(scores, dim=-1)

    def step(self, logits: torch.Tensor) -> None:
        tokens = torch.multinomial(self.probabilities(logits), num_samples=1)
        self._input_ids = torch.cat((self._input_ids, tokens), dim=-1)


class Ours:
    def __init__(self, prompts: list[list[int]]) -> None:
        self.samplers = [Sampler(SAMPLING, prompt) for prompt in prompts]

    def step(self, logits: Array) -> None:
        for sampler, row in zip(self.samplers, logits, strict=True):
            assert is_finite(row)
            sampler.observe(sampler.draw(row))


def seconds_of(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def least_seconds(run: Callable[[int], None], steps: int) -> float:
    """Seconds a step in the best of some runs: what else the machine does disturbs threads most of all."""
    run(4)
    return min(seconds_of(lambda: run(steps)) / steps for _ in range(REPEATS))


def compare(make: Callable[[np.random.Generator, int], Array], vocabulary: int, pairs: int) -> dict[str, Any]:
    """Both samplers over the same logits and prompts, step by step in turns."""
    random = np.random.Generator(np.random.PCG64(vocabulary))
    prompts = random.integers(0, vocabulary, (ROWS, PROMPT_TOKENS)).tolist()
    logits = make(random, vocabulary)
    tensor, ours, peer = torch.from_numpy(logits), Ours(prompts), Peer(prompts)
    nuclei = _same_distributions(ours, peer, logits)
    ours.step(logits), peer.step(tensor)
    times = [(seconds_of(lambda: ours.step(logits)), seconds_of(lambda: peer.step(tensor))) for _ in range(pairs)]
    return {
        "ratio": round(statistics.median(theirs / mine for mine, theirs in times), 2),
        "ms": round(1000 * statistics.median(mine for mine, _ in times), 3),
        "transformers_ms": round(1000 * statistics.median(theirs for _, theirs in times), 3),
        "nucleus_tokens": nuclei,
    }


def _same_distributions(ours: Ours, peer: Peer, logits: Array) -> list[int]:
    """The tokens in each row's nucleus; both sides must agree on the probabilities."""
    expected = peer.probabilities(torch.from_numpy(logits)).numpy()
    sizes = []
    for sampler, row, theirs in zip(ours.samplers, logits, expected, strict=True):
        distribution = sampler.distribution(row)
        dense = np.zeros(len(row))
        dense[distribution.ids] = distribution.probabilities
        # Running sums of float32 let the peer's nucleus end a few tokens off in a flat distribution.
        assert np.abs(dense - theirs).sum() < 0.01, "not the same distribution"
        sizes.append(len(distribution.ids))
    return sizes


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


def in_threads(workers: int, logits: Array, prompts: list[list[int]], steps: int) -> float:
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
        return least_seconds(run, steps)
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


def in_processes(workers: int, logits: Array, prompts: list[list[int]], steps: int) -> float:
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

            return least_seconds(run, steps)
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
        "shared_buffer_ms": round(1000 * statistics.median(copying), 3),
        "loopback_tcp_ms": round(1000 * statistics.median(sending), 3),
        "wire_ms_at_10_gbit": round(logits.nbytes * 8 / 10e9 * 1000, 3),
    }


def run(quick: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    pairs = 20 if quick else 100
    compared: dict[str, Any] = {}
    for vocabulary in VOCABULARIES:
        for make in (realistic, flat):
            result = compared[f"{make.__name__}_{vocabulary}"] = compare(make, vocabulary, pairs)
            print(f"batch {ROWS}, vocabulary {vocabulary}, {make.__name__}: {result}", flush=True)
    beside: dict[str, Any] = {}
    for vocabulary in VOCABULARIES:
        random = np.random.Generator(np.random.PCG64(1))
        prompts = random.integers(0, vocabulary, (ROWS, PROMPT_TOKENS)).tolist()
        logits = realistic(random, vocabulary)
        beside[str(vocabulary)] = figures = {
            "one_thread_ms": round(1000 * in_threads(1, logits, prompts, pairs), 3),
            "two_threads_ms": round(1000 * in_threads(2, logits, prompts, pairs), 3),
            "two_processes_ms": round(1000 * in_processes(2, logits, prompts, pairs), 3),
            **transfers(logits, pairs),
        }
        print(f"picking beside the producer, vocabulary {vocabulary}: {figures}", flush=True)
    return {
        "ratio": min(compared[f"realistic_{vocabulary}"]["ratio"] for vocabulary in VOCABULARIES),
        "goal": GOAL,
        "compared": compared,
        "beside_the_producer": beside,
    }
