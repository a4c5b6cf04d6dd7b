"""A generated answer computed again, teacher forced: prompt and answer go through level 0's weights, and through those
that answered where they are others. No draft, no keys and values of other requests, no draws.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sixfold_api.scalars import Task
from sixfold_runtime.engine.forward import Forward
from sixfold_runtime.engine.protocol import Sampling
from sixfold_runtime.engine.sampler import Sampler
from sixfold_runtime.engine.sequence import Sequence as Generated
from sixfold_runtime.engine.shadow import GivenUpError, Pieces, ShadowJob, Shadows
from sixfold_runtime.engine.shadow_metrics import ShadowMetrics
from sixfold_runtime.engine.slice_pool import SlicePool
from sixfold_runtime.engine.task_slice import TaskSlice
from sixfold_runtime.modes.shadow import is_sampled

_LOGIT_TOKENS = 64
"""Logits of so many positions are in memory at a time: of a large vocabulary, 40 MB for each set of weights."""


@dataclass(frozen=True, eq=False)
class ShadowSide:
    """A set of weights as a comparison uses it."""

    forward: Forward
    """Of its own: what the last call cost is the runner's to read."""
    slices: SlicePool | None
    device: torch.device
    vocabulary_tokens: int
    """Logits beyond are padding."""
    piece_tokens: int
    """Of a prompt, computed at a time."""
    max_cache_bytes: int
    """Of keys and values of one comparison."""


class Answered(Protocol):
    """Told of every complete answer."""

    def __call__(self, sequence: Generated, side: ShadowSide, metrics: ShadowMetrics) -> None:
        """`side` are the weights that gave it, `metrics` theirs."""


@dataclass(frozen=True)
class GenerationShadow:
    """Takes the answers of one model."""

    shadows: Shadows
    level_0: Callable[[], ShadowSide | None]
    """None while the full weights aren't in memory."""

    def answered(self, sequence: Generated, side: ShadowSide, metrics: ShadowMetrics) -> None:
        """Compare an answer some time, if it is one of those.

        Level 0 isn't compared with itself. On the same weights only a greedy answer can be told from level 0's:
        drawn tokens differ from the likeliest ones at level 0 too.
        """
        request, level_0 = sequence.request, self.level_0()
        if level_0 is None or sequence.level == 0 or not is_sampled(request.id, sequence.shadow_rate):
            return
        other = None if level_0 is side else side
        if other is None and request.sampling.temperature > 0:
            return
        tokens = array("i", sequence.context)
        answer = _Answer(tokens, len(request.token_ids), request.sampling, request.task)

        def start() -> Pieces:
            return _Comparison(answer, level_0, other).run(
                lambda agree, differ, kl_nats: metrics.tokens(sequence_level, arm, agree, differ, kl_nats)
            )

        sequence_level, arm = sequence.level, sequence.arm
        self.shadows.offer(ShadowJob(metrics, Task.GENERATION.value, sequence_level, arm, start))


@dataclass(frozen=True)
class _Answer:
    tokens: array[int]
    """Prompt and answer."""
    prompt_tokens: int
    sampling: Sampling
    task: str
    """Its task slice; "" is none."""


