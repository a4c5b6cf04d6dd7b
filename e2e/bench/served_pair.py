"""An engine with the example pair, in this process, and what an answer took it."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stack import REPOSITORY

from sixfold_api.generation import DraftLength, SpeculativeSpec
from sixfold_api.runtime_config import Draft, RuntimeConfig, ServedModel, SpeculativeConfig
from sixfold_api.scalars import Task
from sixfold_runtime.config import default_config
from sixfold_runtime.engine.engine import Engine
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.engine.protocol import Chunk, Done, Generate, Sampling
from sixfold_runtime.settings import RuntimeSettings

MODELS = REPOSITORY / "examples" / "models"
ANSWER_TOKENS = 96
DEFAULT_TOKENS = SpeculativeSpec.model_fields["num_tokens"].default
MOST_TOKENS = 8
STRATEGIES = {
    "CostModel": (DraftLength.COST_MODEL, MOST_TOKENS),
    f"CostModel, {DEFAULT_TOKENS}": (DraftLength.COST_MODEL, DEFAULT_TOKENS),
    "StepDown": (DraftLength.STEP_DOWN, MOST_TOKENS),
    **{f"Fixed {tokens}": (DraftLength.FIXED, tokens) for tokens in (3, 5, 8)},
}


def _config(length: DraftLength, tokens: int) -> RuntimeConfig:
    config = default_config(2)
    speculative = SpeculativeConfig(num_tokens=tokens, length=length)
    return config.model_copy(update={"stable": config.stable.model_copy(update={"speculative": speculative})})


@dataclass(frozen=True)
class Run:
    """Requests that were answered together."""

    tokens: int
    seconds: float
    decode_seconds: float
    """From the first token on."""
    steps: int
    """Of the target after the first token."""
    drafted: int
    accepted: int
    draft_seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Collector:
    """A sink that waits for the answers."""

    def __init__(self) -> None:
        self._dones: queue.Queue[Done] = queue.Queue()
        self.first_seconds: float | None = None

    def deliver(self, chunks: Sequence[Chunk], dones: Sequence[Done]) -> None:
        if chunks and self.first_seconds is None:
            self.first_seconds = time.perf_counter()
        for done in dones:
            self._dones.put(done)

    def wait(self, count: int) -> list[Done]:
        dones = [self._dones.get(timeout=300) for _ in range(count)]
        if failed := [done.failure for done in dones if done.failure]:
            raise SystemExit(f"a request failed: {failed[0].message}")
        return dones


class Served:
    """An engine with the pair, whose strategy can be changed."""

    def __init__(self, draft: Path) -> None:
        self._metrics = EngineMetrics(RuntimeSettings())
        # Built once: an engine asks for its configuration several times a step.
        self._configs = {name: _config(*strategy) for name, strategy in STRATEGIES.items()}
        self.strategy = "CostModel"
        served = ServedModel(
            name="chat", task=Task.GENERATION, path=str(MODELS / "chat"), draft=Draft(name="draft", path=str(draft))
        )
        self.engine = Engine([served], lambda: self._configs[self.strategy], self._metrics, device="cpu")
        self.engine.start()
        while not self.engine.is_ready:
            if error := self.engine.models["chat"].error:
                raise SystemExit(f"the model can't be loaded: {error}")
            time.sleep(0.05)

    def answer(
        self, prompts: list[list[int]], speculative: bool, sampling: dict[str, float], tokens: int = ANSWER_TOKENS
    ) -> Run:
        collector, before = Collector(), self._draft_seconds()
        requests = [
            Generate(
                id=str(index),
                model="chat",
                token_ids=ids,
                sampling=Sampling(max_tokens=tokens, **sampling),
                speculative=speculative,
            )
            for index, ids in enumerate(prompts)
        ]
        started = time.perf_counter()
        self.engine.submit(collector, requests)
        dones = collector.wait(len(prompts))
        ended = time.perf_counter()
        made, accepted = sum(d.completion_tokens for d in dones), sum(d.accepted_tokens for d in dones)
        return Run(
            tokens=made,
            seconds=ended - started,
            decode_seconds=ended - (collector.first_seconds or started),
            steps=made - accepted - len(dones),
            drafted=sum(d.drafted_tokens for d in dones),
            accepted=accepted,
            draft_seconds=self._draft_seconds() - before,
        )

    def _draft_seconds(self) -> float:
        families = self._metrics.registry.collect()
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == "sixfold_draft_seconds_sum"
        )


@contextmanager
def serving(draft: Path) -> Iterator[Served]:
    served = Served(draft)
    try:
        yield served
    finally:
        served.engine.stop()
