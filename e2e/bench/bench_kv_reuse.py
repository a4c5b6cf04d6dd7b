"""Time to first token of a dialogue's turns with keys and values found in Redis, over computing them.

Four turns: a short message of the user's and a long answer each, so that the history has about 1,024 tokens at turn 2
and 3,072 at turn 4. Every turn is served by a fresh engine process, whose memory holds nothing yet, with a real Redis
beside it; the same prompt goes to a fresh process that reuses nothing, just before or after it in turns. Times are
from submitting to the first token; the ratio of the processes' CPU times stands beside, for machines that have other
things to do. The history is what was computed, token by token: a model that is sampled from now and
then spells a word with other tokens than its tokenizer would, and reuse ends there when a client sends the text back.
How much of the history is found in that case, with answers that end where the model's do, stands beside it.

Then: from which length of prompt on it pays, by blocks that come from Redis, and what the engine itself makes of it;
and what 8 and 4 bits do to keys, values and the perplexity of a text that goes on from them.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from batch_executors import MODEL
from kv_quality import quality
from peer import Peer
from redis_server import RedisServer, write_directory
from stack import REPOSITORY
from transformers import AutoTokenizer

sys.path.insert(0, str(REPOSITORY / "e2e" / "models"))
import plays

TURNS, TURN_TOKENS, MESSAGE_TOKENS = 4, 1024, (60, 140)
GOALS = {"turn_2": 0.36, "turn_4": 0.21}
LEAST_PSNR_DB, MOST_PERPLEXITY_CHANGE_PERCENT = 42.0, 0.5
HISTORIES = (1024, 3072)
LENGTHS = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
NEW_TOKENS = 16
VOCABULARY = range(5, 1000)
MEMORY_BYTES, NO_MEMORY = 256 << 20, 1
"""Of an engine's own tier. One byte holds no block: each comes from Redis."""


@dataclass(frozen=True)
class Turn:
    """A prompt, served both ways."""

    number: int
    prompt_tokens: int
    cached_tokens: int
    reused_seconds: float
    computed_seconds: float
    reused_cpu_seconds: float
    computed_cpu_seconds: float
    lookup_seconds: float
    faults: float
    """Of Redis, such as answers that took too long: where the machine is overloaded, less is found."""


@contextmanager
def engine(
    redis: Path | None, memory_bytes: int = MEMORY_BYTES, min_prompt_tokens: int | None = None
) -> Iterator[Peer]:
    """A fresh process; without `redis` nothing is reused."""
    least = "-" if min_prompt_tokens is None else min_prompt_tokens
    process = Peer(Path(sys.prefix), "kv_engine.py", redis or "-", memory_bytes, least)
    try:
        yield process
    finally:
        process.stop()


