"""Tokens a second of 16 concurrent requests of mixed lengths, greedy, one thread: the engine and two peers, in turns.

transformers' `generate()` runs static batches of 8, left-padded, each as long as its longest answer; vLLM's CPU build
runs all 16 at once as it likes, in a virtual environment of its own that is made at first use. Tokens beyond what a
request asked for don't count for anybody. Measured on the example model in fp32, and on a model of width 1,024 with
random weights: in fp32, which the engine chooses where there is memory, and in bf16, which it chooses where there
isn't.
"""

from __future__ import annotations

import queue
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from peer import PeerError
from stack import REPOSITORY
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from vllm_venv import Vllm

from sixfold_api.runtime_config import ServedModel
from sixfold_api.scalars import Task
from sixfold_runtime.config import default_config
from sixfold_runtime.engine.engine import Engine
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.engine.protocol import Chunk, Done, Generate, Sampling
from sixfold_runtime.settings import RuntimeSettings

TRANSFORMERS_GOAL, VLLM_GOAL = 3.0, 1.0
REQUESTS = 16
STATIC_BATCH = 8
CONTEXT_TOKENS = 512
EXAMPLE = REPOSITORY / "examples" / "models" / "chat"
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
        return sum(self._dones.get(timeout=600).completion_tokens for _ in range(count))


class Own:
    """The engine, with all that it does for a request."""

    def __init__(self, folder: Path, available_bytes: int | None) -> None:
        """`available_bytes`: what the engine believes of this machine's memory when it chooses its compute type."""
        served = ServedModel(name="chat", task=Task.GENERATION, path=str(folder))
        config = default_config()
        self._engine = Engine([served], lambda: config, EngineMetrics(RuntimeSettings()), device="cpu")
        with ExitStack() as believing:
            if available_bytes is not None:
                believed = patch("sixfold_runtime.engine.loader.available_memory_bytes", lambda _: available_bytes)
                believing.enter_context(believed)
            self._engine.start()
            while not self._engine.is_ready:
                if error := self._engine.models["chat"].error:
                    raise SystemExit(f"the model can't be loaded: {error}")
                time.sleep(0.05)

    def rate(self, work: Workload) -> float:
        collector, started = Collector(), time.perf_counter()
        requests = [
            Generate(id=str(index), model="chat", token_ids=ids, sampling=Sampling(max_tokens=tokens, temperature=0))
            for index, (ids, tokens) in enumerate(work)
        ]
        self._engine.submit(collector, requests)
        return collector.tokens(len(work)) / (time.perf_counter() - started)

    def stop(self) -> None:
        self._engine.stop()


class Static:
    """transformers' generate()."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self._model.generation_config.stop_strings = None  # the engine's requests carry none either

    @torch.inference_mode()
    def rate(self, work: Workload) -> float:
        started, made = time.perf_counter(), 0
        for first in range(0, len(work), STATIC_BATCH):
            batch = work[first : first + STATIC_BATCH]
            width, longest = max(len(ids) for ids, _ in batch), max(tokens for _, tokens in batch)
            padding = [[0] * (width - len(ids)) for ids, _ in batch]
            output = self._model.generate(
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
        return made / (time.perf_counter() - started)


def measure(
    name: str, folder: Path, dtype: torch.dtype, pairs: int, with_vllm: bool, available_bytes: int | None = None
) -> dict[str, Any]:
    """The engine beside its peers on one model, after a few tokens that warm everybody up."""
    with ExitStack() as running:
        static = Static(folder, dtype)
        own = Own(folder, available_bytes)
        running.callback(own.stop)
        peers: dict[str, Static | Vllm] = {"transformers": static}
        missing = None
        if with_vllm:
            try:
                vllm = Vllm(folder, str(dtype).removeprefix("torch."), REQUESTS, CONTEXT_TOKENS)
                running.callback(vllm.stop)
                peers["vllm"] = vllm
            except PeerError as error:
                missing = str(error)
                print(f"without vLLM: {missing}", flush=True)
        rates: dict[str, list[float]] = {side: [] for side in ("own", *peers)}
        sides: dict[str, Own | Static | Vllm] = {"own": own, **peers}
        for runner in sides.values():
            runner.rate([(ids, 4) for ids, _ in workload(0)])
        for seed in range(pairs):
            for side, runner in sides.items():
                rates[side].append(runner.rate(workload(seed)))
            shown = ", ".join(f"{side} {of_side[-1]:.0f}" for side, of_side in rates.items())
            print(f"{name}, workload {seed}: tokens/s {shown}", flush=True)
    result: dict[str, Any] = {
        f"{side}_tokens_per_second": [round(rate, 1) for rate in of_side] for side, of_side in rates.items()
    }
    for peer, goal in (("transformers", TRANSFORMERS_GOAL), ("vllm", VLLM_GOAL)):
        if peer in rates:
            ratio = round(statistics.median(a / b for a, b in zip(rates["own"], rates[peer], strict=True)), 2)
            result[f"over_{peer}"] = {"ratio": ratio, "goal": goal, "holds": ratio >= goal}
    return result if missing is None else {**result, "without_vllm": missing}


def wide_model(folder: Path, dtype: torch.dtype) -> Path:
    """Width 1,024, random weights: for speed only."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT_TOKENS,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data[:3] = 0  # no special token ever: every answer has the length that was asked for
    model.to(dtype).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EXAMPLE / name, folder)
    return folder


def run(quick: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    example = measure("example model, fp32", EXAMPLE, torch.float32, 2 if quick else 6, with_vllm=True)
    wide: dict[str, Any] = {}
    for dtype, available_bytes in ((torch.float32, None), (torch.bfloat16, 0))[: 1 if quick else 2]:
        kind = str(dtype).removeprefix("torch.")
        with tempfile.TemporaryDirectory() as folder:
            model = wide_model(Path(folder), dtype)
            name = f"width 1,024, {kind}"
            wide[f"width_1024_{kind}"] = measure(name, model, dtype, 1 if quick else 3, not quick, available_bytes)
    return {"ratio": example["over_transformers"]["ratio"], "goal": TRANSFORMERS_GOAL, **example, **wide}
