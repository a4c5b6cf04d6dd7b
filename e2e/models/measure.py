"""Figures of the chat pair on the held-out plays: perplexity, how often the draft is right, what a step costs."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from chat_tokenizer import BEGIN, CHAT_TEMPLATE, token_id
from corpus import chat_turns
from jinja2 import Environment
from plays import Turn, render_turns
from tiny_llama import KVCache, TinyLlama
from tokenizers import Tokenizer
from torch import Tensor
from training import generate

ROWS_AT_ONCE = 4


@dataclass(frozen=True)
class PairFigures:
    """Perplexities are per token; "chat" has user and assistant as speakers, "long" counts positions 1,024 to 2,048.

    ``acceptance[i]``: share of the draft's token i + 1 accepted where all before it were, greedy decoding.
    """

    target_perplexity: float
    target_perplexity_chat: float
    target_perplexity_long: float
    draft_perplexity: float
    acceptance: tuple[float, ...]
    agreement: float
    target_step_ms: float
    draft_step_ms: float


def render_chat(messages: Sequence[dict[str, str]]) -> str:
    """The prompt of a chat, as the checkpoint's template renders it."""
    template = Environment().from_string(CHAT_TEMPLATE)
    return template.render(messages=messages, bos_token=BEGIN, add_generation_prompt=True)


def encode_chat(tokenizer: Tokenizer, messages: Sequence[dict[str, str]]) -> list[int]:
    ids: list[int] = tokenizer.encode(render_chat(messages), add_special_tokens=False).ids
    return ids


@torch.no_grad()
def perplexity(
    model: TinyLlama, tokenizer: Tokenizer, texts: Sequence[str], window_tokens: int, skip_tokens: int = 0
) -> float:
    """Per-token perplexity over whole windows, each with its own begin token; the first ``skip_tokens`` don't count."""
    begin = token_id(tokenizer, BEGIN)
    windows = []
    for text in texts:
        ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids)
        rows = ids[: len(ids) // window_tokens * window_tokens].view(-1, window_tokens)
        windows.append(torch.cat([torch.full((len(rows), 1), begin), rows], 1))
    nats, counted = 0.0, 0
    for batch in torch.split(torch.cat(windows), ROWS_AT_ONCE):
        logits = model(batch[:, :-1])[:, skip_tokens:]
        targets = batch[:, 1 + skip_tokens :]
        nats += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
        counted += targets.numel()
    return math.exp(nats / counted)


@torch.no_grad()
def greedy_agreement(target: TinyLlama, draft: TinyLlama, prompt: list[int], tokens: int) -> Tensor:
    """Booleans (tokens,): is the draft's first choice the target's, along the target's own greedy text."""
    ids = torch.tensor([prompt])
    sample = generate(target, ids, len(prompt) + tokens, torch.zeros(1), torch.Generator())
    choices = draft(sample.ids).argmax(-1)
    agreement: Tensor = choices[0, len(prompt) - 1 : -1] == sample.ids[0, len(prompt) :]
    return agreement


def conditional_acceptance(agreements: Sequence[Tensor], positions: int) -> tuple[float, ...]:
    """Share accepted at each draft position, of those drafts whose earlier tokens were all accepted."""
    tried, accepted = [0] * positions, [0] * positions
    for agreement in agreements:
        start = 0
        flags = agreement.tolist()
        while start + positions <= len(flags):
            run = next((i for i in range(positions) if not flags[start + i]), positions)
            for position in range(min(run + 1, positions)):
                tried[position] += 1
                accepted[position] += position < run
            start += run + 1
    return tuple(right / max(all_, 1) for right, all_ in zip(accepted, tried, strict=True))


@torch.no_grad()
def step_seconds(model: TinyLlama, prompt: list[int], steps: int = 60) -> float:
    """Median time of one decoding step at batch 1, after the prompt."""
    cache = KVCache(model.shape, 1, len(prompt) + steps)
    token = model(torch.tensor([prompt]), cache)[:, -1:].argmax(-1)
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        token = model(token, cache).argmax(-1)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure_pair(
    target: TinyLlama,
    draft: TinyLlama,
    tokenizer: Tokenizer,
    plays: Mapping[str, Sequence[Turn]],
    chats: Sequence[Sequence[dict[str, str]]],
) -> PairFigures:
    """All figures of the pair on held-out plays and on chats out of them."""
    texts = [render_turns(turns) for turns in plays.values()]
    as_chats = ["".join(chat_turns(turns, parity=0)) for turns in plays.values()]
    prompts = [encode_chat(tokenizer, chat) for chat in chats]
    agreements = [greedy_agreement(target, draft, prompt, tokens=96) for prompt in prompts]
    return PairFigures(
        target_perplexity=perplexity(target, tokenizer, texts, window_tokens=512),
        target_perplexity_chat=perplexity(target, tokenizer, as_chats, window_tokens=512),
        target_perplexity_long=perplexity(target, tokenizer, texts, window_tokens=2048, skip_tokens=1024),
        draft_perplexity=perplexity(draft, tokenizer, texts, window_tokens=512),
        acceptance=conditional_acceptance(agreements, positions=5),
        agreement=torch.cat(agreements).float().mean().item(),
        target_step_ms=1000 * step_seconds(target, prompts[0]),
        draft_step_ms=1000 * step_seconds(draft, prompts[0]),
    )
