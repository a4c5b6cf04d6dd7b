"""The sampler's distribution against that of transformers' logits processors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sixfold_runtime.engine.protocol import Sampling
from sixfold_runtime.engine.sampler import Sampler


@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize("top_k", [0, 30])
@pytest.mark.parametrize("repetition", [1.0, 1.3, 0.8])
def test_it_is_transformers_distribution(repetition: float, top_k: int, top_p: float) -> None:
    prompt, answer = (1, 5, 5, 9), (5, 7, 7, 7)
    logits = (np.random.Generator(np.random.PCG64(3)).standard_normal(500) * 3).astype(np.float32)
    scores = RepetitionPenaltyLogitsProcessor(repetition)(
        torch.tensor([[*prompt, *answer]]), torch.from_numpy(logits)[None]
    )
    for token in set(answer):  # OpenAI's two, in vLLM's place
        scores[0, token] -= 0.6 * answer.count(token) + 0.4
    processors = [TemperatureLogitsWarper(0.7), *([TopKLogitsWarper(top_k)] if top_k else []), TopPLogitsWarper(top_p)]
    for processor in processors:
        scores = processor(None, scores)
    sampling = Sampling(
        max_tokens=1, repetition_penalty=repetition, frequency_penalty=0.6, presence_penalty=0.4,
        temperature=0.7, top_k=top_k, top_p=top_p,
    )  # fmt: skip
    sampler = Sampler(sampling, prompt)
    for token in answer:
        sampler.observe(token)
    distribution = sampler.distribution(logits)
    ours = np.zeros(len(logits))
    ours[distribution.ids] = distribution.probabilities
    assert ours == pytest.approx(scores.softmax(dim=-1)[0].numpy(), abs=2e-6)