class _Comparison:
    """One answer on its way through the weights."""

    def __init__(self, answer: _Answer, level_0: ShadowSide, served: ShadowSide | None) -> None:
        """`served`: None where level 0's weights have answered."""
        self._answer = answer
        self._level_0 = level_0
        self._served = served
        self._sampler = Sampler(answer.sampling, answer.tokens[: answer.prompt_tokens])
        self._agree = self._differ = 0
        self._kl_nats = 0.0
        self._is_same = True

    def run(self, count: Callable[[int, int, float], None]) -> Pieces:
        """`count` gets the tokens that agree and differ, and the sum of their KL, when all are compared."""
        sides = [side for side in (self._level_0, self._served) if side is not None]
        passes: list[_Pass] = []
        try:
            for side in sides:
                passes.append(_Pass(side, self._answer.task, len(self._answer.tokens)))
            for piece in self._prompt_pieces():
                for each in passes:
                    each.feed(piece)
                    yield
            for first, piece, following in self._answer_pieces():
                logits = []
                for each in passes:
                    logits.append(each.logits(piece))
                    if each is not passes[-1]:
                        yield
                self._compare(logits, following)
                if first + len(piece) < len(self._answer.tokens) - 1:
                    yield
        finally:
            for each in passes:
                each.close()
        count(self._agree, self._differ, self._kl_nats)
        return self._is_same

    def _prompt_pieces(self) -> Iterator[list[int]]:
        """All but the prompt's last token, after which the answer's first comes."""
        end, step = self._answer.prompt_tokens - 1, self._level_0.piece_tokens
        for start in range(0, end, step):
            yield self._answer.tokens[start : min(start + step, end)].tolist()

    def _answer_pieces(self) -> Iterator[tuple[int, list[int], list[int]]]:
        """Where a piece begins, its tokens, and the answer's token after each of them."""
        tokens, step = self._answer.tokens, min(_LOGIT_TOKENS, self._level_0.piece_tokens)
        last = len(tokens) - 1
        for start in range(self._answer.prompt_tokens - 1, last, step):
            end = min(start + step, last)
            yield start, tokens[start:end].tolist(), tokens[start + 1 : end + 1].tolist()

    @torch.inference_mode()
    def _compare(self, logits: list[torch.Tensor], answer: list[int]) -> None:
        """`logits`: [tokens, vocabulary] of level 0, and of the others if there are some."""
        chosen = self._choices(logits[0], answer)
        if len(logits) == 1:
            same = [token == choice for token, choice in zip(answer, chosen, strict=True)]
            self._is_same &= all(same)
        else:
            same = (logits[0].argmax(dim=-1) == logits[1].argmax(dim=-1)).tolist()
            self._is_same &= chosen == answer if self._sampler.is_greedy else all(same)
            self._kl_nats += _kl_nats(logits[0], logits[1])
        self._agree += sum(same)
        self._differ += len(same) - sum(same)

    def _choices(self, logits: torch.Tensor, answer: list[int]) -> list[int]:
        """What level 0 picks for a greedy request, each token after the answer's before it."""
        if not self._sampler.is_penalised:
            likeliest: list[int] = logits.argmax(dim=-1).tolist()
            return likeliest
        chosen = []
        for row, token in zip(logits.cpu().numpy(), answer, strict=True):
            chosen.append(self._sampler.draw(row))
            self._sampler.observe(token)
        return chosen


class _Pass:
    """One sequence through one set of weights."""

    def __init__(self, side: ShadowSide, task: str, tokens: int) -> None:
        """Raises GivenUpError: the task's slice isn't in memory there."""
        self._side = side
        self._task = task
        self._tokens = tokens
        self._slice: TaskSlice | None = None
        if task:
            self._slice = None if side.slices is None else side.slices.borrow(task)
            if self._slice is None:
                raise GivenUpError(f"the slice of task {task} isn't in memory")
        self._cache = side.forward.new_cache(1)

    def feed(self, tokens: Sequence[int]) -> None:
        self._forward(tokens, every_position=False)
        if self._side.device.type == "cuda":
            # Or pieces would pile up in the device's queue, and a request would wait for all of them.
            torch.cuda.synchronize(self._side.device)

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """float32 [tokens, vocabulary] after each token."""
        logits = self._forward(tokens, every_position=True)[0, :, : self._side.vocabulary_tokens]
        if not bool(torch.isfinite(logits).all()):
            raise GivenUpError("level 0 or the weights that answered compute NaN or infinite logits")
        return logits

    def close(self) -> None:
        self._cache.clear()
        if self._slice is not None and self._side.slices is not None:
            self._slice = None
            self._side.slices.release(self._task)

    def _forward(self, tokens: Sequence[int], *, every_position: bool) -> torch.Tensor:
        slices = None if self._slice is None else [self._slice]
        logits = self._side.forward([tokens], self._cache, every_position=every_position, slices=slices)
        if self._cache.bytes_per_token * self._tokens > self._side.max_cache_bytes:
            raise GivenUpError(f"{self._tokens} tokens are too many for the memory that is left to comparisons")
        return logits


def _kl_nats(level_0: torch.Tensor, served: torch.Tensor) -> float:
    """KL(level 0 || served), summed over positions; float32 logits [positions, vocabulary]."""
    first, second = (torch.log_softmax(logits, dim=-1) for logits in (level_0, served))
    return float((first.exp() * (first - second)).sum(dim=-1).double().sum())
