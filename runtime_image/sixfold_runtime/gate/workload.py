"""What the gate asks of a candidate: a fixed workload, drawn with a seed from sentences that never change. Pure."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

SEED = 20_260
BURST_REQUESTS = 4
"""That arrive together: enough for batches to form."""
TURNS = 6
"""Of a dialogue: each prompt holds all turns before it."""
SHORT_TOKENS, DIALOGUE_TOKENS = 32, 24
"""Of an answer, at most."""
_SYSTEM_SENTENCES = 24
_TOKENS_A_SENTENCE = 100
"""Of the context that a sentence of the system prompt is given, and the turns behind it with it: a small context gets
a short dialogue."""

_SENTENCES = (
    "The delivery came two days late and the box was open.",
    "I would watch this film again tomorrow.",
    "What news do you bring from the harbour?",
    "My order number is forty-two, and nobody answers the telephone.",
    "The second half drags, but the ending makes up for it.",
    "Speak plainly, for I have ridden all night.",
    "Please cancel the subscription at the end of the month.",
    "A dull story, badly told, with one good song.",
    "The garden was quiet, and the old dog slept by the gate.",
    "How do I change the address of my account?",
    "The actors are wonderful and the picture is a joy to look at.",
    "The king has sent three letters and received none.",
    "I want my money back.",
    "It works exactly as described, and setting it up took a minute.",
    "Tell me what happened after the storm.",
    "The screen flickers whenever the battery is low.",
    "No one in the audience laughed, not even once.",
    "She sold the house by the river and moved to the city.",
    "Where can I find the invoice of last year?",
    "A warm, clever and surprising comedy.",
    "The train to the coast leaves at seven every morning.",
    "He spoke of honour, and of bread, and then of nothing.",
    "The new version is slower than the old one.",
    "I can't recommend this to anyone.",
)


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        turns: what user and assistant say in turn, the user first and last; a text to classify is one turn.
        system: what stands before them.
        conversation: its name; "" is none.
    """

    turns: tuple[str, ...]
    system: str = ""
    conversation: str = ""


@dataclass(frozen=True)
class Load:
    """Requests of one kind, in bursts: the next one arrives when the last one is answered."""

    kind: str
    bursts: tuple[tuple[Ask, ...], ...]
    task: str = ""
    """The task slice; "" is the model's own head."""
    max_tokens: int = 0
    """0: the text is classified."""

    @property
    def requests(self) -> int:
        return sum(map(len, self.bursts))


@dataclass(frozen=True)
class Served:
    """What of a policy the workload depends on: never on the names of its variants, which a candidate may change."""

    generates: bool = False
    context_tokens: int = 0
    """Of the model that generates."""
    generation_tasks: tuple[str, ...] = ()
    classifies: bool = False
    """By a head of its own."""
    classification_tasks: tuple[str, ...] = ()


def workload(served: Served, requests: int, seed: int = SEED) -> tuple[Load, ...]:
    """About so many requests of each kind that is served; the same for the same arguments."""
    return tuple(_loads(served, requests, seed))


def digest(loads: Sequence[Load]) -> str:
    """Tells workloads apart: figures of different ones can't be compared."""
    content = json.dumps([asdict(load) for load in loads], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _loads(served: Served, requests: int, seed: int) -> Iterator[Load]:
    if served.generates:
        yield Load("generate short", _short(requests, seed, "generate short"), max_tokens=SHORT_TOKENS)
        yield Load("generate dialogue", _dialogues(requests, seed, served.context_tokens), max_tokens=DIALOGUE_TOKENS)
    for task in served.generation_tasks:
        kind = f"generate task {task}"
        yield Load(kind, _short(requests, seed, kind), task, SHORT_TOKENS)
    if served.classifies:
        yield Load("classify text", _short(requests, seed, "classify text", most_sentences=3))
    for task in served.classification_tasks:
        kind = f"classify task {task}"
        yield Load(kind, _short(requests, seed, kind, most_sentences=3), task)


def _short(requests: int, seed: int, kind: str, most_sentences: int = 2) -> tuple[tuple[Ask, ...], ...]:
    """Each with words of its own: nothing to find again, lengths that differ."""
    dice = random.Random(f"{seed} {kind}")
    asks = [Ask((_text(dice, dice.randint(1, most_sentences)),)) for _ in range(requests)]
    return tuple(tuple(asks[start : start + BURST_REQUESTS]) for start in range(0, requests, BURST_REQUESTS))


def _dialogues(requests: int, seed: int, context_tokens: int) -> tuple[tuple[Ask, ...], ...]:
    """Conversations behind one long system prompt; every burst is one turn of some of them.

    What the assistant said is scripted, so that all candidates are asked the same."""
    dice = random.Random(f"{seed} dialogue")
    sentences = max(1, min(_SYSTEM_SENTENCES, context_tokens // _TOKENS_A_SENTENCE))
    system, turns = _text(dice, sentences), min(TURNS, sentences)
    bursts = []
    conversations = max(1, requests // turns)
    for start in range(0, conversations, BURST_REQUESTS):
        names = range(start, min(start + BURST_REQUESTS, conversations))
        said = {name: tuple(_text(dice, 1) for _ in range(2 * turns - 1)) for name in names}
        bursts += [
            tuple(Ask(said[name][: 2 * turn + 1], system, f"conversation-{name}") for name in names)
            for turn in range(turns)
        ]
    return tuple(bursts)


def _text(dice: random.Random, sentences: int) -> str:
    return " ".join(dice.choice(_SENTENCES) for _ in range(sentences))