class Talk:
    """Messages of the user's, and the model's tokenizer."""

    def __init__(self) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(MODEL)
        speeches = [turn.speech for play in plays.held_out_plays().values() for turn in play]
        least, most = MESSAGE_TOKENS
        self._messages = [text for text in speeches if least <= len(self.tokens(text)) <= most]
        random.Random(0).shuffle(self._messages)

    def message(self) -> str:
        return self._messages.pop()

    def prompt(self, chat: Sequence[dict[str, str]]) -> list[int]:
        """Of a whole chat, as the gateway renders it."""
        return self.tokens(self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))

    def next_prompt(self, history: Sequence[int]) -> list[int]:
        """Another message behind the tokens so far."""
        turn = f"\n\nUSER:\n{self.message()}\n\nASSISTANT:\n"
        return [*history, *self.tokens(turn if history else turn.lstrip())]

    def tokens(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens


def dialogue(redis: Path, talk: Talk, reused_first: bool, quick: bool) -> list[Turn]:
    """The turns that both ways are compared at."""
    turns, history = [], list[int]()
    for number in range(1, TURNS + 1):
        prompt = talk.next_prompt(history)
        with engine(redis) as reusing:
            if number == TURNS or (number > 1 and not (quick and number == TURNS - 1)):
                with engine(None) as computing:
                    turns.append(compared(number, prompt, reusing, computing, reused_first))
                print(turns[-1], flush=True)
                reused_first = not reused_first
            if number < TURNS:
                answer_tokens = max(1, number * TURN_TOKENS - len(prompt))
                question = {"token_ids": prompt, "max_tokens": answer_tokens, "temperature": 1.0}
                history = [*prompt, *reusing.ask(question)["answer"]]
    return turns


def compared(number: int, prompt: list[int], reusing: Peer, computing: Peer, reused_first: bool) -> Turn:
    """A first token from each of two fresh processes."""
    answers = {}
    for process in (reusing, computing) if reused_first else (computing, reusing):
        answers[process] = process.ask({"token_ids": prompt, "max_tokens": 1})
    reused, computed = answers[reusing], answers[computing]
    return Turn(
        number=number,
        prompt_tokens=len(prompt),
        cached_tokens=reused["cached_tokens"],
        reused_seconds=reused["first_seconds"],
        computed_seconds=computed["first_seconds"],
        reused_cpu_seconds=reused["first_cpu_seconds"],
        computed_cpu_seconds=computed["first_cpu_seconds"],
        lookup_seconds=reused["lookup_seconds"],
        faults=reused["faults"],
    )


def dialogues(redis: Path, talk: Talk, quick: bool) -> dict[str, Any]:
    turns = [turn for index in range(1 if quick else 5) for turn in dialogue(redis, talk, bool(index % 2), quick)]
    return {
        f"turn_{number}": summary([turn for turn in turns if turn.number == number])
        for number in sorted({turn.number for turn in turns})
    }


def summary(turns: Sequence[Turn]) -> dict[str, Any]:
    """Medians over dialogues."""
    ratios = [turn.reused_seconds / turn.computed_seconds for turn in turns]
    cpu_ratios = [turn.reused_cpu_seconds / turn.computed_cpu_seconds for turn in turns]
    names = ("prompt_tokens", "cached_tokens", "reused_seconds", "computed_seconds", "lookup_seconds", "faults")
    return {
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "cpu_ratio": round(statistics.median(cpu_ratios), 3),
        **{name: round(statistics.median(getattr(turn, name) for turn in turns), 4) for name in names},
    }


def found_of_chats(redis: Path, talk: Talk, quick: bool) -> float:
    """The share of the history that is found where it comes back as text, and answers end where the model's do."""
    cached = history = 0
    with engine(redis) as process:
        for _ in range(2 if quick else 10):
            chat: list[dict[str, str]] = []
            before = 0
            for _ in range(TURNS):
                chat.append({"role": "user", "content": talk.message()})
                prompt = talk.prompt(chat)
                question = {"token_ids": prompt, "max_tokens": 200, "temperature": 1.0, "stop": ["\n\n"]}
                answer = process.ask(question)
                chat.append({"role": "assistant", "content": answer["text"]})
                cached, history = cached + answer["cached_tokens"], history + before
                before = len(prompt) + len(answer["answer"])
    return round(cached / history, 3)


def from_which_length(redis: Path, quick: bool) -> dict[str, Any]:
    """Ratios of times to first token where so many leading tokens are found in Redis, and 16 are new."""
    source, ratios, incomplete = random.Random(1), dict[int, float](), 0
    with engine(redis, NO_MEMORY, min_prompt_tokens=1) as process:
        for length in LENGTHS[:: 3 if quick else 1]:
            prefix = source.choices(VOCABULARY, k=length)
            process.ask({"token_ids": [*prefix, 5], "max_tokens": 1})
            pairs = []
            for number in range(4 if quick else 9):
                new, times = source.choices(VOCABULARY, k=NEW_TOKENS), {}
                for reuses in (True, False) if number % 2 else (False, True):
                    answer = process.ask({"token_ids": [*prefix, *new], "max_tokens": 1, "kv_reuse": reuses})
                    times[reuses] = answer["first_seconds"]
                    # Less is found where Redis answers too late, as on an overloaded machine; it counts all the same.
                    incomplete += reuses and answer["cached_tokens"] < length
                pairs.append(times[True] / times[False])
            ratios[length] = round(statistics.median(pairs), 3)
    print(f"time to first token by leading tokens found, over computing them: {ratios}", flush=True)
    pays = [length for length in ratios if all(ratios[other] < 1 for other in ratios if other >= length)]
    found = {"ratios": ratios, "pays_from_tokens": min(pays, default=None), "incomplete_lookups": incomplete}
    return {**found, **by_the_engine(redis, quick)}


def by_the_engine(redis: Path, quick: bool) -> dict[str, Any]:
    """From which length on an engine looks prompts up that nobody gave a length, after some of all lengths."""
    source, answer = random.Random(2), {}
    with engine(redis, NO_MEMORY) as process:
        for _ in range(10 if quick else 40):
            prefix = source.choices(VOCABULARY, k=source.choice(LENGTHS))
            for _ in range(2):
                new = source.choices(VOCABULARY, k=NEW_TOKENS)
                answer = process.ask({"token_ids": [*prefix, *new], "max_tokens": 1})
    return {"engine_looks_up_from_tokens": answer["least_tokens"], "engine_skipped_blocks": answer["skipped_blocks"]}


def run(quick: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder) / "redis") as server:
        redis = write_directory(Path(folder) / "address", server.url)
        talk = Talk()
        turns = dialogues(redis, talk, quick)
        memory = server.cli("INFO", "memory")
        found = found_of_chats(redis, talk, quick)
        lengths = from_which_length(redis, quick)
    rounding = [quality(history, 2 if quick else 12) for history in HISTORIES[: 1 if quick else None]]
    for figures in rounding:
        print(figures, flush=True)
    psnr = min(figures["int8"]["worst_psnr_db"] for figures in rounding)
    change = max(abs(figures["int8"]["perplexity_change_percent"]) for figures in rounding)
    shares = {
        **{name: goal / turns[name]["ratio"] for name, goal in GOALS.items()},
        "psnr": psnr / LEAST_PSNR_DB,
        "perplexity": MOST_PERPLEXITY_CHANGE_PERCENT / max(change, 0.001),
    }
    hardest = min(shares, key=shares.__getitem__)
    used = next(line for line in memory.splitlines() if line.startswith("used_memory:"))
    return {
        # The goal that is the hardest to reach decides.
        "ratio": round(shares[hardest], 3),
        "goal": 1.0,
        "hardest": hardest,
        "goals": {**GOALS, "psnr_db": LEAST_PSNR_DB, "perplexity_change_percent": MOST_PERPLEXITY_CHANGE_PERCENT},
        **turns,
        "redis_bytes": int(used.split(":")[1]),
        "found_share_of_chats": found,
        "lengths": lengths,
        "rounding": rounding,
    }
