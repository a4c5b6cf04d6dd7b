"""The workload through a real engine in this process."""

from __future__ import annotations

import hashlib
import queue
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

import numpy as np
import torch
from prometheus_client.samples import Sample

from sixfold_api.runtime_config import RuntimeConfig
from sixfold_api.scalars import Task
from sixfold_runtime.engine.device import choose_device
from sixfold_runtime.engine.engine import Engine
from sixfold_runtime.engine.kv_messages import erase
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.engine.model import EngineModel
from sixfold_runtime.engine.protocol import Chunk, Classify, Done, Erase, Generate, Request, Sampling
from sixfold_runtime.gate.record import ALL, GateError, Machine, Metric, machine
from sixfold_runtime.gate.workload import Ask, Load, Served
from sixfold_runtime.gateway.errors import ApiError
from sixfold_runtime.gateway.tokenizer import ModelTokenizer
from sixfold_runtime.settings import RuntimeSettings
from sixfold_runtime.waste import wasted_flops_ratio

_ANSWER_SECONDS = 600.0
"""A burst that takes longer never ends."""

_PACE_STEPS, _PACE_WIDTH = 400, 256


@dataclass(frozen=True)
class Repeat:
    """The workload, asked once."""

    figures: dict[tuple[str, Metric], float]
    paces: dict[str, float]
    """By kind, how long a fixed calculation took between its bursts, in seconds."""
    answers: dict[str, list[str]]
    """By kind, a digest of each answer."""
    waste: dict[str, float]
    """By cause, the share of the operations that it wasted."""


class _Inbox:
    """The sink of one burst: when what arrived."""

    def __init__(self, observe: Callable[[], None]) -> None:
        self.dones: queue.SimpleQueue[tuple[Done, float]] = queue.SimpleQueue()
        self.texts: dict[str, list[str]] = {}
        self._observe = observe

    def deliver(self, chunks: Sequence[Chunk], dones: Sequence[Done]) -> None:
        now = time.perf_counter()
        self._observe()
        for chunk in chunks:
            self.texts.setdefault(chunk.id, []).append(chunk.text)
        for done in dones:
            self.dones.put((done, now))


