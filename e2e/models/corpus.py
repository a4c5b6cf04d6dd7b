"""Training windows out of the plays, in the plays' own speaker tags and in those of a chat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from chat_tokenizer import BEGIN, END, token_id
from plays import CHAT_SPEAKERS, Turn
from tokenizers import Tokenizer
from torch import Tensor


@dataclass(frozen=True)
class Stream:
    """Token ids of one play in one form, with the positions where a window may start."""

    ids: Tensor
    starts: Tensor


def chat_turns(turns: Sequence[Turn], parity: int) -> Iterator[str]:
    """The play as a chat: its turns are given to user and assistant by turns, whoever speaks them."""
    for position, turn in enumerate(turns):
        yield turn.render(CHAT_SPEAKERS[(position + parity) % 2])


class Corpus:
    """Windows of a fixed length: the begin token, then text from the start of a turn on. Deterministic by seed."""

    def __init__(self, tokenizer: Tokenizer, plays: dict[str, tuple[Turn, ...]], seed: int) -> None:
        self.begin = token_id(tokenizer, BEGIN)
        self.end = token_id(tokenizer, END)
        self.generator = torch.Generator().manual_seed(seed)
        self.plain = [_stream(tokenizer, [turn.render() for turn in turns], self.end) for turns in plays.values()]
        # In a chat a window starts where the user speaks: every second turn.
        self.chats = [
            _stream(tokenizer, list(chat_turns(turns, parity)), self.end, first=parity, every=2)
            for turns in plays.values()
            for parity in (0, 1)
        ]

    def batch(self, rows: int, tokens: int) -> Tensor:
        """Ids (rows, tokens + 1): inputs and, shifted by one, targets. Half the rows are chats."""
        return torch.stack([self._window(self.chats if row % 2 else self.plain, tokens) for row in range(rows)])

    def prompts(self, rows: int, tokens: int) -> Tensor:
        """Ids (rows, tokens): chats cut at any place, as prompts to continue."""
        return torch.stack([self._window(self.chats, tokens)[:-1] for _ in range(rows)])

    def _window(self, streams: list[Stream], tokens: int) -> Tensor:
        weights = torch.tensor([float(len(stream.ids)) for stream in streams])
        stream = streams[int(torch.multinomial(weights, 1, generator=self.generator))]
        starts = stream.starts[stream.starts <= len(stream.ids) - tokens]
        start = int(starts[torch.randint(len(starts), (1,), generator=self.generator)])
        return torch.cat([torch.tensor([self.begin]), stream.ids[start : start + tokens]])


def _stream(tokenizer: Tokenizer, turns: list[str], end: int, first: int = 0, every: int = 1) -> Stream:
    pieces = [encoding.ids for encoding in tokenizer.encode_batch(turns, add_special_tokens=False)]
    lengths = torch.tensor([0, *map(len, pieces)])
    ids = torch.tensor([token for piece in pieces for token in piece] + [end])
    return Stream(ids, lengths.cumsum(0)[:-1][first::every])
