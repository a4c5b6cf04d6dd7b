"""Texts that no label is sure enough for: the policy's generating model names a label and says why."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from sixfold_api.classification import TEXT_PLACE
from sixfold_api.runtime_config import EscalateConfig
from sixfold_api.scalars import Task
from sixfold_runtime.engine.protocol import Chunk, Done, Generate, Sampling
from sixfold_runtime.gateway.core import Gateway
from sixfold_runtime.gateway.dispatch import Call, Restarted
from sixfold_runtime.gateway.exchange import Exchange
from sixfold_runtime.gateway.generation import allowed_tokens
from sixfold_runtime.gateway.pool import Choice

LABELS_PLACE = "{labels}"
_PLACES = re.compile("|".join(map(re.escape, (TEXT_PLACE, LABELS_PLACE))))
_NO_SPACES_FROM = "\u2e80"
"""From here on are scripts without spaces between words, such as Chinese."""


def written_prompt(template: str, text: str, labels: Sequence[str]) -> str:
    """The template with text and labels in their places. Nothing else in it, or in the text, means anything.

    >>> written_prompt("Is {text} {labels}? {}", "a {labels} film", ["good", "bad", "so-so"])
    'Is a {labels} film good, bad or so-so? {}'
    """
    listed = " or ".join(filter(None, (", ".join(labels[:-1]), *labels[-1:])))
    return _PLACES.sub(lambda place: text if place.group() == TEXT_PLACE else listed, template)


def named_label(answer: str, labels: Sequence[str]) -> str | None:
    """The label that the answer names first, as a whole word in any case; of two at one place the longer.

    >>> named_label("Very Good, I would say, not bad.", ["good", "bad", "very good"])
    'very good'
    """
    longest_first = sorted(filter(None, labels), key=len, reverse=True)
    if not longest_first:
        return None
    found = re.search("|".join(f"({_whole_word(label)})" for label in longest_first), answer, re.IGNORECASE)
    return None if found is None else longest_first[(found.lastindex or 1) - 1]


def _whole_word(label: str) -> str:
    """Where words have spaces around them, no letter or digit may be next to a letter or digit of the label."""
    before, after = (
        character < _NO_SPACES_FROM and (character.isalnum() or character == "_") for character in (label[0], label[-1])
    )
    return r"(?<!\w)" * before + re.escape(label) + r"(?!\w)" * after


@dataclass(frozen=True)
class Reasoned:
    """What the generating model said."""

    answer: str
    label: str | None
    """None: it names none of the labels."""
    prompt_tokens: int
    completion_tokens: int


async def reason(
    gateway: Gateway, exchange: Exchange, config: EscalateConfig, text: str, labels: Sequence[str]
) -> Reasoned:
    """Ask the generating model, greedily; cancelling this cancels that.

    Raises:
        ApiError: it can't be asked, or gave no answer.
    """
    prompt = written_prompt(config.prompt_template, text, labels)

    async def build(choice: Choice) -> Generate:
        context_tokens, is_chat = choice.model.context_tokens, choice.tokenizer.has_chat_template
        if is_chat:
            ids = await choice.tokenizer.encode_chat([{"role": "user", "content": prompt}], context_tokens)
        else:
            ids = await choice.tokenizer.encode(prompt, context_tokens)
        most = allowed_tokens(len(ids), context_tokens, None, config.max_tokens)
        sampling = Sampling(max_tokens=most, temperature=0.0, stop=choice.model.stop if is_chat else ())
        return Generate(secrets.token_hex(12), choice.model.name, ids, sampling, exchange.tenant, exchange.arm)

    # An engine that isn't ready is not waited for: there is a label to give meanwhile.
    call = Call(
        gateway.settings.policy,
        Task.GENERATION,
        build,
        buffered=True,
        wait_seconds=0.0,
        priority=exchange.terms.priority,
        deadline_seconds=exchange.deadline.seconds,
    )
    pieces: list[str] = []
    prompt_tokens = completion_tokens = 0
    part = exchange.part()
    try:
        async with aclosing(gateway.dispatcher.events(call, part)) as events:
            async for event in events:
                match event:
                    case Chunk():
                        pieces.append(event.text)
                    case Restarted():
                        pieces.clear()
                    case Done():
                        prompt_tokens, completion_tokens = event.prompt_tokens, event.completion_tokens
    finally:
        exchange.merge(part)
    answer = "".join(pieces).strip()
    return Reasoned(answer, named_label(answer, labels), prompt_tokens, completion_tokens)
