"""Tokens a second of 16 concurrent requests of mixed lengths, greedy, one thread, the same fp32 model in one process.

Peer: transformers' `generate()` in static batches of 8, left-padded, each batch as long as its longest answer; tokens
beyond what a request asked for don't count for either side.
"""

from __future__ import annotations

import queue
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from stack import REPOSITORY
from transformers import AutoModelForCausalLM

from sixfold_api.effective import effective
from sixfold_api.policy import InferencePolicySpec
from sixfold_api.runtime_config import RuntimeConfig, ServedModel
from sixfold_api.scalars import Task
from sixfold_runtime.engine.engine import Engine
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.engine.protocol import Chunk, Done, Generate, Sampling
from sixfold_runtime.settings import RuntimeSettings

GOAL = 3.0
REQUESTS = 16
STATIC_BATCH = 8
FOLDER = REPOSITORY / "examples" / "models" / "chat"
Workload = list[tuple[list[int], int]]
"""Prompt token ids and tokens to generate."""


def workload(seed: int) -> Workload:
    """Prompts of 8 to 256 tokens and answers of 16 to 160, drawn so that short ones are frequent."""
    draw = random.Random(seed)
    return [
        (
            [draw.randrange(10, 1000) for _ in range(int(8 * 32 ** draw.random()))],
            int(16 * 10 ** draw.random()),
        )
        for _ in range(REQUESTS)
    ]


class Collector:
    """A sink that waits for the answers."""

    def __init__(self) -> None:
        self._dones: queue.Queue[Done] = queue.Queue()

    def deliver(self, chunks: Sequence[Chunk], dones: Sequence[Done]) -> None:
        for done in dones:
            self._dones.put(done)

    def tokens(self, count: int) -> int:
        """Generated tokens of `count` finished requests."""
        return sum(self._dones.get(timeout=300).completion_tokens for _ in range(count))


def own_seconds(engine: Engine, work: Workload) -> tuple[float, int]:
    collector, started = Collector(), time.perf_counter()
    requests = [
        Generate(id=str(index), model="chat", token_ids=ids, sampling=Sampling(max_tokens=tokens, temperature=0))
        for index, (ids, tokens) in enumerate(work)
    ]
    engine.submit(collector, requests)
    made = collector.tokens(len(work))
    return time.perf_counter() - started, made


@torch.inference_mode()
def peer_seconds(model: Any, work: Workload) -> tuple[float, int]:
    started, made = time.perf_counter(), 0
    for first in range(0, len(work), STATIC_BATCH):
        batch = work[first : first + STATIC_BATCH]
        width, longest = max(len(ids) for ids, _ in batch), max(tokens for _, tokens in batch)
        padding = [[0] * (width - len(ids)) for ids, _ in batch]
        output = model.generate(
            input_ids=torch.tensor([pad + ids for pad, (ids, _) in zip(padding, batch, strict=True)]),
            attention_mask=torch.tensor(
                [[0] * len(pad) + [1] * len(ids) for pad, (ids, _) in zip(padding, batch, strict=True)]
            ),
            max_new_tokens=longest,
            do_sample=False,
            pad_token_id=0,
        )
        for row, (_, tokens) in zip(output[:, width:], batch, strict=True):
            made += min(tokens, int((row != 0).sum()))
    return time.perf_counter() - started, made


def run(quick: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    settings = RuntimeSettings()
    config = RuntimeConfig(
        sequence=0,
        stable=effective(InferencePolicySpec.model_validate({"generation": {"variantRef": {"name": "x"}}})).config,
    )
    served = ServedModel(name="chat", task=Task.GENERATION, path=str(FOLDER))
    engine = Engine([served], lambda: config, EngineMetrics(settings), device="cpu")
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    model.generation_config.stop_strings = None  # the engine's requests carry none either
    engine.start()  # only now: transformers loads one model at a time
    while not engine.is_ready:
        if error := engine.models["chat"].error:
            raise SystemExit(f"the model can't be loaded: {error}")
        time.sleep(0.05)
    own, peer = [], []
    for seed in range(3 if quick else 8):
        work = workload(seed)
        seconds, tokens = own_seconds(engine, work)
        own.append(tokens / seconds)
        seconds, tokens = peer_seconds(model, work)
        peer.append(tokens / seconds)
        print(f"pair {seed}: engine {own[-1]:.0f} tokens/s, generate() {peer[-1]:.0f} tokens/s", flush=True)
    engine.stop()
    ratios = [a / b for a, b in zip(own, peer, strict=True)]
    return {
        "ratio": round(statistics.median(ratios), 2),
        "goal": GOAL,
        "own_tokens_per_second": [round(value, 1) for value in own],
        "peer_tokens_per_second": [round(value, 1) for value in peer],
    }