class Bench:
    """An engine that obeys one configuration."""

    def __init__(self, settings: RuntimeSettings, config: RuntimeConfig) -> None:
        """Load the models; takes seconds. Raises GateError: one can't be served."""
        self.metrics = EngineMetrics(settings)
        self.metrics.config_applied(config)
        self._kv_bytes = self._kept_bytes = 0.0
        self._device = settings.device
        told = threading.Event()
        self._engine = Engine(settings.models, lambda: config, self.metrics, device=settings.device, on_models=told.set)
        self._engine.start()
        models = self._engine.models.values()
        while not all(model.is_ready or model.error for model in models) and self._engine.is_alive:
            told.wait(1.0)
            told.clear()
        if reason := self._engine.why_not_ready():
            self.close()
            raise GateError(reason)
        self._tokenizers = {
            model.served.name: ModelTokenizer.from_json(model.facts.tokenizer.bundle) for model in models if model.facts
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._engine.stop()

    @property
    def machine(self) -> Machine:
        device = choose_device(self._device)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return machine(name, torch.get_num_threads())

    @property
    def served(self) -> Served:
        generating, classifying = self._model(generates=True), self._model(generates=False)
        return Served(
            generates=generating is not None,
            context_tokens=0 if generating is None else _context_tokens(generating),
            generation_tasks=_tasks(generating),
            classifies=classifying is not None and bool(classifying.labels),
            classification_tasks=_tasks(classifying),
        )

    def run(self, loads: Sequence[Load]) -> Repeat:
        """Ask all of it once, and forget the keys and values that were kept. Raises GateError: a request fails."""
        self._kv_bytes = self._kept_bytes = 0.0
        before = self._flops()
        figures: dict[tuple[str, Metric], float] = {}
        answers: dict[str, list[str]] = {}
        paces: dict[str, float] = {}
        for load in loads:
            of_load, answers[load.kind], paces[load.kind] = self._load(load)
            figures |= {(load.kind, metric): value for metric, value in of_load.items()}
        flops = self._flops() - before
        total, useful = flops.total(), flops[""]
        weight_bytes = self._sum("sixfold_memory_bytes", kind=("weights", "slices"))
        figures[ALL, Metric.MEMORY_BYTES] = weight_bytes + self._kv_bytes + self._kept_bytes
        if total:  # transformers' own models are not counted
            figures[ALL, Metric.FLOPS] = total / sum(load.requests for load in loads)
            figures[ALL, Metric.WASTED_FLOPS_RATIO] = wasted_flops_ratio(useful, total - useful)
        self._forget()
        waste = {cause: count / total for cause, count in flops.items() if cause}
        return Repeat(figures, paces, answers, waste)

    def _load(self, load: Load) -> tuple[dict[Metric, float], list[str], float]:
        """Its times, a digest of each answer, and the pace meanwhile."""
        paces = [self._pace()]
        dones: list[Done] = []
        latencies: list[float] = []
        answers: list[str] = []
        busy_seconds = 0.0
        for burst in load.bursts:
            inbox = _Inbox(self._observe_memory)
            requests = [self._request(load, ask, str(index)) for index, ask in enumerate(burst)]
            started = time.perf_counter()
            # From within the engine's thread: all of them are there before its next step, every time.
            self._engine.call(partial(self._engine.submit, inbox, requests))
            ended = sorted((self._await(load.kind, inbox) for _ in requests), key=lambda end: int(end[0].id))
            dones += [done for done, _ in ended]
            latencies += [at - started for _, at in ended]
            answers += [_digest(done, inbox.texts.get(done.id, [])) for done, _ in ended]
            busy_seconds += max(at for _, at in ended) - started
            paces.append(self._pace())
            self._kept_bytes = max(self._kept_bytes, self._sum("sixfold_kv_memory_bytes"))
        tokens = sum(done.completion_tokens if load.max_tokens else done.prompt_tokens for done in dones)
        times = {
            Metric.ENGINE_SECONDS: sum(done.engine_seconds for done in dones) / len(dones),
            Metric.P95_SECONDS: float(np.percentile(latencies, 95)),
            Metric.TOKENS_PER_SECOND: tokens / busy_seconds,
        }
        return times, answers, statistics.median(paces)

    def _await(self, kind: str, inbox: _Inbox) -> tuple[Done, float]:
        try:
            done, at = inbox.dones.get(timeout=_ANSWER_SECONDS)
        except queue.Empty:
            raise GateError(f"{kind}: no answer in {_ANSWER_SECONDS:.0f} s") from None
        if done.failure is not None:
            raise GateError(f"{kind}: a request failed: {done.failure.message}")
        return done, at

    def _request(self, load: Load, ask: Ask, name: str) -> Request:
        model = self._model(generates=bool(load.max_tokens))
        assert model is not None and model.facts is not None, "the workload is made of what is served"
        tokenizer, context_tokens = model.facts.tokenizer.tokenizer, _context_tokens(model)
        if not load.max_tokens:
            ids = tokenizer.encode(ask.turns[0]).ids[:context_tokens]
            return Classify(name, model.served.name, ids, task=load.task)
        return Generate(
            id=name,
            model=model.served.name,
            token_ids=self._prompt(model, ask)[-(context_tokens - load.max_tokens) :],
            sampling=Sampling(max_tokens=load.max_tokens, temperature=0.0),
            task=load.task,
            conversation=ask.conversation,
        )

    def _prompt(self, model: EngineModel, ask: Ask) -> list[int]:
        """Through the chat template, where the model has one."""
        assert model.facts is not None
        mine, tokenizer = self._tokenizers[model.served.name], model.facts.tokenizer.tokenizer
        if not mine.has_chat_template:
            return tokenizer.encode("\n".join((*filter(None, [ask.system]), *ask.turns))).ids
        messages = [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(ask.turns)]
        system = [{"role": "system", "content": ask.system}] if ask.system else []
        try:
            text = mine.render(system + messages)
        except ApiError:  # templates without a system role refuse one: the user says it
            messages[0]["content"] = f"{ask.system}\n{messages[0]['content']}"
            text = mine.render(messages)
        return tokenizer.encode(text, add_special_tokens=False).ids

    def _model(self, *, generates: bool) -> EngineModel | None:
        models = self._engine.models.values()
        return next((model for model in models if (model.served.task is Task.GENERATION) == generates), None)

    def _pace(self) -> float:
        """Seconds that a chain of small products takes now, as a decoding step is one."""
        device = choose_device(self._device)
        weights = torch.full((_PACE_WIDTH, _PACE_WIDTH), 1 / _PACE_WIDTH, device=device)
        state = torch.ones(1, _PACE_WIDTH, device=device)
        started = time.perf_counter()
        for _ in range(_PACE_STEPS):
            state = torch.nn.functional.silu(state @ weights) + 1
        state.sum().item()  # waits for an accelerator
        return time.perf_counter() - started

    def _forget(self) -> None:
        """The next repeat finds nothing that this one left."""
        forgotten = threading.Event()
        erase(self._engine, Erase("", ""), lambda _: forgotten.set())
        forgotten.wait(_ANSWER_SECONDS)

    def _observe_memory(self) -> None:
        """After each step: keys and values of running requests."""
        held = sum(model.runner.kv_bytes for model in self._engine.models.values() if model.runner)
        self._kv_bytes = max(self._kv_bytes, held)

    def _flops(self) -> Counter[str]:
        """Of all requests so far, by the cause of their waste; "" is the useful ones."""
        # What the last requests took is counted after their step.
        counted = threading.Event()
        self._engine.call(counted.set)
        counted.wait(_ANSWER_SECONDS)
        found: Counter[str] = Counter()
        for sample in self._samples("sixfold_flops_total"):
            found[sample.labels["cause"]] += round(sample.value)
        return found

    def _sum(self, series: str, **labels: tuple[str, ...]) -> float:
        return sum(
            sample.value
            for sample in self._samples(series)
            if all(sample.labels[name] in values for name, values in labels.items())
        )

    def _samples(self, series: str) -> Iterator[Sample]:
        for family in self.metrics.registry.collect():
            yield from (sample for sample in family.samples if sample.name == series)


def _context_tokens(model: EngineModel) -> int:
    return 0 if model.runner is None else model.runner.context_tokens


def _tasks(model: EngineModel | None) -> tuple[str, ...]:
    """That can be served."""
    if model is None:
        return ()
    return tuple(sorted(task.name for task in model.tasks if task.name not in model.slice_errors))


def _digest(done: Done, texts: Sequence[str]) -> str:
    labels = [score.label for score in done.scores[:1]] + [score.label for score in done.token_labels]
    return hashlib.sha256("\0".join(["".join(texts), *labels]).encode()).hexdigest()[:12]
