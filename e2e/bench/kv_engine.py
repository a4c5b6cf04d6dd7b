"""An engine process of its own, which answers JSON lines (see `peer.py`): prompts, and what became of them.

kv_engine.py REDIS_DIRECTORY MEMORY_BYTES MIN_PROMPT_TOKENS     (with "-" for: nothing is reused, and: as measured)
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "cluster")]
from served_pair import MODELS, Collector

from sixfold_api.kv_reuse import KVStore
from sixfold_api.runtime_config import KVReuseConfig, RuntimeConfig, ServedModel
from sixfold_api.scalars import Task
from sixfold_runtime.config import default_config
from sixfold_runtime.engine.engine import Engine
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.engine.protocol import Generate, Sampling
from sixfold_runtime.settings import RuntimeSettings

_OFF = "-"
_POLL_SECONDS = 0.01
_WARM_UP_TOKENS = (40, 300, 40, 300)
_SETTLE_SECONDS = 30.0


class Answer(Collector):
    """A sink that also keeps the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.token_ids: list[int] = []
        self.first_cpu_seconds = 0.0
        """Of the process, when the first token came."""

    def deliver(self, chunks: Any, dones: Any) -> None:
        if chunks and not self.first_cpu_seconds:
            self.first_cpu_seconds = time.process_time()
        self.text += "".join(chunk.text for chunk in chunks)
        self.token_ids += [token.token_id for chunk in chunks for token in chunk.logprobs]
        super().deliver(chunks, dones)


def reuse_config(memory_bytes: int, min_prompt_tokens: int | None) -> KVReuseConfig:
    return KVReuseConfig(
        store=KVStore.REDIS,
        ttl_seconds=3600.0,
        max_bytes=4 << 30,
        memory_bytes=memory_bytes,
        block_tokens=32,
        min_prompt_tokens=min_prompt_tokens,
    )


class Process:
    """The engine, its model loaded and Redis reached."""

    def __init__(self, redis_directory: str, memory_bytes: str, min_prompt_tokens: str) -> None:
        reuses = redis_directory != _OFF
        base = default_config()
        kv_reuse = None
        if reuses:
            kv_reuse = reuse_config(int(memory_bytes), None if min_prompt_tokens == _OFF else int(min_prompt_tokens))
        config: RuntimeConfig = base.model_copy(
            update={"stable": base.stable.model_copy(update={"kv_reuse": kv_reuse})}
        )
        self._metrics = EngineMetrics(RuntimeSettings())
        served = ServedModel(name="chat", task=Task.GENERATION, path=str(MODELS / "chat"))
        self._engine = Engine(
            [served],
            lambda: config,
            self._metrics,
            device="cpu",
            redis_directory=Path(redis_directory) if reuses else None,
        )
        self._engine.start()
        while not (self._engine.is_ready and (not reuses or self._reuses_redis())):
            time.sleep(_POLL_SECONDS)
        for number, tokens in enumerate(_WARM_UP_TOKENS):
            self.ask({"token_ids": [5 + number] * tokens, "max_tokens": 4, "kv_reuse": False})

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Answer a prompt; back when what is kept of it is written."""
        sampling = Sampling(
            question["max_tokens"],
            temperature=question.get("temperature", 0.0),
            seed=0,
            stop=tuple(question.get("stop", ())),
            logprobs=0,  # they come with the tokens
        )
        request = Generate("1", "chat", question["token_ids"], sampling, kv_reuse=question.get("kv_reuse", True))
        answer, cpu_started, started = Answer(), time.process_time(), time.perf_counter()
        self._engine.submit(answer, [request])
        done = answer.wait(1)[0]
        assert answer.first_seconds is not None
        self._settle()
        return {
            "first_seconds": answer.first_seconds - started,
            "first_cpu_seconds": answer.first_cpu_seconds - cpu_started,
            "text": answer.text,
            "answer": answer.token_ids,
            "cached_tokens": done.cached_tokens,
            "lookup_seconds": self._value("sixfold_kv_seconds_sum", operation="lookup"),
            "least_tokens": self._value("sixfold_kv_least_tokens"),
            "faults": self._value("sixfold_kv_faults_total"),
            "skipped_blocks": self._value("sixfold_kv_blocks_total", result="skipped"),
        }

    def _settle(self) -> None:
        shelf, passed = self._engine.shelf, threading.Event()
        assert shelf is not None
        self._engine.call(passed.set)  # behind the step in which the answer ended
        passed.wait()
        if not shelf.store.settle(_SETTLE_SECONDS):
            raise SystemExit(f"blocks aren't written after {_SETTLE_SECONDS:.0f} s: {shelf.store.problem}")

    def _reuses_redis(self) -> bool:
        return self._engine.models["chat"].kv_block_tokens > 0 and self._value("sixfold_kv_redis_up") == 1

    def _value(self, name: str, **labels: str) -> float:
        samples = [sample for family in self._metrics.registry.collect() for sample in family.samples]
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())


def main() -> None:
    torch.set_num_threads(1)
    process = Process(*sys.argv[1:])
    print("{}", flush=True)
    for line in sys.stdin:
        print(json.dumps(process.ask(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
