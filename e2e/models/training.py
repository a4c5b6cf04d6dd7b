"""Trains the target on the plays and distils the draft from what the target itself writes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from corpus import Corpus
from optimiser import Optimiser, schedule
from progress import Stage
from tiny_llama import KVCache, Shape, TinyLlama, grow
from torch import Tensor


@dataclass(frozen=True)
class Phase:
    """Steps at one depth. ``windows``: (rows, tokens) of successive batches, in turn."""

    layers: int
    steps: int
    windows: tuple[tuple[int, int], ...]
    muon_rate: float
    adam_rate: float
    warm_up: int
    cool_down: int


@dataclass(frozen=True)
class Generation:
    """Texts for the draft: ``batches`` of ``rows`` sequences of ``tokens``, continued from prompts of each length."""

    batches: int
    rows: int
    tokens: int
    prompt_tokens: tuple[int, ...]


TEMPERATURES = (0.0, 0.4, 0.7, 1.0)


def train_target(shape: Shape, phases: tuple[Phase, ...], corpus: Corpus, seed: int) -> TinyLlama:
    """Next-token training, shallow first: the model grows to the next phase's depth without changing its function."""
    model = TinyLlama(Shape(**{**shape.as_dict(), "layers": phases[0].layers}), seed)
    for phase in phases:
        if phase.layers != model.shape.layers:
            model = grow(model, phase.layers, seed)
        optimiser = Optimiser(model)
        stage = Stage(f"target, {phase.layers} layers", phase.steps)
        for step in stage:
            ids = corpus.batch(*phase.windows[step % len(phase.windows)])
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            torch.autograd.backward(loss)
            factor = schedule(step, phase.steps, phase.warm_up, phase.cool_down)
            optimiser.step(factor * phase.muon_rate, factor * phase.adam_rate)
            stage.note = f"loss {loss.item():.3f}"
    return model


@dataclass(frozen=True)
class Sample:
    """What the target wrote and believed: ids (rows, tokens), log-probabilities (rows, tokens, vocabulary) in float16.

    Position t of ``beliefs`` is the target's distribution of the token after ``ids[:, t]``.
    """

    ids: Tensor
    beliefs: Tensor


@torch.no_grad()
def generate(
    model: TinyLlama, prompts: Tensor, tokens: int, temperatures: Tensor, generator: torch.Generator
) -> Sample:
    """Continue ``prompts`` (rows, prompt tokens) to ``tokens`` in all; ``temperatures`` (rows,), 0 is greedy."""
    cache = KVCache(model.shape, len(prompts), tokens)
    ids, beliefs, current = prompts, [], prompts
    while True:
        logits = model(current, cache)
        beliefs.append(logits.log_softmax(-1).half())
        if ids.shape[1] >= tokens:
            return Sample(ids, torch.cat(beliefs, 1))
        last = logits[:, -1]
        sampled = torch.multinomial((last / temperatures.clamp_min(0.1)[:, None]).softmax(-1), 1, generator=generator)
        current = torch.where(temperatures[:, None] == 0, last.argmax(-1, keepdim=True), sampled)
        ids = torch.cat([ids, current], 1)


def write_samples(model: TinyLlama, corpus: Corpus, generations: tuple[Generation, ...], seed: int) -> list[Sample]:
    """The target's own texts for the draft to learn from, greedy to temperature 1, in chat form."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    total = sum(generation.batches for generation in generations)
    stage = Stage("target writes for the draft", total)
    jobs = [(generation, batch) for generation in generations for batch in range(generation.batches)]
    for step in stage:
        generation, batch = jobs[step]
        prompt_tokens = generation.prompt_tokens[batch % len(generation.prompt_tokens)]
        prompts = corpus.prompts(generation.rows, prompt_tokens)
        temperatures = torch.tensor(TEMPERATURES).repeat(generation.rows // len(TEMPERATURES))
        samples.append(generate(model, prompts, generation.tokens, temperatures, generator))
        stage.note = f"{sum(sample.ids.numel() for sample in samples) / 1000:.0f}k tokens"
    return samples


def distil_draft(
    target: TinyLlama, shape: Shape, samples: list[Sample], phase: Phase, batch_tokens: int, seed: int
) -> TinyLlama:
    """Minimise KL(target || draft) over the target's texts (word-level distillation, arXiv 1606.07947).

    The draft starts from the target's embedding. Batches take whole rows, about ``batch_tokens`` tokens at a time.
    """
    draft = TinyLlama(shape, seed)
    with torch.no_grad():
        draft.embedding.copy_(target.embedding)
        draft.final_norm.copy_(target.final_norm)
    optimiser = Optimiser(draft)
    generator = torch.Generator().manual_seed(seed)
    weights = torch.tensor([float(sample.ids.numel()) for sample in samples])
    stage = Stage("draft, 1 layer", phase.steps)
    for step in stage:
        sample = samples[int(torch.multinomial(weights, 1, generator=generator))]
        rows = torch.randperm(len(sample.ids), generator=generator)[: max(1, batch_tokens // sample.ids.shape[1])]
        logits = draft(sample.ids[rows]).flatten(0, 1)
        beliefs = sample.beliefs[rows].float().flatten(0, 1)
        loss = F.kl_div(logits.log_softmax(-1), beliefs, reduction="batchmean", log_target=True)
        torch.autograd.backward(loss)
        factor = schedule(step, phase.steps, phase.warm_up, phase.cool_down)
        optimiser.step(factor * phase.muon_rate, factor * phase.adam_rate)
        stage.note = f"KL {loss.item():.3f}"
    return draft
