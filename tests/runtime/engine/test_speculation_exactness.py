"""Speculation changes how fast tokens come, and nothing about which: the example pair, in fp32.

Greedy answers are compared with plain decoding of one request at a time, on prompts from the held-out plays
(`heldout_prompts.jsonl`: speeches of Macbeth, The Tempest and Twelfth Night), for every batch size and draft length.
Sampled ones are compared with the model's exact probabilities, and seeded ones token by token.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sixfold_api.generation import DraftLength
from sixfold_api.runtime_config import RuntimeConfig, ServedModel, SpeculativeConfig
from sixfold_api.scalars import Task
from sixfold_runtime.config import default_config
from sixfold_runtime.engine import generation, intake
from sixfold_runtime.engine.generation import GenerationRunner
from sixfold_runtime.engine.loader import LoadedModel, load
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.engine.picker import Picker
from sixfold_runtime.engine.protocol import Chunk, Done, Generate, Sampling
from sixfold_runtime.engine.scheduler import Limits
from sixfold_runtime.settings import RuntimeSettings

HERE = Path(__file__).resolve().parent
MODELS = HERE.parents[2] / "examples" / "models"
TEXTS = [json.loads(line) for line in (HERE / "heldout_prompts.jsonl").read_text("utf-8").splitlines()]
BATCHES, LENGTHS = (1, 4, 8), range(1, 9)


def loaded(name: str) -> LoadedModel:
    return load(ServedModel(name=name, task=Task.GENERATION, path=str(MODELS / name)), torch.device("cpu"))


@pytest.fixture(scope="module")
def chat() -> LoadedModel:
    return loaded("chat")


@pytest.fixture(scope="module")
def draft() -> LoadedModel:
    return loaded("chat-draft")


@pytest.fixture(scope="module")
def prompts(chat: LoadedModel) -> list[list[int]]:
    tokenizer = chat.tokenizer.tokenizer
    return [tokenizer.encode(f"USER:\n{text}\n\nASSISTANT:\n").ids for text in TEXTS]


def with_speculation(tokens: int | None, length: DraftLength = DraftLength.FIXED) -> RuntimeConfig:
    speculative = None if tokens is None else SpeculativeConfig(num_tokens=tokens, length=length)
    config = default_config(2)
    return config.model_copy(update={"stable": config.stable.model_copy(update={"speculative": speculative})})


def answers(
    models: tuple[LoadedModel, LoadedModel],
    requests: Iterable[tuple[list[int], Sampling]],
    config: RuntimeConfig,
    batch: int,
) -> tuple[list[str], list[Done]]:
    """The texts, and how each ended; as many requests at a time as the batch is large."""
    target, draft = models
    limits = Limits(max_running=batch, max_waiting=10_000)
    runner = GenerationRunner(target, limits, lambda: config, EngineMetrics(RuntimeSettings()).of("chat"), draft=draft)
    runner.warm_up(1 << 30)
    texts: dict[str, str] = {}
    dones: dict[str, Done] = {}
    for index, (ids, sampling) in enumerate(requests):
        name = str(index)
        texts[name] = ""
        runner.submit((None, name), Generate(id=name, model="chat", token_ids=ids, sampling=sampling))  # type: ignore[arg-type]
    while runner.running or runner.waiting:
        for _, output in runner.step():
            if isinstance(output, Chunk):
                texts[output.id] += output.text
            else:
                assert output.failure is None
                dones[output.id] = output
    return list(texts.values()), [dones[name] for name in texts]


class TestGreedy:
    @pytest.fixture(scope="class")
    def requests(self, prompts: list[list[int]]) -> list[tuple[list[int], Sampling]]:
        """Answers of 4 to 20 tokens, each 8th one of 64."""
        return [
            (ids, Sampling(temperature=0, max_tokens=64 if index % 8 == 0 else 4 + index * 7 % 17))
            for index, ids in enumerate(prompts)
        ]

    @pytest.fixture(scope="class")
    def plain(self, chat: LoadedModel, draft: LoadedModel, requests: list[tuple[list[int], Sampling]]) -> list[str]:
        return answers((chat, draft), requests, with_speculation(None), 1)[0]

    @pytest.mark.parametrize("batch", BATCHES)
    @pytest.mark.parametrize("length", LENGTHS)
    def test_equals_plain_decoding(
        self,
        chat: LoadedModel,
        draft: LoadedModel,
        requests: list[tuple[list[int], Sampling]],
        plain: list[str],
        batch: int,
        length: int,
    ) -> None:
        texts, dones = answers((chat, draft), requests, with_speculation(length), batch)
        assert len(texts) == 200
        assert sum(a != b for a, b in zip(texts, plain, strict=True)) == 0
        drafted, accepted = sum(done.drafted_tokens for done in dones), sum(done.accepted_tokens for done in dones)
        assert accepted > 0.5 * drafted > 500, "the draft was at work"

    @pytest.mark.parametrize("strategy", [DraftLength.COST_MODEL, DraftLength.STEP_DOWN])
    def test_equals_plain_decoding_with_lengths_that_change(
        self,
        chat: LoadedModel,
        draft: LoadedModel,
        requests: list[tuple[list[int], Sampling]],
        plain: list[str],
        strategy: DraftLength,
    ) -> None:
        assert answers((chat, draft), requests, with_speculation(5, strategy), 8)[0] == plain

    def test_equals_plain_decoding_beyond_what_the_draft_was_distilled_for(
        self, chat: LoadedModel, draft: LoadedModel, prompts: list[list[int]]
    ) -> None:
        long = [token for ids in prompts for token in ids][:2600]
        wanted = [(long[:length], Sampling(temperature=0, max_tokens=24)) for length in (1500, 2040, 2600)]
        plain = answers((chat, draft), wanted, with_speculation(None), 1)[0]
        for strategy in DraftLength:
            assert answers((chat, draft), wanted, with_speculation(5, strategy), 3)[0] == plain


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("length", [1, 3, 5, 8])
def test_seeded_answers_are_the_same_with_and_without(
    chat: LoadedModel, draft: LoadedModel, prompts: list[list[int]], batch: int, length: int
) -> None:
    """Whatever is drafted and whoever shares the batch; with every setting that changes the distribution."""
    settings: list[dict[str, Any]] = [
        {},
        {"top_p": 0.9},
        {"top_k": 20, "temperature": 0.7},
        {"top_p": 0.95, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    ]
    wanted = [
        (ids, Sampling(**{"temperature": 1.0, "max_tokens": 24, "seed": seed, **settings[seed % 4]}))
        for seed, ids in enumerate(prompts[:24])
    ]
    plain = answers((chat, draft), wanted, with_speculation(None), 1)[0]
    texts, dones = answers((chat, draft), wanted, with_speculation(length), batch)
    assert texts == plain
    assert sum(done.accepted_tokens for done in dones) > 0


class TestSampled:
    """Chi-square of what is sampled against the model's exact probabilities, on the real pair.

    Four tokens are drawn after a fixed context, so that the last three come out of a speculative step: accepted,
    resampled after a rejection, or drawn after full acceptance. With top-k 3 there are at most 81 answers, whose exact
    probabilities come from plain forwards. 2,000 answers, seeds fixed; cells that expect fewer than 5 are merged.
    alpha is 0.001. The power against the error that this is for, answers distributed as the draft's own tokens, is
    computed in the test and above 0.999; a test of so many samples and 40 cells finds a deviation of w = 0.2
    (sum of (p' - p)^2 / p of 0.04) with a power of 0.99.
    """

    SAMPLES = 2_000
    TOKENS, TOP_K = 4, 3

    @pytest.mark.parametrize(("length", "prompt"), [(1, 0), (3, 3), (5, 0)])
    def test_follows_the_models_own_distribution(
        self,
        chat: LoadedModel,
        draft: LoadedModel,
        prompts: list[list[int]],
        monkeypatch: pytest.MonkeyPatch,
        length: int,
        prompt: int,
    ) -> None:
        context = prompts[prompt][-12:]
        sampling = Sampling(temperature=1.0, top_k=self.TOP_K, max_tokens=self.TOKENS)
        exact = self._exact(chat, context)
        seeds = itertools.count(1000 * length + prompt)
        monkeypatch.setattr(
            intake, "Picker", lambda *arguments: Picker(*arguments, random=np.random.default_rng(next(seeds)))
        )
        drawn, dones = answers((chat, draft), [(context, sampling)] * self.SAMPLES, with_speculation(length), 32)
        assert 0 < sum(done.accepted_tokens for done in dones) < sum(done.drafted_tokens for done in dones)
        texts = self._by_text(chat, exact)
        assert set(drawn) <= set(texts)
        statistic, degrees = chi_square(Counter(drawn), texts, self.SAMPLES)
        assert chi_square_tail(statistic, degrees) > 0.001
        of_draft = self._by_text(chat, self._exact(draft, context, first=chat))
        effect = sum((of_draft.get(text, 0.0) - p) ** 2 / p for text, p in texts.items())
        assert power(effect * self.SAMPLES, degrees) > 0.999

    def _exact(
        self, model: LoadedModel, context: list[int], first: LoadedModel | None = None
    ) -> dict[tuple[int, ...], float]:
        """Every answer and its probability. With `first` the first token is that model's, as in the engine."""
        probabilities: dict[tuple[int, ...], float] = {(): 1.0}
        for position in range(self.TOKENS):
            asked = first if first is not None and position == 0 else model
            forward = generation.make_forward(asked)
            answers = list(probabilities)
            logits = forward([[*context, *answer] for answer in answers], forward.new_cache(len(answers)))
            top = logits.double().topk(self.TOP_K)
            shares = top.values.softmax(-1)
            probabilities = {
                (*answer, int(top.indices[row, rank])): probabilities[answer] * float(shares[row, rank])
                for row, answer in enumerate(answers)
                for rank in range(self.TOP_K)
            }
        return probabilities

    @staticmethod
    def _by_text(model: LoadedModel, probabilities: dict[tuple[int, ...], float]) -> dict[str, float]:
        texts: dict[str, float] = {}
        for ids, probability in probabilities.items():
            end = next((index for index, token in enumerate(ids) if token in model.eos_ids), len(ids))
            text = model.tokenizer.tokenizer.decode(list(ids[:end]))
            texts[text] = texts.get(text, 0.0) + probability
        return texts


def chi_square(drawn: Counter[str], probabilities: dict[str, float], samples: int) -> tuple[float, int]:
    """Statistic and degrees of freedom; cells that expect fewer than 5 are one."""
    cells = [(drawn[text], samples * probability) for text, probability in probabilities.items()]
    large = [cell for cell in cells if cell[1] >= 5]
    rare = [cell for cell in cells if cell[1] < 5]
    if rare:
        large.append((sum(count for count, _ in rare), sum(expected for _, expected in rare)))
    return sum((count - expected) ** 2 / expected for count, expected in large), len(large) - 1


def chi_square_tail(statistic: float, degrees: int) -> float:
    """P(chi-square > statistic)."""
    return float(torch.special.gammaincc(torch.tensor(degrees / 2).double(), torch.tensor(statistic / 2).double()))


def power(noncentrality: float, degrees: int, alpha: float = 0.001) -> float:
    """Of a chi-square test: the non-central distribution as a Poisson mixture of central ones."""
    low, high = 0.0, 10.0 * degrees + 100
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if chi_square_tail(middle, degrees) > alpha else (low, middle)
    mean = noncentrality / 2
    if mean > 500:  # its weights would underflow, and so far from the null it is certain
        return 1.0
    return sum(
        math.exp(-mean + j * math.log(mean) - math.lgamma(j + 1)) * chi_square_tail(low, degrees + 2 * j)
        for j in range(int(mean + 12 * math.sqrt(mean) + 20))
    )
